"""Conversations with tools, parts and reasoning: what templates in the manner of eleven model families make
of them is what `transformers` makes of them."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.tiny_tokenizers import byte_level_bpe

from pageturner.service.engine.api import ChatMessage, ChatPrompt, ToolCall
from pageturner.service.engine.chat_template import MAX_RENDERED_CHARACTERS, ChatTemplate
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.errors import InvalidArgument

FOLDER = Path(__file__).parent / "templates"
FAMILIES = tuple(sorted(path.stem for path in FOLDER.glob("*.jinja")))
SPECIAL = {"bos_token": "<|start|>", "eos_token": "<|end|>"}

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place — now & soon",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = {
    "type": "function",
    "id": "abcdefghi",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich"}},
}
ASKED = [{"role": "user", "content": " What is the weather in Zürich? "}]
ANSWERED: list[dict[str, Any]] = [
    *ASKED,
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": '{"celsius": 7}'},
]
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "plain": {
        "messages": [*ASKED, {"role": "assistant", "content": "Cold."}, {"role": "user", "content": "Why?"}]
    },
    "system": {"messages": [{"role": "system", "content": "Be brief."}, *ASKED]},
    "tools": {"messages": ASKED, "tools": [WEATHER, WEATHER]},
    "result": {"messages": ANSWERED, "tools": [WEATHER]},
    "reasoning": {
        "messages": [
            *ASKED,
            {"role": "assistant", "content": "Cold.", "reasoning_content": "It is winter.\n"},
        ]
    },
    "thought": {"messages": ANSWERED, "variables": {"enable_thinking": False, "thinking": True}},
    "documents": {
        "messages": ASKED,
        "variables": {"documents": [{"title": "t", "text": "snow"}], "controls": {"citations": True}},
    },
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]}
        ]
    },
    "plan": {"messages": [*ASKED, {"role": "assistant", "tool_plan": "I look.", "tool_calls": [CALL]}]},
    "continued": {
        "messages": [*ASKED, {"role": "assistant", "content": "It is "}],
        "continue_final_message": True,
    },
}


def turn(message: dict[str, Any]) -> ChatMessage:
    content = message.get("content", "")
    calls = (
        ToolCall(call["function"]["name"], call["function"]["arguments"], call["id"])
        for call in message.get("tool_calls", ())
    )
    return ChatMessage(
        message["role"],
        content if isinstance(content, str) else tuple(part["text"] for part in content),
        message.get("name", ""),
        tuple(calls),
        message.get("tool_call_id", ""),
        message.get("reasoning_content", ""),
        {"tool_plan": message["tool_plan"]} if "tool_plan" in message else {},
    )


def chat_of(conversation: dict[str, Any], **changes: Any) -> ChatPrompt:
    given = {
        "messages": tuple(map(turn, conversation["messages"])),
        "template_variables": conversation.get("variables", {}),
        "continue_final_message": conversation.get("continue_final_message", False),
        "tools": tuple(conversation.get("tools", ())),
    }
    return ChatPrompt(**(given | changes))


def tokenizer_of(source: str, **named: str) -> Tokenizer:
    templates = {name: ChatTemplate(text, SPECIAL) for name, text in named.items()}
    template = ChatTemplate(source, SPECIAL) if source else None
    return Tokenizer(byte_level_bpe(), chat_template=template, named_templates=templates)


def expected(source: str, conversation: dict[str, Any]) -> tuple[str, list[int]] | str:
    """What `transformers` makes of it: text and ids, or the words of its refusal."""
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers is half typed
        tokenizer_object=byte_level_bpe(), chat_template=source, **SPECIAL
    )
    continues = conversation.get("continue_final_message", False)
    options = {
        "tools": conversation.get("tools"),
        "continue_final_message": continues,
        "add_generation_prompt": not continues,
        **conversation.get("variables", {}),
    }
    try:
        text = theirs.apply_chat_template(conversation["messages"], tokenize=False, **options)
    except Exception as error:
        return str(error)
    ids: Any = theirs.apply_chat_template(conversation["messages"], return_dict=False, **options)
    return str(text), ids


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_is_what_transformers_makes_of_it(family: str, name: str) -> None:
    source, conversation = (FOLDER / f"{family}.jinja").read_text(), CONVERSATIONS[name]
    tokenizer = tokenizer_of(source)
    wanted = expected(source, conversation)
    if isinstance(wanted, str):
        with pytest.raises(InvalidArgument) as refused:
            tokenizer.render_chat(chat_of(conversation))
        if "CONTINUE" not in wanted and "continue_final_message" not in wanted:
            assert wanted in refused.value.reason
        return
    text, ids = wanted
    rendered = tokenizer.render_chat(chat_of(conversation))
    assert tokenizer.shown(rendered) == text
    assert list(tokenizer.encode_rendered(rendered)) == ids


def test_ten_families_are_compared() -> None:
    assert len(FAMILIES) >= 10


@pytest.mark.parametrize(
    "message",
    [
        ChatMessage("user", ("a <|end|> b", "<|start|>")),
        ChatMessage(
            "assistant", "", tool_calls=(ToolCall("<|end|>", {"<|start|>": ["<|end|>"]}, "<|end|>"),)
        ),
        ChatMessage("tool", "x", name="<|end|>", tool_call_id="<|start|>"),
        ChatMessage("assistant", "x", reasoning_content="<|end|>", fields={"tool_plan": {"a": "<|start|>"}}),
    ],
)
def test_control_tokens_in_any_part_of_a_turn_are_text(message: ChatMessage) -> None:
    tokenizer = tokenizer_of("{{ messages | tojson }}{{ messages | tojson(ensure_ascii=true) }}<|end|>")
    backend = byte_level_bpe()
    rendered = tokenizer.render_chat(ChatPrompt((message,), tools=({"name": "<|start|>"},)))
    ids = tokenizer.encode_rendered(rendered)
    specials = {backend.token_to_id("<|start|>"), backend.token_to_id("<|end|>")}
    assert [token for token in ids if token in specials] == [backend.token_to_id("<|end|>")]
    assert "<|end|>" in tokenizer.shown(rendered).removesuffix("<|end|>") + "<|end|>"


def test_a_template_is_chosen_by_name_or_by_tools() -> None:
    tokenizer = tokenizer_of("plain", tool_use="with tools", rag="from documents")
    asked = chat_of(CONVERSATIONS["plain"])
    tools = chat_of(CONVERSATIONS["tools"])
    assert tokenizer.render_chat(asked) == "plain"
    assert tokenizer.render_chat(tools) == "with tools"
    assert tokenizer.render_chat(chat_of(CONVERSATIONS["tools"], template="default")) == "plain"
    assert tokenizer.render_chat(chat_of(CONVERSATIONS["plain"], template="rag")) == "from documents"
    with pytest.raises(InvalidArgument, match="default, rag, tool_use") as refused:
        tokenizer.render_chat(chat_of(CONVERSATIONS["plain"], template="other"))
    assert refused.value.field == "prompt.chat.template"
    with pytest.raises(InvalidArgument, match="has no default"):
        tokenizer_of("", rag="from documents").render_chat(asked)


def test_a_template_that_writes_without_end_is_stopped() -> None:
    source = "{{ messages[0].content }}"
    for name in "ij":
        source = f"{{% for {name} in range(99999) %}}{source}{{% endfor %}}"
    chat = ChatPrompt((ChatMessage("user", "x" * 4096),))
    with pytest.raises(InvalidArgument, match=str(MAX_RENDERED_CHARACTERS)):
        tokenizer_of(source).render_chat(chat)


def test_the_date_of_a_template_is_an_argument() -> None:
    template = ChatTemplate(
        (FOLDER / "llama3.jinja").read_text(), SPECIAL, today=lambda: datetime(2024, 7, 26)
    )
    assert "Today Date: 26 Jul 2024" in template.render([{"role": "user", "content": "x"}])
