"""How much of a GPU's memory is there, in use, and needed for a while; and the host's pages that it reads."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class MemoryMeter(Protocol):
    """Reads one device's memory, in bytes."""

    def total(self) -> int:
        """Of the device."""
        ...

    def in_use(self) -> int:
        """By anybody, what this process keeps for itself included."""
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


def own_pages(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor of the host that shares no page of memory with anything else.

    Pages are what is pinned, and none may be twice: neighbours on a heap meet in the middle of one. Raises
    MemoryError if the machine refuses.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes of the host cannot be had: {error}") from error
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)  # which keeps the pages


class Pinned:
    """A tensor of the host whose pages a GPU may read and write by itself, until this is closed.

    Pinned where it lies: torch's own allocator would round gigabytes up to the next power of two. Raises
    MemoryError if the machine refuses.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._address: int | None = None
        if not tensor.numel():
            return
        self._cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch leaves it so
        status = int(self._cuda.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
        if status:
            raise MemoryError(f"{tensor.nbytes} bytes of the host cannot be pinned (CUDA error {status})")
        self._address = tensor.data_ptr()

    def close(self) -> None:
        if self._address is not None:
            self._cuda.cudaHostUnregister(self._address)
            self._address = None


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
