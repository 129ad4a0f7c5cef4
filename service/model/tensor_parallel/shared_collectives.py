"""`Collectives` of processes on one machine's CPUs, through memory that they share.

Sockets on the loopback address cost hundreds of microseconds an exchange, of which a step has hundreds; this
costs some ten. The file that is shared has no name any more once all ranks have it, so that nothing outlives
them. Each holds a lock on a byte of it for as long as it lives, whatever ends it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import Store  # type: ignore[attr-defined] # torch leaves it out of what it exports

from pageturner.kernels.cpu.exchange import ALIGNMENT, Exchange, Outcome, region_bytes
from pageturner.service.errors import RankLost
from pageturner.service.model.tensor_parallel.collectives import add_in_order

FOLDER = Path("/dev/shm")  # noqa: S108 - a file there is memory; it's made for its owner alone
SLOT_BYTES = 1 << 20
MOST_BYTES = 16 << 20
"""Of the whole file: containers give 64 MiB by default."""
_LOOK_US = 100_000
"""Between two looks whether those that are waited for live."""


def can_share() -> bool:
    """Whether this system has what is needed."""
    return FOLDER.is_dir() and os.access(FOLDER, os.W_OK)


def open_shared(
    library: ctypes.CDLL,
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    timer: Callable[[], float] = time.monotonic,
) -> SharedCollectives:
    """Meet the other ranks by the store. timeout: of the meeting, and of each operation. timer: seconds.

    Raises RankLost if not all ranks come, or there is no memory to share.
    """
    slot_bytes = min(SLOT_BYTES, MOST_BYTES // (2 * size)) // ALIGNMENT * ALIGNMENT
    num_bytes = region_bytes(size, slot_bytes)
    path, descriptor = None, -1
    try:
        if rank == 0:
            descriptor, name = tempfile.mkstemp(prefix="pageturner-", dir=FOLDER)
            path = Path(name)
            os.posix_fallocate(descriptor, 0, num_bytes)  # what is not there would end a process later
            store.set("shared file", name)
        else:
            name = store.get("shared file").decode()
            descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        store.set(f"shares {rank}", "")
        store.wait([f"shares {other}" for other in range(size)], timeout)
        memory = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    except (RuntimeError, OSError) as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise RankLost(f"rank {rank} of {size} shares no memory with the others: {error}") from error
    finally:
        if path is not None:
            path.unlink()
    exchange = Exchange(library, memory, slot_bytes, rank, size)
    return SharedCollectives(exchange, descriptor, rank, size, timeout.total_seconds(), timer)


class SharedCollectives:
    """See `open_shared`. descriptor: of the shared file, which it owns. timeout: seconds."""

    def __init__(
        self,
        exchange: Exchange,
        descriptor: int,
        rank: int,
        size: int,
        timeout: float,
        timer: Callable[[], float],
    ) -> None:
        self.rank, self.size = rank, size
        self._exchange, self._descriptor = exchange, descriptor
        self._timeout, self._timer = timeout, timer
        self._is_open = True

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            add_in_order(self.all_gather(tensor), tensor)

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        gathered = tensor.new_empty(self.size, *tensor.shape)
        if tensor.numel():
            mine = tensor.contiguous().view(-1).view(torch.uint8)
            all_of_them = gathered.view(self.size, -1).view(torch.uint8)
            step = self._exchange.slot_bytes
            for begin in range(0, mine.numel(), step):
                self._gather(mine[begin : begin + step], all_of_them[:, begin : begin + step])
        return gathered.unbind()

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        tensor.copy_(self.all_gather(tensor)[source])

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._exchange.leave()
            os.close(self._descriptor)

    def _gather(self, mine: torch.Tensor, gathered: torch.Tensor) -> None:
        if not self._is_open:
            raise RankLost(f"rank {self.rank} has left the others")
        self._exchange.publish(mine)
        begin = self._timer()
        while (outcome := self._exchange.collect(gathered, _LOOK_US)) is not Outcome.ALL_THERE:
            if outcome is Outcome.SOMEONE_LEFT:
                raise RankLost(f"rank {self.rank} has lost another, which left")
            if (gone := self._ended()) is not None:
                raise RankLost(f"rank {self.rank} has lost another: the process of rank {gone} is gone")
            if self._timer() - begin > self._timeout:
                raise RankLost(f"rank {self.rank} has lost another: it is silent for {self._timeout:g} s")

    def _ended(self) -> int | None:
        """A rank whose lock the system has let go of, if there is one."""
        for other in range(self.size):
            if other == self.rank:
                continue  # one's own lock is no obstacle, and would be let go of below
            with suppress(OSError):  # it is held
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, other)
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, other)
                return other
        return None
