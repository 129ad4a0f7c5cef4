"""How ranks meet: by the fastest way that all of them have."""

from __future__ import annotations

import ctypes
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import Store  # type: ignore[attr-defined] # torch leaves it out of what it exports

from pageturner.kernels.cpu.build import load_library
from pageturner.kernels.errors import CompilerUnavailable
from pageturner.service.errors import RankLost
from pageturner.service.model.tensor_parallel.collectives import Collectives
from pageturner.service.model.tensor_parallel.shared_collectives import can_share, open_shared
from pageturner.service.model.tensor_parallel.torch_collectives import open_collectives

_SHARED, _BY_TORCH = "shared memory", "torch"


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
) -> Collectives:
    """Meet the other ranks, which are processes of this machine, by the store.

    timeout: of the meeting, and of each operation. library: as `exchange_library` says; all ranks' decides.
    Raises RankLost if not all ranks come.
    """
    way = _BY_TORCH if library is None else _SHARED
    try:
        store.set_timeout(timeout)
        store.set(f"way {rank}", way)
        ways = {store.get(f"way {other}").decode() for other in range(size)}
    except RuntimeError as error:
        raise RankLost(f"rank {rank} of {size} does not meet the others: {error}") from error
    if library is not None and ways == {_SHARED}:
        return open_shared(library, store, rank, size, timeout)
    return open_collectives(device, store, rank, size, timeout)
