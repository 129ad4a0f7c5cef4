"""Ranks as threads of one process: `Collectives` by a barrier, for tests that would else start processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from pageturner.service.errors import RankLost
from pageturner.service.model.tensor_parallel.collectives import add_in_order

_Result = TypeVar("_Result")
TIMEOUT_SECONDS = 120.0
"""Until a rank that waits for another gives up: no test waits for it unless something is broken."""


class ThreadCollectives:
    """Of one of `size` threads that share a `Meeting`. calls: how often each operation was asked for."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size = rank, meeting.size
        self.calls = {"all_reduce": 0, "all_gather": 0, "broadcast": 0}
        self._meeting = meeting

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.calls["all_reduce"] += 1
        add_in_order(self._meeting.exchange(self.rank, tensor), tensor)

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        self.calls["all_gather"] += 1
        return self._meeting.exchange(self.rank, tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        self.calls["broadcast"] += 1
        tensor.copy_(self._meeting.exchange(self.rank, tensor)[source])

    def close(self) -> None:
        self._meeting.end()


class Meeting:
    """Where threads hand each other tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=TIMEOUT_SECONDS)
        self._tensors: list[torch.Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copies of what all ranks brought, which must be alike in shape and dtype."""
        try:
            self._tensors[rank] = tensor.clone()
            self._barrier.wait()
            found = tuple(self._tensors)
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RankLost(f"rank {rank} waits in vain") from error
        kinds = {(part.shape, part.dtype) for part in found}
        assert len(kinds) == 1, f"ranks brought {kinds}"
        return found

    def end(self) -> None:
        """Whoever waits waits in vain."""
        self._barrier.abort()


def on_ranks(size: int, work: Callable[[ThreadCollectives], _Result]) -> list[_Result]:
    """What `work` gives on each rank. Raises the first error that is not another rank's."""
    meeting = Meeting(size)

    def run(rank: int) -> _Result:
        try:
            return work(ThreadCollectives(meeting, rank))
        except BaseException:
            meeting.end()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda each: isinstance(each, RankLost)):
        raise error
    return [future.result() for future in futures]
