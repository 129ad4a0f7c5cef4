"""Checks of what batches and copies address inside a pool, shared by the backends.

A kernel follows these numbers as pointers. Each check raises KernelArgumentError before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pageturner.kernels.checks import check_shape, describe
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.layout import AttentionBatch, HostBatch

HOST_ARRAYS = {
    "query_start_loc": np.dtype(np.int32),
    "seq_lens": np.dtype(np.int32),
    "block_tables": np.dtype(np.int32),
    "slot_mapping": np.dtype(np.int64),
}
"""Of a HostBatch, and of the tensors of the same names."""
BATCH_TENSORS = (*HOST_ARRAYS, "positions")


def check_batch(batch: AttentionBatch, num_blocks: int, block_size: int) -> HostBatch:
    """Shapes and dtypes of the tensors, and that what they hold stays inside the pool.

    Returns the batch's addresses on the host: its own, or else a copy of its tensors (on a GPU, that
    waits for the device). Table entries past a sequence's length may be anything.
    """
    devices = {getattr(batch, name).device for name in BATCH_TENSORS}
    if len(devices) > 1:
        raise KernelArgumentError("batch", f"spread over {sorted(map(str, devices))}", "on one device")
    check_shape("seq_lens", batch.seq_lens, (None,), torch.int32)
    check_shape("slot_mapping", batch.slot_mapping, (None,), torch.int64)
    num_sequences, num_rows = batch.num_sequences, batch.slot_mapping.shape[0]
    check_shape("query_start_loc", batch.query_start_loc, (num_sequences + 1,), torch.int32)
    check_shape("block_tables", batch.block_tables, (num_sequences, None), torch.int32)
    check_shape("positions", batch.positions, (num_rows,), torch.int64)

    host = batch.host
    if host is None:
        host = HostBatch(*(getattr(batch, name).cpu().numpy() for name in HOST_ARRAYS))
    for name, dtype in HOST_ARRAYS.items():
        array, tensor = getattr(host, name), getattr(batch, name)
        if array.shape != tensor.shape or array.dtype != dtype:
            found = f"{array.dtype.name}{list(array.shape)}"
            raise KernelArgumentError(f"host.{name}", found, f"{describe(tensor)}, as its tensor")
    check_addresses(host, num_blocks, block_size)
    for name, longest in (
        ("max_query_len", np.diff(host.query_start_loc).max(initial=0)),
        ("max_seq_len", host.seq_lens.max(initial=0)),
    ):
        if getattr(batch, name) != longest:
            raise KernelArgumentError(name, str(getattr(batch, name)), str(longest))
    return host


def check_addresses(host: HostBatch, num_blocks: int, block_size: int) -> None:
    """Rows in order, lengths that the tables hold, block ids and slots inside the pool."""
    starts, seq_lens, num_rows = host.query_start_loc, host.seq_lens, len(host.slot_mapping)
    counts = np.diff(starts)
    if starts[0] != 0 or starts[-1] != num_rows or counts.min(initial=0) < 0:
        raise KernelArgumentError("query_start_loc", str(starts.tolist()), f"0 rising to {num_rows}")
    capacity = host.block_tables.shape[1] * block_size
    if len(wrong := np.flatnonzero((seq_lens < counts) | (seq_lens > capacity))):
        sequence = wrong[0]
        raise KernelArgumentError(
            "seq_lens",
            f"{seq_lens[sequence]} at {sequence}",
            f"between its {counts[sequence]} rows and the table's {capacity}",
        )
    tables = host.block_tables
    # One pass in most steps: padding is a valid id as a rule, and a negative id is a large unsigned one.
    if tables.view(np.uint32).max(initial=0) >= num_blocks:
        read = np.arange(tables.shape[1]) * block_size < seq_lens[:, None]
        if len(found := np.argwhere(read & ((tables < 0) | (tables >= num_blocks)))):
            sequence, index = found[0]
            raise KernelArgumentError(
                "block_tables", f"{tables[sequence, index]} at [{sequence}, {index}]", f"below {num_blocks}"
            )
    if num_rows:
        low, high = host.slot_mapping.min(), host.slot_mapping.max()
        if low < -1 or high >= num_blocks * block_size:
            raise KernelArgumentError(
                "slot_mapping", f"{low} to {high}", f"-1 to {num_blocks * block_size - 1}"
            )


class CheckedBatch:
    """Runs `check_batch` once for each batch: the layers of a step share one, and its tensors stay.

    host: the addresses of the batch last checked.
    """

    host: HostBatch

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._size: tuple[int, int] | None = None

    def check(self, batch: AttentionBatch, kv_layer: torch.Tensor) -> bool:
        """True if this batch is new."""
        size = (kv_layer.shape[0], kv_layer.shape[3])
        if batch is self._batch and size == self._size:
            return False
        self.host = check_batch(batch, *size)
        self._batch, self._size = batch, size
        return True


def check_copy(pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Ids inside the pool, destinations distinct."""
    _check_blocks("pool", pool)
    _check_pairs(pairs, pool.shape[0], pool.shape[0])


def check_transfer(source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Two pools of equal blocks, ids inside each, destinations distinct."""
    _check_blocks("source", source)
    _check_blocks("destination", destination)
    if source.shape[1:] != destination.shape[1:] or source.dtype != destination.dtype:
        raise KernelArgumentError("destination", describe(destination), f"blocks as {describe(source)}")
    (begin, end), (other_begin, other_end) = _span(source), _span(destination)
    if source.device == destination.device and begin < other_end and other_begin < end:
        raise KernelArgumentError("destination", "of the source's memory", "another pool; see copy_blocks")
    _check_pairs(pairs, source.shape[0], destination.shape[0])


def _check_blocks(name: str, pool: torch.Tensor) -> None:
    if pool.dim() < 2:
        raise KernelArgumentError(name, describe(pool), "[num_blocks, ...]")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from its first byte to behind its last; equal if it has none."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def _check_pairs(pairs: Sequence[tuple[int, int]], num_sources: int, num_destinations: int) -> None:
    for source, destination in pairs:
        if not (0 <= source < num_sources and 0 <= destination < num_destinations):
            raise KernelArgumentError(
                "pairs", f"({source}, {destination})", f"below ({num_sources}, {num_destinations})"
            )
    if len({destination for _, destination in pairs}) != len(pairs):
        raise KernelArgumentError("pairs", "writing a block twice", "distinct destinations")
