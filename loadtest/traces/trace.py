"""A trace in memory, of which any run of requests can be taken.

A trace may have millions of requests and an experiment use a hundred of them, so objects are made only of
those that are taken.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pageturner.loadtest.traces.columns import NO_LABELS, Labels, TraceColumns


@dataclass(frozen=True, slots=True)
class Piece:
    """`num_tokens` tokens of a prompt. Pieces of one taking that have the same key hold the same tokens."""

    key: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. at_seconds: after the first one that was taken. prompt: in order. answer: its alone."""

    at_seconds: float
    prompt: tuple[Piece, ...]
    answer: Piece
    labels: Labels


class Trace:
    """Requests by arrival. format: its name in words. notes: what was left out, for the user to read."""

    def __init__(self, name: str, format_name: str, columns: TraceColumns, notes: Sequence[str]) -> None:
        """columns: of one request at least, not changed from now on."""
        self.name = name
        self.format = format_name
        self.notes = tuple(notes)
        self._columns = columns
        times = columns.at_seconds
        if all(times[i] <= times[i + 1] for i in range(len(times) - 1)):
            self._order: Sequence[int] = range(len(times))
        else:
            self._order = array("l", sorted(range(len(times)), key=times.__getitem__))

    @property
    def num_requests(self) -> int:
        """Those that are kept."""
        return len(self._order)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        times = self._columns.at_seconds
        return times[self._order[-1]] - times[self._order[0]]

    def requests(self) -> tuple[TraceRequest, ...]:
        """All of it, from time 0 on."""
        return self._take(self._order)

    def window(self, num_requests: int, seed: int) -> tuple[TraceRequest, ...]:
        """`num_requests` consecutive requests, from a place that the seed chooses."""
        spare = self.num_requests - num_requests
        if spare <= 0:
            return self.requests()
        first = random.Random(f"{seed}/window").randint(0, spare)
        return self._take(self._order[first : first + num_requests])

    def _take(self, indices: Sequence[int]) -> tuple[TraceRequest, ...]:
        """Keys of pieces are counted from 1 as they are met: 64-bit ids leave no room for positions."""
        start = self._columns.at_seconds[indices[0]]
        keys: Iterator[int] = iter(range(1, 1 << 40))
        key_of: dict[int, int] = {}
        return tuple(self._request(index, start, keys, key_of) for index in indices)

    def _request(self, index: int, start: float, keys: Iterator[int], key_of: dict[int, int]) -> TraceRequest:
        columns = self._columns
        num_rest = columns.num_prompt[index]
        prompt: list[Piece] = []
        labels = NO_LABELS
        if columns.hash_ends:
            labels = columns.label_values[columns.labels[index]]
            size = columns.block_tokens[index]
            first = columns.hash_ends[index - 1] if index else 0
            for hash_id in columns.hash_ids[first : columns.hash_ends[index]]:
                if hash_id not in key_of:
                    key_of[hash_id] = next(keys)
                prompt.append(Piece(key_of[hash_id], min(size, num_rest)))
                num_rest -= prompt[-1].num_tokens
        if num_rest:
            prompt.append(Piece(next(keys), num_rest))
        answer = Piece(next(keys), columns.num_output[index])
        return TraceRequest(columns.at_seconds[index] - start, tuple(prompt), answer, labels)
