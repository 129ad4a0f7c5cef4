"""Joined deltas equal the whole decode, and nothing half is ever shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from support.tiny_tokenizers import byte_level_bpe, sentencepiece_bpe, word_piece

from pageturner.service.engine.incremental_decoder import (
    MAX_WITHHELD_TOKENS,
    REPLACEMENT,
    IncrementalDecoder,
    WindowDecoder,
)
from pageturner.service.engine.tokenizer import Tokenizer

SEARCH = settings(max_examples=2000, database=None, phases=[Phase.generate])
BYTE_LEVEL = Tokenizer(byte_level_bpe())
SENTENCEPIECE = Tokenizer(sentencepiece_bpe())
WORD_PIECE = Tokenizer(word_piece())

texts = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from("日本語👩‍👧🏳️é ▁\n\ufffd"), max_size=40
)
byte_level_ids = st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=40)


def deltas(decoder: IncrementalDecoder, token_ids: Sequence[int]) -> list[str]:
    return [*(decoder.append(token_id) for token_id in token_ids), decoder.finish()]


@given(texts)
def test_byte_level_deltas_join_to_the_text(text: str) -> None:
    token_ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert (
        "".join(deltas(BYTE_LEVEL.incremental_decoder(), token_ids)) == text == BYTE_LEVEL.decode(token_ids)
    )


@given(byte_level_ids)
def test_byte_level_deltas_join_to_the_whole_decode_of_any_ids(token_ids: list[int]) -> None:
    assert "".join(deltas(BYTE_LEVEL.incremental_decoder(), token_ids)) == BYTE_LEVEL.decode(token_ids)


@given(texts)
def test_no_half_character_is_shown(text: str) -> None:
    text = text.replace(REPLACEMENT, "")
    token_ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert REPLACEMENT not in "".join(deltas(BYTE_LEVEL.incremental_decoder(), token_ids))


@given(texts, st.data())
def test_each_delta_shows_all_that_is_certain(text: str, data: st.DataObject) -> None:
    token_ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    cut = data.draw(st.integers(0, len(token_ids)))
    decoder = BYTE_LEVEL.incremental_decoder()
    shown = "".join(decoder.append(token_id) for token_id in token_ids[:cut])
    certain = b"".join(map(BYTE_LEVEL.token_bytes, token_ids[:cut])).decode(errors="ignore")
    assert shown == certain


@given(texts, st.data())
def test_a_prompt_may_end_within_a_character(text: str, data: st.DataObject) -> None:
    token_ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    cut = data.draw(st.integers(0, len(token_ids)))
    before = BYTE_LEVEL.incremental_decoder()
    received = "".join(before.append(token_id) for token_id in token_ids[:cut])
    resumed = deltas(BYTE_LEVEL.incremental_decoder(token_ids[:cut]), token_ids[cut:])
    assert received + "".join(resumed) == text


HALF = {
    BYTE_LEVEL: next(i for i in range(BYTE_LEVEL.vocab_size) if BYTE_LEVEL.token_bytes(i) == b"\xc3"),
    SENTENCEPIECE: sentencepiece_bpe().get_vocab()["<0xC3>"],
}
"""The token of a byte that begins a character, and is none."""


@pytest.mark.parametrize("tokenizer", HALF, ids=["byte-level", "sentencepiece"])
@given(st.text(st.sampled_from("the é日"), max_size=6), st.text(st.sampled_from("é日👩x"), max_size=6))
def test_a_text_that_begins_anew_leaves_a_half_character_to_the_prompt(
    tokenizer: Tokenizer, before: str, text: str
) -> None:
    prompt = tokenizer.encode(before, add_special_tokens=False)
    answer = tokenizer.encode(text, add_special_tokens=False)
    expected = "".join(deltas(tokenizer.incremental_decoder(prompt), answer))
    halved = (*prompt, HALF[tokenizer])
    assert REPLACEMENT not in expected
    assert "".join(deltas(tokenizer.incremental_decoder(halved, begins_anew=True), answer)) == expected


@given(st.text(st.sampled_from("the fox. s日本é👩 "), max_size=30))
def test_sentencepiece_deltas_join_to_the_whole_decode(text: str) -> None:
    token_ids = SENTENCEPIECE.encode(text, add_special_tokens=False)
    assert "".join(deltas(SENTENCEPIECE.incremental_decoder(), token_ids)) == SENTENCEPIECE.decode(token_ids)


@given(st.lists(st.integers(259, SENTENCEPIECE.vocab_size - 1) | st.sampled_from([0, 1, 2]), max_size=30))
def test_sentencepiece_deltas_join_to_the_whole_decode_of_any_pieces(token_ids: list[int]) -> None:
    assert "".join(deltas(SENTENCEPIECE.incremental_decoder(), token_ids)) == SENTENCEPIECE.decode(token_ids)


@given(st.lists(st.integers(0, WORD_PIECE.vocab_size - 1), max_size=20))
def test_word_piece_deltas_join_to_the_whole_decode(token_ids: list[int]) -> None:
    assert "".join(deltas(WORD_PIECE.incremental_decoder(), token_ids)) == WORD_PIECE.decode(token_ids)


def test_the_space_between_prompt_and_answer_is_kept() -> None:
    prompt = SENTENCEPIECE.encode("the fox")
    answer = SENTENCEPIECE.encode("the fox", add_special_tokens=False)
    assert "".join(deltas(SENTENCEPIECE.incremental_decoder(prompt), answer)) == " the fox"
    assert "".join(deltas(SENTENCEPIECE.incremental_decoder(), answer)) == "the fox"


def test_special_tokens_have_no_text() -> None:
    start, end = (BYTE_LEVEL.encode(text)[0] for text in ("<|start|>", "<|end|>"))
    token_ids = (start, *BYTE_LEVEL.encode("fox"), end)
    assert "".join(deltas(BYTE_LEVEL.incremental_decoder(), token_ids)) == "fox"


def test_the_window_stays_short() -> None:
    widths: list[int] = []

    def decode(token_ids: Sequence[int]) -> str:
        widths.append(len(token_ids))
        return BYTE_LEVEL.decode(token_ids)

    # A byte that starts no character.
    stray = next(i for i in range(BYTE_LEVEL.vocab_size) if BYTE_LEVEL.token_bytes(i) == b"\x80")
    decoder = WindowDecoder(decode, lambda _: True)
    for _ in range(200):
        decoder.append(stray)
    assert max(widths) <= 2 * MAX_WITHHELD_TOKENS
    assert len(widths) <= 2 * 200 + 1


@pytest.mark.parametrize("tail", ["é", "語", "👩"])
def test_an_unfinished_character_is_flushed_as_a_replacement(tail: str) -> None:
    as_bytes = tail.encode()[:-1]
    alphabet = {BYTE_LEVEL.token_bytes(i): i for i in range(BYTE_LEVEL.vocab_size)}
    decoder = BYTE_LEVEL.incremental_decoder()
    assert [decoder.append(alphabet[bytes([byte])]) for byte in as_bytes] == [""] * len(as_bytes)
    assert decoder.finish() == REPLACEMENT


class Naive:
    """Decodes each token alone."""

    def append(self, token_id: int) -> str:
        return BYTE_LEVEL.decode([token_id])

    def finish(self) -> str:
        return ""


class NeverFlushed:
    """Right until the end, where it forgets what it withheld."""

    def __init__(self) -> None:
        self._decoder = BYTE_LEVEL.incremental_decoder()

    def append(self, token_id: int) -> str:
        return self._decoder.append(token_id)

    def finish(self) -> str:
        return ""


@pytest.mark.parametrize("planted", [Naive, NeverFlushed])
def test_planted_bugs_are_found(planted: Callable[[], IncrementalDecoder]) -> None:
    def is_wrong(token_ids: list[int]) -> bool:
        return "".join(deltas(planted(), token_ids)) != BYTE_LEVEL.decode(token_ids)

    assert find(byte_level_ids, is_wrong, settings=SEARCH, random=Random(0))
