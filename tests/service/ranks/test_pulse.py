"""Signs of life: who is silent for too many looks in a row is found, by its number, and nobody else."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.planted_ranks import PLANTED_SILENCES

from pageturner.service.ranks.pulse import Lookout, Pulse, Silences

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


@contextmanager
def watched(
    silent_seconds: float, look_seconds: float = 0.05
) -> Iterator[tuple[Lookout, socket.socket, Any]]:
    """A lookout for rank 1, that rank's end of its pulse, and what is told of losses."""
    told: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    ours, theirs = socket.socketpair()
    lookout = Lookout({1: ours}, lambda *loss: told.put(loss), silent_seconds, time.monotonic, 0.05)
    with theirs:
        lookout.start()
        yield lookout, theirs, told
        lookout.close()


def test_a_closed_pulse_is_a_loss_at_once() -> None:
    with watched(silent_seconds=3600.0) as (_, pulse, told):
        pulse.close()
        assert told.get(timeout=60.0) == (1, "")


def test_a_silent_pulse_is_a_loss_in_the_end_and_one_that_beats_is_none() -> None:
    with watched(silent_seconds=3600.0) as (lookout, pulse, told):
        Pulse(pulse, lambda: None, seconds=0.01).start()
        with pytest.raises(queue.Empty):
            told.get(timeout=0.3)
        lookout.close()
        assert not lookout._thread.is_alive()
        assert told.empty(), "that it watches no more is no loss"
        lookout.close()
    with watched(silent_seconds=3600.0) as (lookout, _, told):
        lookout.bear(0.2)
        assert told.get(timeout=60.0) == (1, "it has given no sign of life for 0.2 s")


def test_who_is_told_of_a_loss_may_end_the_watch() -> None:
    """The thread that watches cannot wait for its own end."""
    ended = threading.Event()
    ours, theirs = socket.socketpair()

    def end(rank: int, why: str) -> None:
        lookout.close()
        ended.set()

    lookout = Lookout({1: ours}, end, 3600.0, time.monotonic, 0.05)
    lookout.start()
    theirs.close()
    assert ended.wait(60.0)
