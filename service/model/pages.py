"""Memory of the host by whole pages, as the system hands it out."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch


def own_pages(shape: Sequence[int], dtype: torch.dtype, *, huge: bool = False) -> torch.Tensor:
    """An uninitialised tensor of the host that shares no page of memory with anything else.

    Pages are what is pinned, and none may be twice: neighbours on a heap meet in the middle of one. They are
    taken from the system as they are first written. huge: by 2 MiB, where the system has such pages; what
    is read here and there then finds its addresses without a walk through page tables. Raises MemoryError if
    the machine refuses.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes of the host cannot be had: {error}") from error
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them: only slower
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)  # which keeps the pages
