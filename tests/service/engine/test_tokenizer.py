"""Encoding, chat templates as `transformers` renders them, and errors that name the culprit."""

from __future__ import annotations

import sys
import threading
from datetime import datetime
from pathlib import Path

import pytest
from support.tiny_tokenizers import byte_level_bpe, sentencepiece_bpe

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
    turns = [{"role": message.role, "content": message.content} for message in CHAT]
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
    assert template.render([("user", "x")]) == "03 Feb 2026"


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


def test_truncation_in_the_file_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    backend = type(byte_level_bpe()).from_str(byte_level_bpe().to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(path))
    tokenizer = Tokenizer.from_file(path)
    text = "The quick brown fox"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_broken_file_is_the_models_error(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_file(path)
    with pytest.raises(ModelError, match=r"nowhere\.json"):
        Tokenizer.from_file(tmp_path / "nowhere.json")


def test_unknown_ids_have_no_text() -> None:
    tokenizer = with_template(None)
    assert tokenizer.decode([tokenizer.vocab_size, 10**6]) == ""
