"""Low-rank parts of adapters in C++: checks here, one call below."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int, c_int32, c_int64, c_void_p

import torch

from pageturner.kernels import checks
from pageturner.kernels.cpu.entry import entry
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.low_rank import (
    PARTS,
    AdapterRows,
    Factors,
    LayerLowRank,
    LayerSizes,
    LowRank,
    check_add,
    check_factors,
    in_tiles,
    stacked,
)


class LowRankStruct(ctypes.Structure):
    """low_rank.h's LowRank. It points into the tensors: keep them."""

    _fields_ = (
        ("a", c_void_p),
        ("b", c_void_p * PARTS),
        ("ranks", c_int32 * PARTS),
        ("is_narrow", c_int32),
    )


class AdapterLayerStruct(ctypes.Structure):
    """low_rank.h's AdapterLayer."""

    _fields_ = tuple((name, LowRankStruct) for name in ("qkv", "out", "gate_up", "down"))


class _LowRankCall(ctypes.Structure):
    """low_rank.h's LowRankCall."""

    _fields_ = (
        *((name, c_void_p) for name in ("rows", "output", "of_row", "adapters")),
        *((name, c_int64) for name in ("row_stride", "output_stride")),
        ("starts", c_int32 * (PARTS + 1)),
        *((name, c_int32) for name in ("num_rows", "num_adapters", "in_features", "rank")),
    )


STRUCTURES = {"low_rank": LowRankStruct, "adapter_layer": AdapterLayerStruct, "low_rank_call": _LowRankCall}


class CpuAdapter:
    """One adapter as the whole forward of a model reads it: a struct a layer. layers: as
    `CpuLowRankOps.prepare` made them. sizes: of the model's layers.

    Raises KernelArgumentError for one of another model.
    """

    def __init__(self, layers: Sequence[LayerLowRank], sizes: Sequence[LayerSizes]) -> None:
        if len(sizes) != len(layers):
            raise KernelArgumentError("layers", str(len(layers)), str(len(sizes)))
        for index, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
            if not layer.fits(size):
                raise KernelArgumentError(f"layers[{index}]", "of another model", f"products of {size}")
        self.sizes = sizes
        self._layers = tuple(layers)  # the structs point into them
        products = [product for layer in layers for product in layer.products() if product is not None]
        self.rank = max((product.rank for product in products), default=0)
        structs = [AdapterLayerStruct(*map(_struct, layer.products())) for layer in self._layers]
        self.structs = (AdapterLayerStruct * len(structs))(*structs)


class CpuLowRankOps:
    """`LowRankOps` in C++. Threads are torch's. library: what `build.load_library` returns. dtype: that
    factors are kept in, float32 or bfloat16; sums are in float32."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        self._add = {
            dtype: entry(library, f"add_low_rank_{checks.dtype_name(dtype)}", c_void_p, c_int)
            for dtype in checks.DTYPES
        }

    def prepare(self, parts: Sequence[Factors | None], sizes: Sequence[int]) -> LowRank | None:
        """B in tiles of 16 outputs."""
        if check_factors(parts, sizes) is None:
            return None
        for part in parts:
            if part is not None:
                checks.check_on_cpu(a=part.a, b=part.b)
        return LowRank(
            stacked(parts).to(self._dtype),
            tuple(None if part is None else in_tiles(part.b).to(self._dtype) for part in parts),
            tuple(0 if part is None else part.a.shape[0] for part in parts),
            tuple(sizes),
        )

    def add(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        adapters: AdapterRows,
        low_ranks: Sequence[LowRank | None],
    ) -> None:
        check_add(output, rows, adapters, low_ranks)
        checks.check_on_cpu(output=output, rows=rows)
        if rows.dtype not in self._add:
            raise KernelArgumentError("rows", checks.describe(rows), checks.either(tuple(self._add)))
        if output.stride(1) != 1:
            raise KernelArgumentError("output", f"strided {list(output.stride())}", "dense rows")
        some = next((low_rank for low_rank in low_ranks if low_rank is not None), None)
        if some is None or not len(rows):
            return
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        structs = (LowRankStruct * len(low_ranks))(*map(_struct, low_ranks))
        pointers = (c_void_p * len(structs))(*(ctypes.addressof(struct) for struct in structs))
        starts = [sum(some.sizes[:part]) for part in range(PARTS + 1)]
        call = _LowRankCall(
            rows=rows.data_ptr(),
            output=output.data_ptr(),
            of_row=adapters.of_row.ctypes.data,
            adapters=ctypes.addressof(pointers),
            row_stride=rows.stride(0),
            output_stride=output.stride(0),
            starts=(c_int32 * (PARTS + 1))(*starts),
            num_rows=len(rows),
            num_adapters=len(low_ranks),
            in_features=rows.shape[1],
            rank=max(low_rank.rank for low_rank in low_ranks if low_rank is not None),
        )
        self._add[rows.dtype](byref(call), torch.get_num_threads())


def _struct(low_rank: LowRank | None) -> LowRankStruct:
    if low_rank is None:
        return LowRankStruct()
    some = [None if part is None else part.data_ptr() for part in low_rank.b]
    none = PARTS - len(some)
    return LowRankStruct(
        a=low_rank.a.data_ptr(),
        b=(c_void_p * PARTS)(*some, *[None] * none),
        ranks=(c_int32 * PARTS)(*low_rank.ranks, *[0] * none),
        is_narrow=low_rank.a.dtype is torch.bfloat16,
    )
