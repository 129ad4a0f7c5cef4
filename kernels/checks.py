"""Checks of what a tensor is, shared by the backends: shape, dtype, strides, where it lies.

Each raises KernelArgumentError before anything is written. What batches and copies address within a pool is
checked by `address_checks`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.layout import (
    CODE_DTYPES,
    KEY_TILE,
    KeyOrder,
    head_dim_of,
    is_coded,
)

DTYPES = (torch.float32, torch.bfloat16)
"""Of the operations on the CPU; those on a GPU have their own."""
ROW_DTYPES = (*DTYPES, torch.float16)
"""All that rows may have."""
VECTOR_BYTES = 16
"""What a GPU's thread loads and stores at once, from addresses that it divides."""


def dtype_name(dtype: torch.dtype) -> str:
    """As messages name it, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def either(dtypes: Sequence[torch.dtype]) -> str:
    """The names of the dtypes, joined by "or"."""
    return " or ".join(map(dtype_name, dtypes))


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


def check_device(device: torch.device, **tensors: torch.Tensor | None) -> None:
    """For kernels that run on `device` and follow a pointer."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise KernelArgumentError(name, f"on {tensor.device}", f"on {device}")


def is_vector_aligned(tensor: torch.Tensor) -> bool:
    """The last dim is dense, and every row of it begins at a multiple of VECTOR_BYTES."""
    per_vector = VECTOR_BYTES // tensor.element_size()
    *outer, inner = tensor.stride()
    return (
        inner == 1
        and tensor.data_ptr() % VECTOR_BYTES == 0
        and all(stride % per_vector == 0 for stride in outer)
    )


def check_kv_layer(
    kv_layer: torch.Tensor, key_order: KeyOrder, dtypes: Sequence[torch.dtype] = DTYPES
) -> None:
    """[num_blocks, 2, num_kv_heads, block_size, head_dim] with contiguous heads; or of codes, see layout.

    dtypes: of pools that keep numbers as they are.
    """
    check_shape("kv_layer", kv_layer, (None, 2, None, None, None))
    if kv_layer.dtype not in (*dtypes, *CODE_DTYPES):
        raise KernelArgumentError("kv_layer", describe(kv_layer), either((*dtypes, *CODE_DTYPES)))
    block_size, token = kv_layer.shape[-2:]
    if kv_layer.stride(-1) != 1 or kv_layer.stride(-2) != token:
        raise KernelArgumentError("kv_layer", f"strided {list(kv_layer.stride())}", "contiguous heads")
    if is_coded(kv_layer.dtype):
        _check_scales(kv_layer)
    if key_order is KeyOrder.TILED16 and block_size % KEY_TILE:
        raise KernelArgumentError("kv_layer", describe(kv_layer), f"block_size a multiple of {KEY_TILE}")


def _check_scales(kv_layer: torch.Tensor) -> None:
    """There is a code before them, and they are where a bfloat16 may lie."""
    head_dim = head_dim_of(kv_layer)
    if head_dim < 1:
        raise KernelArgumentError("kv_layer", describe(kv_layer), "a code beside each scale")
    starts = (kv_layer.storage_offset(), *kv_layer.stride()[:3], kv_layer.shape[3] * head_dim)
    if any(start % 2 for start in starts):
        found = f"of heads that begin at {list(starts)}"
        raise KernelArgumentError("kv_layer", found, "scales at even addresses")


def check_vector_blocks(kv_layer: torch.Tensor, least_block_size: int) -> None:
    """For kernels: blocks read by VECTOR_BYTES, blocks found by shift and mask and less than 2^31 elements
    apart. A pool that is none of that cannot be copied instead: it is written, too."""
    block_size, head_dim = kv_layer.shape[3], head_dim_of(kv_layer)
    if block_size < least_block_size or block_size & (block_size - 1):
        raise KernelArgumentError(
            "kv_layer", f"of block_size {block_size}", f"a power of two from {least_block_size} on"
        )
    per_vector = VECTOR_BYTES // kv_layer.element_size()
    if head_dim % per_vector:
        raise KernelArgumentError("kv_layer", f"of head_dim {head_dim}", f"a multiple of {per_vector}")
    # Rows of codes follow each other without their scales, from where a head's part begins.
    if not is_vector_aligned(kv_layer.flatten(3) if is_coded(kv_layer.dtype) else kv_layer):
        raise KernelArgumentError(
            "kv_layer",
            f"strided {list(kv_layer.stride())} from {kv_layer.data_ptr():#x}",
            f"rows that begin at multiples of {VECTOR_BYTES} bytes",
        )
    if kv_layer.stride(0) >= 2**31:
        raise KernelArgumentError("kv_layer", f"of blocks {kv_layer.stride(0)} elements apart", "below 2^31")


def own_dtype(
    rows: torch.Tensor, kv_layer: torch.Tensor, dtypes: Sequence[torch.dtype] = ROW_DTYPES
) -> torch.dtype:
    """What rows must have beside a cache: its dtype; over codes any of `dtypes`, theirs if it is one."""
    if not is_coded(kv_layer.dtype):
        return kv_layer.dtype
    return rows.dtype if rows.dtype in dtypes else dtypes[0]


def row_dtype(
    rows: torch.Tensor, kv_layer: torch.Tensor, dtypes: Sequence[torch.dtype] = DTYPES
) -> torch.dtype:
    """For backends that take float32 rows over any cache: float32 if the rows are, else `own_dtype`."""
    return torch.float32 if rows.dtype is torch.float32 else own_dtype(rows, kv_layer, dtypes)


def check_query(
    query: torch.Tensor, kv_layer: torch.Tensor, num_rows: int, dtype: torch.dtype | None = None
) -> None:
    """[T, num_heads, head_dim] in `dtype`, by default `own_dtype`; kv heads divide heads."""
    num_kv_heads, head_dim = kv_layer.shape[2], head_dim_of(kv_layer)
    if not num_kv_heads:
        raise KernelArgumentError("kv_layer", describe(kv_layer), "a kv head")
    check_shape("query", query, (num_rows, None, head_dim), dtype or own_dtype(query, kv_layer))
    if query.shape[1] == 0 or query.shape[1] % num_kv_heads:
        raise KernelArgumentError("query", describe(query), f"heads a multiple of {num_kv_heads}")


def check_sinks(sinks: torch.Tensor | None, num_heads: int) -> None:
    """float32 [num_heads]."""
    if sinks is not None:
        check_shape("sinks", sinks, (num_heads,), torch.float32)


def check_key_value(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_layer: torch.Tensor,
    num_rows: int,
    dtype: torch.dtype | None = None,
) -> None:
    """[T, num_kv_heads, head_dim] in `dtype`, by default `own_dtype`."""
    shape, dtype = (num_rows, kv_layer.shape[2], head_dim_of(kv_layer)), dtype or own_dtype(key, kv_layer)
    check_shape("key", key, shape, dtype)
    check_shape("value", value, shape, dtype)


def check_rope(query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """cos, sin [T, head_dim], both float32 or both in the rows' dtype; an even head_dim."""
    num_rows, _, head_dim = query.shape
    for name, table in (("cos", cos), ("sin", sin)):
        check_shape(name, table, (num_rows, head_dim))
        if table.dtype not in (torch.float32, query.dtype) or table.dtype != cos.dtype:
            raise KernelArgumentError(
                name, describe(table), f"{either((torch.float32, query.dtype))}, cos and sin alike"
            )
    if head_dim % 2:
        raise KernelArgumentError("query", describe(query), "an even head_dim")


def check_rms_norm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> None:
    """hidden [..., H], weight [H], residual as hidden; one dtype."""
    if hidden.dim() < 1 or not hidden.shape[-1] or hidden.dtype not in dtypes:
        raise KernelArgumentError("hidden", describe(hidden), f"{either(dtypes)}[..., H]")
    check_shape("weight", weight, (hidden.shape[-1],), hidden.dtype)
    if residual is not None:
        check_shape("residual", residual, tuple(hidden.shape), hidden.dtype)


def check_gate_up(gate_up: torch.Tensor, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    """[T, 2 * I]."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.dtype not in dtypes:
        raise KernelArgumentError("gate_up", describe(gate_up), f"{either(dtypes)}[T, 2 * I]")
