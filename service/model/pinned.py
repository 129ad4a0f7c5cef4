"""Memory of the host that a GPU reads and writes by itself."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch


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
        """Unpin it; a GPU must not read or write it by itself afterwards. Closing twice is no error."""
        if self._address is not None:
            self._cuda.cudaHostUnregister(self._address)
            self._address = None
