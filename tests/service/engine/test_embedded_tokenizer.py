"""The embedded model's own tokenizer and chat template, read from its GGUF header."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageturner.service.engine.api import ChatMessage
from pageturner.service.engine.chat_template import ChatTemplate
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.model.gguf import GgufFile
from pageturner.service.model.gguf_tokenizer import build_tokenizer
from pageturner.service.model.loader import embedded_file


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    fields = GgufFile(embedded_file()).fields
    template = ChatTemplate(fields["tokenizer.chat_template"], {"bos_token": "<|im_start|>"})
    return Tokenizer(build_tokenizer(fields), chat_template=template)


def joined(tokenizer: Tokenizer, prompt: Sequence[int], token_ids: Sequence[int]) -> str:
    decoder = tokenizer.incremental_decoder(prompt)
    return "".join([*(decoder.append(token_id) for token_id in token_ids), decoder.finish()])


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_deltas_join_to_the_whole_decode(tokenizer: Tokenizer, text: str) -> None:
    # Not to the text itself: this vocabulary lacks a few bytes.
    token_ids = tokenizer.encode(text)
    assert joined(tokenizer, (), token_ids) == tokenizer.decode(token_ids)


@given(st.text(st.sampled_from("日本語한국어👩‍👧🏳️‍🌈éß “…” \n\tabc"), max_size=60))
def test_deltas_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert joined(tokenizer, (), tokenizer.encode(text)) == text


@given(st.lists(st.integers(0, 49_151), max_size=40), st.integers(0, 40))
def test_deltas_join_to_the_whole_decode_of_any_ids(
    tokenizer: Tokenizer, token_ids: list[int], cut: int
) -> None:
    assert joined(tokenizer, (), token_ids) == tokenizer.decode(token_ids)
    # What follows a prompt is the same text, wherever the prompt ends, but for a character cut in two.
    before = tokenizer.incremental_decoder()
    shown = "".join(before.append(token_id) for token_id in token_ids[:cut])
    assert shown + joined(tokenizer, token_ids[:cut], token_ids[cut:]) == tokenizer.decode(token_ids)


def test_a_chat_is_rendered_by_the_models_template(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode_chat((ChatMessage("user", "Grüße!"),))
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nGrüße!<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert token_ids[0] == tokenizer.encode("<|im_start|>")[0] == 1
