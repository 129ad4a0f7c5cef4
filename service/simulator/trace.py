"""A trace in memory: a few numbers a request, of which any run of requests becomes a workload.

A trace may have millions of requests and an experiment use a hundred of them, so requests lie in columns,
and objects are made only of those that a workload takes.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pageturner.service.simulator.workload import Segment, SimulatedWorkload, WorkloadRequest


@dataclass(frozen=True, slots=True)
class Labels:
    """What few formats say of a request, and equal for many: the fields of WorkloadRequest of these names."""

    tenant: str = ""
    priority: int = 0
    deadline_seconds: float | None = None
    num_choices: int = 1
    max_tokens: int | None = None


NO_LABELS = Labels()


@dataclass(slots=True)
class TraceColumns:
    """Requests in the order of the file: `add` appends one to every column.

    at_seconds: of any origin. hash_ids: of all requests one after the other; hash_ends: where those of a
    request end. labels: index into label_values.
    """

    at_seconds: array[float] = field(default_factory=lambda: array("d"))
    num_prompt: array[int] = field(default_factory=lambda: array("l"))
    num_output: array[int] = field(default_factory=lambda: array("l"))
    hash_ids: array[int] = field(default_factory=lambda: array("Q"))
    hash_ends: array[int] = field(default_factory=lambda: array("Q"))
    block_tokens: array[int] = field(default_factory=lambda: array("l"))
    labels: array[int] = field(default_factory=lambda: array("l"))
    label_values: list[Labels] = field(default_factory=list)
    num_silent: int = 0
    """Requests that generated nothing: they failed when the trace was taken, and are left out."""
    _label_index: dict[Labels, int] = field(default_factory=dict)

    def add_lengths(self, at_seconds: float, num_prompt: int, num_output: int) -> None:
        """A request of a format that tells nothing else."""
        self.at_seconds.append(at_seconds)
        self.num_prompt.append(num_prompt)
        self.num_output.append(num_output)

    def add(
        self,
        at_seconds: float,
        num_prompt: int,
        num_output: int,
        hash_ids: Sequence[int],
        block_tokens: int,
        labels: Labels,
    ) -> None:
        """A request whose prompt begins with the blocks of `hash_ids`. Raises OverflowError for an id that is
        not from 0 to 2**64 - 1, before anything is added."""
        ids = array("Q", hash_ids)
        self.add_lengths(at_seconds, num_prompt, num_output)
        self.hash_ids.extend(ids)
        self.hash_ends.append(len(self.hash_ids))
        self.block_tokens.append(block_tokens)
        index = self._label_index.setdefault(labels, len(self.label_values))
        if index == len(self.label_values):
            self.label_values.append(labels)
        self.labels.append(index)


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

    def workload(self) -> SimulatedWorkload:
        """All of it, from time 0 on."""
        return self._workload(self._order)

    def window(self, num_requests: int, seed: int) -> SimulatedWorkload:
        """`num_requests` consecutive requests, from a place that the seed chooses."""
        spare = self.num_requests - num_requests
        if spare <= 0:
            return self.workload()
        first = random.Random(f"{seed}/window").randint(0, spare)
        return self._workload(self._order[first : first + num_requests])

    def _workload(self, indices: Sequence[int]) -> SimulatedWorkload:
        """Keys of segments are counted from 1 as they are met: 64-bit ids leave no room for positions."""
        start = self._columns.at_seconds[indices[0]]
        keys: Iterator[int] = iter(range(1, 1 << 40))
        key_of: dict[int, int] = {}
        return SimulatedWorkload(
            self.name, tuple(self._request(index, start, keys, key_of) for index in indices)
        )

    def _request(
        self, index: int, start: float, keys: Iterator[int], key_of: dict[int, int]
    ) -> WorkloadRequest:
        columns = self._columns
        num_rest = columns.num_prompt[index]
        prompt: list[Segment] = []
        labels = NO_LABELS
        if columns.hash_ends:
            labels = columns.label_values[columns.labels[index]]
            size = columns.block_tokens[index]
            first = columns.hash_ends[index - 1] if index else 0
            for hash_id in columns.hash_ids[first : columns.hash_ends[index]]:
                if hash_id not in key_of:
                    key_of[hash_id] = next(keys)
                prompt.append(Segment(key_of[hash_id], min(size, num_rest)))
                num_rest -= prompt[-1].num_tokens
        if num_rest:
            prompt.append(Segment(next(keys), num_rest))
        return WorkloadRequest(
            columns.at_seconds[index] - start,
            tuple(prompt),
            Segment(next(keys), columns.num_output[index]),
            tenant=labels.tenant,
            priority=labels.priority,
            deadline_seconds=labels.deadline_seconds,
            num_choices=labels.num_choices,
            max_tokens=labels.max_tokens,
        )
