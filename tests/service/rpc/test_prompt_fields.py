"""Prompts with choices of their own, from the client's value to the engine's and what is refused between."""

from __future__ import annotations

import pytest
from support.fake_engine import UNLIMITED

from pageturner.service.client.prompts import to_prompt as to_wire
from pageturner.service.client.values import Turn
from pageturner.service.engine.api import ChatMessage, ChatPrompt, Prompt, TextPrompt, ToolCall
from pageturner.service.errors import InvalidArgument
from pageturner.service.rpc import from_wire
from pageturner.v1 import generation_pb2 as pb

TURNS = (ChatMessage("user", "hi"), ChatMessage("assistant", "According to"))


@pytest.mark.fault("43", "E")
@pytest.mark.parametrize(
    "prompt",
    [
        "hi",
        TextPrompt("hi", parse_special=False),
        TextPrompt("hi", parse_special=True),
        TURNS,
        ChatPrompt(TURNS, continue_final_message=True),
        ChatPrompt(TURNS, {"enable_thinking": False, "style": {"tone": ["dry", None, 1.5]}}),
        (ChatMessage("user", ("one", "two"), name="Ann", fields={"cached": True}),),
        (
            ChatMessage("assistant", tool_calls=(ToolCall("f", {"x": [1, None]}, "id"), ToolCall("g"))),
            ChatMessage("tool", "3", name="f", tool_call_id="id", reasoning_content="why"),
        ),
        ChatPrompt(TURNS, tools=({"name": "f", "parameters": {}}, "g"), template="tool_use"),
    ],
)
def test_the_engine_is_given_the_prompt_that_the_client_stated(prompt: Prompt) -> None:
    assert from_wire.to_prompt(to_wire(prompt), UNLIMITED) == prompt


@pytest.mark.fault("43")
@pytest.mark.parametrize(
    ("variables", "field", "reason"),
    [
        ({"a": "no json"}, "prompt.chat.template_variables[a]", "is not JSON"),
        ({"a": "[" * 30_000}, "prompt.chat.template_variables[a]", "is nested too deeply"),
        ({"a": "9" * 5000}, "prompt.chat.template_variables[a]", "a number of more than 4300 digits"),
        ({str(i): "1" for i in range(65)}, "prompt.chat.template_variables", "65 entries; at most 64"),
        ({"a": "1" * 65_536}, "prompt.chat.template_variables", "at most 65536"),
    ],
)
def test_template_variables_that_are_too_many_or_no_json_are_refused(
    variables: dict[str, str], field: str, reason: str
) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")], template_variables=variables)
    with pytest.raises(InvalidArgument, match=reason) as caught:
        from_wire.to_prompt(pb.Prompt(chat=chat), UNLIMITED)
    assert caught.value.field == field


def test_turns_and_calls_as_other_apis_have_them_are_taken() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages: list[Turn] = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}, "you"]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    assert from_wire.to_prompt(to_wire(messages), UNLIMITED) == (
        ChatMessage("user", ("hi", "you")),
        ChatMessage("assistant", tool_calls=(ToolCall("f", {"x": 1}, "1"),)),
    )


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        (pb.Chat(tools=["{"]), "prompt.chat.tools[0]"),
        (pb.Chat(tools=["1"] * 129), "prompt.chat.tools"),
        (pb.Chat(tools=["1" * (1 << 18), "1"]), "prompt.chat.tools"),
        (pb.Chat(template="x" * 257), "prompt.chat.template"),
        (pb.ChatMessage(tool_calls=[pb.ToolCall()]), "prompt.chat.messages[0].tool_calls[0].name"),
        (
            pb.ChatMessage(tool_calls=[pb.ToolCall(name="f", arguments="x")]),
            "prompt.chat.messages[0].tool_calls[0].arguments",
        ),
        (pb.ChatMessage(content="a", parts=["b"]), "prompt.chat.messages[0].parts"),
        (pb.ChatMessage(fields={"role": "1"}), "prompt.chat.messages[0].fields[role]"),
        (pb.ChatMessage(fields={"x": "["}), "prompt.chat.messages[0].fields[x]"),
    ],
)
def test_bad_tools_and_turns_are_refused_by_their_paths(chat: pb.Chat | pb.ChatMessage, field: str) -> None:
    turn = pb.ChatMessage(role="user")
    if isinstance(chat, pb.ChatMessage):
        turn.MergeFrom(chat)
        chat = pb.Chat()
    chat.messages.append(turn)
    with pytest.raises(InvalidArgument) as caught:
        from_wire.to_prompt(pb.Prompt(chat=chat), UNLIMITED)
    assert caught.value.field == field
