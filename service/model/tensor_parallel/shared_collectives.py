"""`Collectives` of processes on one machine's CPUs, through memory that they share.

Sockets on the loopback address cost hundreds of microseconds an exchange, of which a step has hundreds; this
costs some ten. The memory has no name in any folder: it is gone with the last process that has it, whenever
that ends, and no size of /dev/shm bounds it. Each rank holds a lock on a byte of it for as long as it lives,
whatever ends it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from pageturner.kernels.cpu.exchange import ALIGNMENT, Exchange, Outcome, region_bytes
from pageturner.service.errors import RankLost
from pageturner.service.model.tensor_parallel.collectives import add_in_order

SLOT_BYTES = 1 << 20
MOST_BYTES = 16 << 20
"""Of the whole region."""
_LOOK_US = 100_000
"""Between two looks whether those that are waited for live."""


def can_share() -> bool:
    """Whether this system has what is needed."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


def _slot_bytes(size: int) -> int:
    return min(SLOT_BYTES, MOST_BYTES // (2 * size)) // ALIGNMENT * ALIGNMENT


class SharedRegion:
    """One rank's hold on the memory of `size` ranks. descriptor: of it, which this owns."""

    def __init__(self, descriptor: int, rank: int, size: int) -> None:
        """Raises OSError where there is no memory, or it is not of this size; the descriptor is closed
        then."""
        self.descriptor, self.slot_bytes = descriptor, _slot_bytes(size)
        num_bytes = region_bytes(size, self.slot_bytes)
        try:
            if rank == 0:
                os.posix_fallocate(descriptor, 0, num_bytes)  # what is not there would end a process later
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            elif not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:  # EINVAL for a file
                raise OSError(errno.EINVAL, "it may shrink")
            if os.fstat(descriptor).st_size != num_bytes:
                raise OSError(errno.EINVAL, f"{os.fstat(descriptor).st_size} bytes, not {num_bytes}")
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
            self.memory = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def create(cls, size: int) -> SharedRegion:
        """Rank 0's. Raises OSError."""
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        return cls(os.memfd_create("pageturner-ranks", flags), 0, size)

    @classmethod
    def join(cls, path: str, rank: int, size: int) -> SharedRegion:
        """Another rank's, by what `path` says on rank 0. Raises OSError, also where rank 0 has none."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), rank, size)

    @property
    def path(self) -> str:
        """By which processes of the same user find it."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def close(self) -> None:
        """Let go of it, and of the lock. Once."""
        os.close(self.descriptor)


class SharedCollectives:
    """In a region that all ranks have joined, and which this owns. timeout: seconds. timer: likewise."""

    def __init__(
        self,
        library: ctypes.CDLL,
        region: SharedRegion,
        rank: int,
        size: int,
        timeout: float,
        timer: Callable[[], float],
    ) -> None:
        self.rank, self.size = rank, size
        self._region = region
        self._exchange = Exchange(library, region.memory, region.slot_bytes, rank, size)
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
            self._region.close()

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
                fcntl.lockf(self._region.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, other)
                fcntl.lockf(self._region.descriptor, fcntl.LOCK_UN, 1, other)
                return other
        return None
