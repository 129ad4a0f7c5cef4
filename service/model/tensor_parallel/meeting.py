"""How ranks meet: by the fastest way that all of them have."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import Store  # type: ignore[attr-defined] # torch leaves it out of what it exports

from pageturner.kernels.cpu.build import load_library
from pageturner.kernels.errors import CompilerUnavailable
from pageturner.service.errors import RankLost
from pageturner.service.model.tensor_parallel.collectives import Collectives
from pageturner.service.model.tensor_parallel.shared_collectives import (
    SharedCollectives,
    SharedRegion,
    can_share,
)
from pageturner.service.model.tensor_parallel.torch_collectives import open_collectives

_SHARED, _BY_TORCH = "shared memory", "torch"
_LOOK_SECONDS = 0.05
"""At most, between two looks whether the others have come."""


def exchange_library(device: torch.device, cache_dir: Path) -> ctypes.CDLL | None:
    """What exchanges bytes through shared memory on this machine, if ranks on the device can meet by that."""
    if device.type != "cpu" or not can_share():
        return None
    try:
        return load_library(cache_dir)
    except CompilerUnavailable:
        return None


def meet(
    device: torch.device,
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    library: ctypes.CDLL | None = None,
    check: Callable[[], object] = lambda: None,
    note: Callable[[str], object] = lambda _: None,
    by_sockets: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Collectives:
    """Meet the other ranks, which are processes of this machine, by the store.

    timeout: of the meeting, and of each operation. library: as `exchange_library` says; all ranks' decides,
    and whether all can map the memory that rank 0 has for them. check: called while others are waited for;
    what it raises ends the wait. note: told why ranks that might share memory don't. by_sockets: what holds
    while torch connects ranks that don't. Raises RankLost if not all ranks come.
    """
    guests = _Guests(store, rank, size, timeout, check)
    try:
        with ExitStack() as held:  # the region, until it is the collectives'
            region = _region(guests, held, note, can_share=library is not None)
            guests.say("way", _SHARED if region is not None else _BY_TORCH)
            ways = {guests.hear("way", other) for other in range(size)}
            store.set_timeout(timeout)
            if library is not None and region is not None and ways == {_SHARED}:
                seconds = timeout.total_seconds()
                shared = SharedCollectives(library, region, rank, size, seconds, time.monotonic)
                held.pop_all()
                return shared
    except RuntimeError as error:  # of the store, whose rank 0 is gone
        raise RankLost(f"rank {rank} of {size} does not meet the others: {error}") from error
    with by_sockets():
        return open_collectives(device, store, rank, size, timeout)


class _Guests:
    """What ranks say to each other by the store before they have met: each thing once, under its name."""

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, check: Callable[[], object]
    ) -> None:
        self.rank, self.size = rank, size
        self._store, self._check = store, check
        self._seconds = timeout.total_seconds()
        self._ends = time.monotonic() + self._seconds

    def say(self, name: str, value: str) -> None:
        self._store.set(f"{name} {self.rank}", value)

    def hear(self, name: str, other: int) -> str:
        """Looks from time to time: a wait within the store would not end for the loss of another rank."""
        key, pause = f"{name} {other}", _LOOK_SECONDS / 64
        while not self._store.check([key]):
            self._check()
            if time.monotonic() > self._ends:
                told = f"rank {other} has not come within {self._seconds:g} s"
                raise RankLost(f"rank {self.rank} of {self.size} does not meet the others: {told}")
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_SECONDS)
        return str(self._store.get(key).decode())


def _region(
    guests: _Guests, held: ExitStack, note: Callable[[str], object], *, can_share: bool
) -> SharedRegion | None:
    """The memory that rank 0 has for all, if there is some and this rank can map it. held: closes it."""
    try:
        if guests.rank == 0:
            path = ""
            try:
                if not can_share:
                    return None
                region = held.enter_context(closing(SharedRegion.create(guests.size)))
                path = region.path
            finally:
                guests.say("region", path)
            return region
        if can_share and (path := guests.hear("region", 0)):
            return held.enter_context(closing(SharedRegion.join(path, guests.rank, guests.size)))
    except OSError as error:
        note(f"no memory to share: {error.strerror or error}")
    return None
