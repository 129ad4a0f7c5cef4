"""Drafts are what followed the longest, then latest, earlier occurrence of a sequence's last tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageturner.service.core.drafting import ngram_index
from pageturner.service.core.drafting.ngram_index import MAX_CANDIDATES, MAX_NEW_TOKENS, NgramIndex

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def defined(tokens: list[int], min_ngram: int, max_ngram: int, limit: int) -> tuple[int, ...]:
    """The definition, by looking everywhere."""
    last = len(tokens) - 1
    best, best_place = min_ngram - 1, -1
    candidates = [
        place
        for place in range(last - 1, min_ngram - 2, -1)
        if tokens[place + 1 - min_ngram : place + 1] == tokens[last + 1 - min_ngram :]
    ]
    for place in candidates:
        length = 0
        while length < max_ngram and length <= place and tokens[place - length] == tokens[last - length]:
            length += 1
        if length > best:
            best, best_place = length, place
    if best_place < 0:
        return ()
    grown = list(tokens)
    for _ in range(limit):
        grown.append(grown[len(grown) - (last - best_place)])
    return tuple(grown[len(tokens) :])


@given(tokens=TOKENS, min_ngram=st.integers(1, 3), more=st.integers(0, 3), limit=st.integers(1, 9))
def test_drafts_are_as_defined(tokens: list[int], min_ngram: int, more: int, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_index, "MAX_CANDIDATES", 1000)  # the definition looks at all
        index = NgramIndex(tokens, min_ngram, min_ngram + more, 64)
        assert index.propose(limit).token_ids == defined(tokens, min_ngram, min_ngram + more, limit)


@given(first=TOKENS, pieces=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=8))
def test_an_index_that_grows_with_its_sequence_finds_what_one_made_anew_does(
    first: list[int], pieces: list[list[int]]
) -> None:
    tokens = list(first)
    index = NgramIndex(tokens, 2, 4, 64)
    for piece in pieces:
        tokens += piece
        assert index.propose(5).token_ids == NgramIndex(tokens, 2, 4, 64).propose(5).token_ids


def test_the_longest_match_wins_and_then_the_latest() -> None:
    assert NgramIndex([1, 2, 3, 7, 9, 2, 3, 8, 9, 1, 2, 3], 2, 4, 64).propose(1).token_ids == (7,)
    assert NgramIndex([2, 3, 7, 9, 2, 3, 8, 9, 2, 3], 2, 2, 64).propose(1).token_ids == (8,)


def test_a_match_of_all_tokens_that_are_looked_at_is_whole() -> None:
    tokens = [1, 2, 3, 4, 9, 2, 3, 4]
    assert [NgramIndex(tokens, 2, longest, 64).propose(1).is_whole for longest in (2, 3, 4)] == [
        True,
        True,
        False,
    ]


def test_what_repeats_is_taken_to_go_on_repeating() -> None:
    assert NgramIndex([5, 1, 2, 1, 2], 2, 4, 64).propose(5).token_ids == (1, 2, 1, 2, 1)


def test_a_hash_that_is_shared_is_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NgramIndex, "_hash", lambda self, place: 0)
    assert NgramIndex([1, 2, 9, 3, 4, 8, 1, 2], 2, 4, 64).propose(1).token_ids == (9,)
    assert NgramIndex([1, 2, 9, 3, 4, 8, 5, 6], 2, 4, 64).propose(1).token_ids == ()


def test_a_search_looks_at_a_bounded_number_of_places() -> None:
    noise = [token for number in range(MAX_CANDIDATES) for token in (100 + number, 1, 2)]
    tokens = [7, 1, 2, 5, *noise, 7, 1, 2]
    assert NgramIndex(tokens, 2, 3, 64).propose(1).token_ids == (7,)  # (7, 1, 2) lies one place too far back
    assert NgramIndex(tokens[:4] + tokens[7:], 2, 3, 64).propose(1).token_ids == (5,)


def test_a_long_prompt_is_entered_in_pieces() -> None:
    tokens = [*range(2 * MAX_NEW_TOKENS + 10), 0, 1]
    index = NgramIndex(tokens, 2, 4, len(tokens))
    assert [index.propose(1).token_ids for _ in range(4)] == [(), (), (2,), (2,)]
