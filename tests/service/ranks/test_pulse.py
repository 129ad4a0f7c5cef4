"""Signs of life: who is silent for too many looks in a row is found, by its number, and nobody else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.planted_ranks import PLANTED_SILENCES

from pageturner.service.ranks.pulse import Silences

RANKS = (1, 2, 3)
LOOKS = st.lists(st.sets(st.sampled_from(RANKS)), max_size=12)
"""Who gives a sign before each look."""


def check_silences(kind: Callable[[tuple[int, ...]], Silences], looks: list[set[int]], most: int) -> None:
    """Against the definition: the last `most + 1` looks without a sign."""
    silences = kind(RANKS)
    for number, heard in enumerate(looks, 1):
        for rank in heard:
            silences.note(rank)
            silences.note(rank)  # signs that piled up are one
        recent = looks[max(0, number - most - 1) : number]
        silent = {rank for rank in RANKS if number > most and not any(rank in before for before in recent)}
        found = silences.look(most)
        assert (found in silent) if silent else found is None, (number, found, silent)
        if found is not None:
            return


@given(LOOKS, st.integers(0, 3))
def test_who_is_silent_in_a_row_is_found(looks: list[set[int]], most: int) -> None:
    check_silences(Silences, looks, most)


@pytest.mark.parametrize("kind", PLANTED_SILENCES)
def test_a_planted_bug_is_caught(kind: type[Silences]) -> None:
    everybody = set(RANKS)
    histories = (
        [everybody] * 6,
        [everybody, set(), everybody, set(), everybody, set(), everybody, set()],
        [everybody, {1, 3}, {1, 3}, {1, 3}, {1, 3}],
        [everybody, set(), set(), everybody],
    )
    assert any(map(partial(is_caught, kind), histories))


def is_caught(kind: type[Silences], looks: list[set[int]]) -> bool:
    try:
        check_silences(kind, looks, 2)
    except AssertionError:
        return True
    return False
