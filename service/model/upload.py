"""Small arrays of the host to a device, all of them in one transfer that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]

_ALIGNMENT = 16
"""Bytes to which each array is aligned in the transfer: kernels may load four words at once."""


def upload(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """A tensor on `device` for each array; on the CPU they share its memory.

    The arrays must not be changed afterwards. A GPU's are packed into one pinned buffer and sent by one
    asynchronous copy on the current stream. (A copy from pageable memory, which `torch.tensor(...,
    device="cuda")` is, would wait for everything enqueued before it.) torch keeps the buffer until the
    copy is done.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    offsets, size = [], 0
    for array in arrays:
        offsets.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    packed = pinned.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        packed[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    sent = pinned.to(device, non_blocking=True)
    return [
        sent[offset : offset + array.nbytes].view(_torch_dtype(array)).view(array.shape)
        for array, offset in zip(arrays, offsets, strict=True)
    ]


def _torch_dtype(array: Array) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
