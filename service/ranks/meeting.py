"""Where ranks meet, and meet again: the collectives of a model whose group may be left and formed anew.

A group has no other way to forget a step that failed on one rank: the others wait within it for what that
rank will not send. Whoever leaves closes its connections, whoever waits for it then fails and leaves as well,
and all meet again under the next number.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch.distributed import (  # type: ignore[attr-defined] # torch leaves them out of what it exports
    PrefixStore,
    Store,
    TCPStore,
)

from pageturner.service.errors import ConfigError, RankLost
from pageturner.service.model.tensor_parallel.collectives import Collectives

HOST = "127.0.0.1"
"""All ranks run on one machine: nothing else is to reach where they meet."""

Open = Callable[[Store, timedelta], Collectives]
"""Meets the other ranks by a store. Its timeout is that of the meeting, and of each operation."""


def open_store(port: int, timeout: timedelta) -> tuple[Store, int]:
    """Rank 0's: where ranks find each other's addresses; and the port that it listens on. port: 0 for any.

    Raises ConfigError for a port that can't be had.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError("model.tensor_parallel_port", f"{HOST}:{port}: {error.strerror}") from error
    chosen = listener.getsockname()[1]
    try:
        store = TCPStore(
            HOST,
            chosen,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # torch's own would listen on every address
        )
    except RuntimeError as error:
        raise ConfigError("model.tensor_parallel_port", f"{HOST}:{chosen}: {error}") from error
    return store, chosen


def find_store(port: int, timeout: timedelta) -> Store:
    """Another rank's. Raises RankLost where nothing listens."""
    try:
        return TCPStore(HOST, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise RankLost(f"rank 0 is not met on {HOST}:{port}: {error}") from error


class RenewedCollectives:
    """`Collectives` of one rank that can be left and met anew. Closed until it is met first.

    store: that all ranks have. open_one: makes the collectives of one meeting.
    """

    def __init__(self, rank: int, size: int, store: Store, open_one: Open) -> None:
        self.rank, self.size = rank, size
        self._store = store
        self._open = open_one
        self._current: Collectives | None = None

    def meet(self, generation: int, timeout: timedelta) -> None:
        """Form a group with all the other ranks, which meet under the same number. Raises RankLost."""
        self.close()
        self._current = self._open(PrefixStore(f"meeting {generation}", self._store), timeout)

    def close(self) -> None:
        """Leave the group, if there is one. Waits for no other rank."""
        current, self._current = self._current, None
        if current is not None:
            current.close()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._met().all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._met().all_gather(tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        self._met().broadcast(tensor, source)

    def _met(self) -> Collectives:
        if self._current is None:
            raise RankLost(f"rank {self.rank} has left the others")
        return self._current
