"""Argument checks shared by the backends. Each raises KernelArgumentError before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.layout import KEY_TILE, AttentionBatch, KeyPage

DTYPES = (torch.float32, torch.bfloat16)
BATCH_TENSORS = ("query_start_loc", "seq_lens", "block_tables", "slot_mapping", "positions")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(tensor: torch.Tensor) -> str:
    """dtype and shape, as error messages show them."""
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def check_shape(
    name: str, tensor: torch.Tensor, shape: Sequence[int | None], dtype: torch.dtype | None = None
) -> None:
    """`shape` may leave an extent open with None."""
    if tensor.shape == shape and (dtype is None or tensor.dtype == dtype):
        return  # every layer of every step comes here
    fits = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits or (dtype is not None and tensor.dtype != dtype):
        wanted = ", ".join("*" if extent is None else str(extent) for extent in shape)
        kind = "" if dtype is None else dtype_name(dtype)
        raise KernelArgumentError(name, describe(tensor), f"{kind}[{wanted}]")


def check_on_cpu(**tensors: torch.Tensor | None) -> None:
    """For code that follows a pointer."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_cpu:
            raise KernelArgumentError(name, f"on {tensor.device}", "on the CPU")


def check_kv_layer(kv_layer: torch.Tensor, key_page: KeyPage) -> None:
    """[num_blocks, 2, num_kv_heads, block_size, head_dim] with contiguous pages."""
    check_shape("kv_layer", kv_layer, (None, 2, None, None, None))
    if kv_layer.dtype not in DTYPES:
        raise KernelArgumentError("kv_layer", describe(kv_layer), "float32 or bfloat16")
    block_size, head_dim = kv_layer.shape[-2:]
    if kv_layer.stride(-1) != 1 or kv_layer.stride(-2) != head_dim:
        raise KernelArgumentError("kv_layer", f"strided {list(kv_layer.stride())}", "contiguous pages")
    if key_page is KeyPage.TILED16 and block_size % KEY_TILE:
        raise KernelArgumentError("kv_layer", describe(kv_layer), f"block_size a multiple of {KEY_TILE}")


def check_query(query: torch.Tensor, kv_layer: torch.Tensor, num_rows: int) -> None:
    """[T, num_heads, head_dim] in the cache's dtype; kv heads divide heads."""
    num_kv_heads, head_dim = kv_layer.shape[2], kv_layer.shape[4]
    check_shape("query", query, (num_rows, None, head_dim), kv_layer.dtype)
    if query.shape[1] == 0 or query.shape[1] % num_kv_heads:
        raise KernelArgumentError("query", describe(query), f"heads a multiple of {num_kv_heads}")


def check_sinks(sinks: torch.Tensor | None, num_heads: int) -> None:
    """float32 [num_heads]."""
    if sinks is not None:
        check_shape("sinks", sinks, (num_heads,), torch.float32)


def check_key_value(key: torch.Tensor, value: torch.Tensor, kv_layer: torch.Tensor, num_rows: int) -> None:
    """[T, num_kv_heads, head_dim] in the cache's dtype."""
    shape = (num_rows, kv_layer.shape[2], kv_layer.shape[4])
    check_shape("key", key, shape, kv_layer.dtype)
    check_shape("value", value, shape, kv_layer.dtype)


def check_rope(query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """cos, sin [T, head_dim], both float32 or both in the rows' dtype; an even head_dim."""
    num_rows, _, head_dim = query.shape
    for name, table in (("cos", cos), ("sin", sin)):
        check_shape(name, table, (num_rows, head_dim))
        if table.dtype not in (torch.float32, query.dtype) or table.dtype != cos.dtype:
            raise KernelArgumentError(name, describe(table), f"float32 or {query.dtype}, cos and sin alike")
    if head_dim % 2:
        raise KernelArgumentError("query", describe(query), "an even head_dim")


def check_rms_norm(hidden: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    """hidden [..., H], weight [H], residual as hidden; one dtype."""
    if hidden.dim() < 1 or hidden.dtype not in DTYPES:
        raise KernelArgumentError("hidden", describe(hidden), "float32 or bfloat16[..., H]")
    check_shape("weight", weight, (hidden.shape[-1],), hidden.dtype)
    if residual is not None:
        check_shape("residual", residual, tuple(hidden.shape), hidden.dtype)


def check_gate_up(gate_up: torch.Tensor) -> None:
    """[T, 2 * I]."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.dtype not in DTYPES:
        raise KernelArgumentError("gate_up", describe(gate_up), "float32 or bfloat16[T, 2 * I]")


def check_batch(batch: AttentionBatch, num_blocks: int, block_size: int) -> None:
    """Everything the addressing of one step relies on. Moves a few numbers to the host: once a step."""
    devices = {getattr(batch, name).device for name in BATCH_TENSORS}
    if len(devices) != 1:
        raise KernelArgumentError("batch", f"spread over {sorted(map(str, devices))}", "on one device")
    num_sequences, num_rows = batch.num_sequences, batch.slot_mapping.shape[0]
    check_shape("query_start_loc", batch.query_start_loc, (num_sequences + 1,), torch.int32)
    check_shape("seq_lens", batch.seq_lens, (num_sequences,), torch.int32)
    check_shape("block_tables", batch.block_tables, (num_sequences, None), torch.int32)
    check_shape("slot_mapping", batch.slot_mapping, (num_rows,), torch.int64)
    check_shape("positions", batch.positions, (num_rows,), torch.int64)

    starts, seq_lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    counts = [end - start for start, end in pairwise(starts)]
    if starts[0] != 0 or starts[-1] != num_rows or min(counts, default=0) < 0:
        raise KernelArgumentError("query_start_loc", str(starts), f"0 rising to {num_rows}")
    capacity = batch.block_tables.shape[1] * block_size
    for sequence, (count, seq_len) in enumerate(zip(counts, seq_lens, strict=True)):
        if not count <= seq_len <= capacity:
            raise KernelArgumentError(
                "seq_lens", f"{seq_len} at {sequence}", f"between its {count} rows and the table's {capacity}"
            )
    if batch.max_query_len != max(counts, default=0):
        raise KernelArgumentError("max_query_len", str(batch.max_query_len), f"{max(counts, default=0)}")
    if batch.max_seq_len != max(seq_lens, default=0):
        raise KernelArgumentError("max_seq_len", str(batch.max_seq_len), f"{max(seq_lens, default=0)}")

    used = torch.arange(batch.block_tables.shape[1], device=batch.seq_lens.device) * block_size
    wrong = ((batch.block_tables < 0) | (batch.block_tables >= num_blocks)) & (
        used[None] < batch.seq_lens[:, None]
    )
    if wrong.any():
        sequence, index = wrong.nonzero()[0].tolist()
        block = int(batch.block_tables[sequence, index])
        raise KernelArgumentError("block_tables", f"{block} at [{sequence}, {index}]", f"below {num_blocks}")
    if num_rows:
        low, high = torch.stack(torch.aminmax(batch.slot_mapping)).tolist()
        if low < -1 or high >= num_blocks * block_size:
            raise KernelArgumentError(
                "slot_mapping", f"{low} to {high}", f"-1 to {num_blocks * block_size - 1}"
            )


class CheckedBatch:
    """Runs `check_batch` once for each batch: the layers of a step share one, and its tensors stay."""

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._size: tuple[int, int] | None = None

    def check(self, batch: AttentionBatch, kv_layer: torch.Tensor) -> bool:
        """True if this batch is new."""
        size = (kv_layer.shape[0], kv_layer.shape[3])
        if batch is self._batch and size == self._size:
            return False
        check_batch(batch, *size)
        self._batch, self._size = batch, size
        return True


def check_copy(pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Ids inside the pool, destinations distinct."""
    _check_pairs(pairs, pool.shape[0], pool.shape[0])


def check_transfer(source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Two pools of equal blocks, ids inside each, destinations distinct."""
    if source.shape[1:] != destination.shape[1:] or source.dtype != destination.dtype:
        raise KernelArgumentError("destination", describe(destination), f"blocks as {describe(source)}")
    if source.numel() and source.data_ptr() == destination.data_ptr():
        raise KernelArgumentError("destination", "the source itself", "another pool; see copy_blocks")
    _check_pairs(pairs, source.shape[0], destination.shape[0])


def _check_pairs(pairs: Sequence[tuple[int, int]], num_sources: int, num_destinations: int) -> None:
    for source, destination in pairs:
        if not (0 <= source < num_sources and 0 <= destination < num_destinations):
            raise KernelArgumentError(
                "pairs", f"({source}, {destination})", f"below ({num_sources}, {num_destinations})"
            )
    if len({destination for _, destination in pairs}) != len(pairs):
        raise KernelArgumentError("pairs", "writing a block twice", "distinct destinations")
