"""How much of a GPU's memory is there, in use, and needed for a while."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class MemoryMeter(Protocol):
    """Reads one device's memory, in bytes."""

    def total(self) -> int:
        """Of the device."""
        ...

    def in_use(self) -> int:
        """By any process, what this one keeps for itself included."""
        ...

    def tensors(self) -> int:
        """By the tensors of this process."""
        ...

    def peak_of(self, work: Callable[[], object]) -> int:
        """What `work` needs at its worst, above what was in use. Raises MemoryError if that is too much."""
        ...


class CudaMemoryMeter:
    """A GPU through torch's statistics.

    The peak is of what the allocator took of the device, not of what it handed out: the difference,
    fragmentation, is as lost to the cache.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        _, total = torch.cuda.mem_get_info(self._device)
        return int(total)

    def in_use(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    def tensors(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def peak_of(self, work: Callable[[], object]) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        try:
            work()
            torch.cuda.synchronize(self._device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        return int(torch.cuda.max_memory_reserved(self._device) - before)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Of one device, in bytes, before the cache is made.

    weights: of the model. in_use: those, what the driver keeps, and other processes. activations: what the
    largest step needs besides, for as long as it runs.
    """

    total: int
    weights: int
    in_use: int
    activations: int
