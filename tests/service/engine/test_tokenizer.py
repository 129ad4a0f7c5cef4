"""Encoding, chat templates as `transformers` renders them, and errors that name the culprit."""

from __future__ import annotations

import sys
import threading
from datetime import datetime
from typing import Any

import pytest
from support.tiny_tokenizers import byte_level_bpe, sentencepiece_bpe, word_piece
from tokenizers import processors

from pageturner.service.engine.api import ChatMessage
from pageturner.service.engine.chat_template import ChatTemplate
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.errors import InvalidArgument, ModelError

CHATML = """{% for message in messages %}
{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|start|>system\\nBe brief.<|end|>\\n' }}
{% endif %}
{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|start|>assistant\\n' }}
{% endif %}"""

STRICT = """{{ bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate: ' ~ message.role) }}
    {%- endif %}
    {%- if message.content == '' %}{% continue %}{% endif %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + eos_token }}{% endgeneration %}
    {%- else %}{{ '[INST] ' + message | tojson(indent=2) + ' [/INST]' }}{% endif %}
{%- endfor %}"""

CHAT = (
    ChatMessage("user", "Grüße <b>'&'</b>"),
    ChatMessage("assistant", ""),
    ChatMessage("user", "日本語?\n"),
    ChatMessage("assistant", "はい"),
    ChatMessage("user", "{{ 7 * 7 }}"),
)


def with_template(source: str | None) -> Tokenizer:
    variables = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    return Tokenizer(byte_level_bpe(), chat_template=ChatTemplate(source, variables) if source else None)


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_long_texts_leave_other_threads_running(work: str) -> None:
    tokenizer = Tokenizer(byte_level_bpe())
    text = "The quick brown fox " * 20_000
    token_ids = tokenizer.encode(text)
    gate, has_run = threading.Lock(), threading.Event()
    gate.acquire()

    def run() -> None:
        with gate:
            has_run.set()

    other = threading.Thread(target=run)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # nothing but a release of the GIL lets the other thread in
    try:
        other.start()
        gate.release()
        if work == "encode":
            tokenizer.encode(text)
        else:
            tokenizer.decode(token_ids)
        assert has_run.is_set()
    finally:
        sys.setswitchinterval(interval)
        other.join()


@pytest.mark.parametrize("source", [CHATML, STRICT], ids=["chatml", "strict"])
def test_templates_render_as_in_transformers(source: str) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers is half typed
        tokenizer_object=byte_level_bpe(), bos_token="<|start|>", eos_token="<|end|>", chat_template=source
    )
    turns = [{"role": message.role, "content": str(message.content)} for message in CHAT]
    expected = theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert list(with_template(source).encode_chat(CHAT)) == expected


def test_special_tokens_of_the_template_are_single_tokens() -> None:
    token_ids = with_template(CHATML).encode_chat((ChatMessage("user", "fox"),))
    start, end = byte_level_bpe().token_to_id("<|start|>"), byte_level_bpe().token_to_id("<|end|>")
    assert token_ids.count(start) == 3
    assert token_ids.count(end) == 2


def test_no_template() -> None:
    with pytest.raises(InvalidArgument, match="no chat template") as caught:
        with_template(None).encode_chat(CHAT)
    assert caught.value.field == "prompt.chat"


def test_the_template_refuses_a_role_in_its_own_words() -> None:
    with pytest.raises(InvalidArgument, match="roles must alternate: system") as caught:
        with_template(STRICT).encode_chat((ChatMessage("system", "x"),))
    assert caught.value.field == "prompt.chat"


def test_a_template_that_breaks_is_the_requests_error() -> None:
    with pytest.raises(InvalidArgument, match=r"prompt\.chat"):
        with_template("{{ messages[0].content + 1 }}").encode_chat(CHAT)


def test_a_template_cannot_leave_its_sandbox() -> None:
    with pytest.raises(InvalidArgument, match="unsafe"):
        with_template("{{ messages.__class__.__base__.__subclasses__() }}").encode_chat(CHAT)


def test_no_messages() -> None:
    with pytest.raises(InvalidArgument, match="no messages"):
        with_template(CHATML).encode_chat(())


def test_a_template_that_does_not_compile_is_the_models_error() -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% if %}")


def test_the_date_is_an_argument() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", today=lambda: datetime(2026, 2, 3))
    assert template.render([{"role": "user", "content": "x"}]) == "03 Feb 2026"


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="not Unicode at character 2"):
        with_template(None).encode("ab\ud800")


@pytest.mark.parametrize("add_bos", [False, True])
def test_bos_stands_in_front_once(add_bos: bool) -> None:
    with_processor = Tokenizer(sentencepiece_bpe(), bos_token="<s>", add_bos=add_bos)
    assert with_processor.encode("the fox")[:2].count(1) == 1
    plain = Tokenizer(byte_level_bpe(), bos_token="<|start|>", add_bos=add_bos)
    bos = byte_level_bpe().token_to_id("<|start|>")
    assert plain.encode("fox").count(bos) == add_bos
    assert plain.encode("fox", add_special_tokens=False).count(bos) == 0


@pytest.mark.fault("34")
@pytest.mark.parametrize("by_post_processor", [True, False])
def test_a_text_that_spells_bos_gets_one(by_post_processor: bool) -> None:
    backend = type(byte_level_bpe()).from_str(byte_level_bpe().to_str())
    start = backend.token_to_id("<|start|>")
    if by_post_processor:
        backend.post_processor = processors.TemplateProcessing(
            single="<|start|> $A", pair="<|start|> $A $B", special_tokens=[("<|start|>", start)]
        )
    tokenizer = Tokenizer(backend, bos_token="<|start|>", add_bos=not by_post_processor)
    fox = tokenizer.encode("fox", add_special_tokens=False)
    assert tokenizer.encode("fox") == (start, *fox)
    assert tokenizer.encode("<|start|>fox") == (start, *fox)
    assert tokenizer.encode("<|start|><|start|>fox") == (start, start, *fox)
    assert tokenizer.encode("<|start|>fox", add_special_tokens=False) == (start, *fox)
    spelled = tokenizer.encode("<|start|>fox", parse_special=False)
    assert spelled.count(start) == 1
    assert tokenizer.decode(spelled) == "<|start|>fox"


@pytest.mark.fault("6")
def test_every_special_token_is_bound_in_the_template() -> None:
    backend = type(byte_level_bpe()).from_str(byte_level_bpe().to_str())
    backend.add_special_tokens(["<pad>", "<unk>", "<repo>"])
    source = "[{{ unk_token }}][{{ pad_token }}][{{ sep_token }}]{{ additional_special_tokens[0] }}"
    special: dict[str, str | tuple[str, ...]]
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "additional_special_tokens": ("<repo>",)}
    tokenizer = Tokenizer(backend, chat_template=ChatTemplate(source, special))
    found = tokenizer.encode_chat([ChatMessage("user", "x")])
    assert tokenizer.decode(found, skip_special_tokens=False) == "[<unk>][<pad>][]<repo>"
    assert {backend.token_to_id(text) for text in ("<unk>", "<pad>", "<repo>")} <= set(found)


QWEN3_OPENING = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)


def transformers_chat(source: str, turns: list[dict[str, str]], **options: Any) -> list[int]:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers is half typed
        tokenizer_object=byte_level_bpe(), chat_template=source
    )
    found = theirs.apply_chat_template(turns, return_dict=False, **options)
    assert isinstance(found, list)
    return [token_id for token_id in found if isinstance(token_id, int)]


@pytest.mark.fault("43")
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_template_variables_of_a_request_reach_the_template(variables: dict[str, object]) -> None:
    tokenizer = Tokenizer(byte_level_bpe(), chat_template=ChatTemplate(QWEN3_OPENING))
    turns = [{"role": "user", "content": "fox"}]
    expected = transformers_chat(QWEN3_OPENING, turns, add_generation_prompt=True, **variables)
    assert list(tokenizer.encode_chat([ChatMessage("user", "fox")], variables)) == expected


@pytest.mark.fault("43")
@pytest.mark.parametrize("name", ["messages", "add_generation_prompt"])
def test_template_variables_cannot_replace_the_conversation(name: str) -> None:
    with pytest.raises(InvalidArgument, match="set by the server") as caught:
        with_template(CHATML).encode_chat(CHAT, {name: "x"})
    assert caught.value.field == f"prompt.chat.template_variables[{name}]"


def test_template_variables_nested_too_deeply_are_refused() -> None:
    value: object = "x"
    for _ in range(5000):
        value = [value]
    with pytest.raises(InvalidArgument, match="nested too deeply"):
        with_template(CHATML).encode_chat(CHAT, {"a": value})


@pytest.mark.fault("43")
@pytest.mark.parametrize("content", ["According to", "According to ", " according\n", ""])
@pytest.mark.parametrize("trim", ["", " | trim"])
def test_a_final_message_is_continued_as_in_transformers(trim: str, content: str) -> None:
    source = QWEN3_OPENING.replace("m.content", f"m.content{trim}")
    turns = [{"role": "user", "content": "fox?"}, {"role": "assistant", "content": content}]
    expected = transformers_chat(source, turns, continue_final_message=True)
    tokenizer = Tokenizer(byte_level_bpe(), chat_template=ChatTemplate(source))
    messages = [ChatMessage(turn["role"], turn["content"]) for turn in turns]
    assert list(tokenizer.encode_chat(messages, continue_final=True)) == expected


@pytest.mark.fault("43")
def test_a_final_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    tokenizer = with_template("{{ messages[0].content }}")
    with pytest.raises(InvalidArgument, match="cannot be continued"):
        tokenizer.encode_chat(CHAT, continue_final=True)


@pytest.mark.fault("F")
def test_a_text_has_a_token_for_each_max_token_chars_at_least() -> None:
    tokenizer = Tokenizer(byte_level_bpe())
    assert tokenizer.max_token_chars == max(map(len, byte_level_bpe().get_vocab()))
    for text in ("added token" * 3, "The quick brown fox " * 9, "\u65e5\u672c\u8a9e"):
        assert len(tokenizer.encode(text)) >= len(text) / tokenizer.max_token_chars
    assert Tokenizer(word_piece()).max_token_chars is None


def test_truncation_in_the_file_is_ignored() -> None:
    backend = type(byte_level_bpe()).from_str(byte_level_bpe().to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    tokenizer = Tokenizer(backend)
    text = "The quick brown fox"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_unknown_ids_have_no_text() -> None:
    tokenizer = with_template(None)
    assert tokenizer.decode([tokenizer.vocab_size, 10**6]) == ""


class PanicException(BaseException):
    """Named as pyo3 names a panic of a Rust library."""


@pytest.mark.fault("G")
@pytest.mark.parametrize("call", ["encode", "encode_chat"])
def test_a_panic_of_the_library_is_an_error_of_one_call(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*arguments: object, **options: object) -> list[int]:
        raise PanicException("index out of bounds")

    tokenizer = with_template("{{ messages[0].content }}")
    monkeypatch.setattr(tokenizer, "_encode", panic)
    with pytest.raises(RuntimeError, match="panicked: index out of bounds"):
        tokenizer.encode("fox") if call == "encode" else tokenizer.encode_chat(CHAT)
