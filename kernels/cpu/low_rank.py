"""Low-rank parts of adapters in C++, in float32: checks here, one call below."""

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
    FloatLowRank,
    LowRank,
    ProductSizes,
    check_add,
    check_factors,
    in_tiles,
    ranks_of,
    stacked,
)


class LowRankStruct(ctypes.Structure):
    """low_rank.h's LowRank. It points into the tensors: keep them."""

    _fields_ = (("a", c_void_p), ("b", c_void_p * PARTS), ("ranks", c_int32 * PARTS))


class _LowRankCall(ctypes.Structure):
    """low_rank.h's LowRankCall."""

    _fields_ = (
        *((name, c_void_p) for name in ("rows", "output", "of_row", "adapters")),
        *((name, c_int64) for name in ("row_stride", "output_stride")),
        ("starts", c_int32 * (PARTS + 1)),
        *((name, c_int32) for name in ("num_rows", "num_adapters", "in_features", "rank")),
    )


STRUCTURES = {"low_rank": LowRankStruct, "low_rank_call": _LowRankCall}


class CpuLowRankOps:
    """`LowRankOps` in C++ with factors in float32. Threads are torch's. library: what `build.load_library`
    returns."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._add = {
            dtype: entry(library, f"add_low_rank_{checks.dtype_name(dtype)}", c_void_p, c_int)
            for dtype in checks.DTYPES
        }

    def prepare(self, parts: Sequence[Factors | None], sizes: ProductSizes) -> FloatLowRank | None:
        """B in tiles of 16 outputs."""
        if not check_factors(parts, sizes):
            return None
        check_factors_on_cpu(parts)
        b = tuple(None if part is None else in_tiles(part.b) for part in parts)
        return FloatLowRank(ranks_of(parts), sizes.sizes, sizes.in_features, stacked(parts), b)

    def add(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        adapters: AdapterRows,
        low_ranks: Sequence[LowRank | None],
    ) -> None:
        found = check_add(output, rows, adapters, low_ranks, FloatLowRank)
        check_dense(output, rows, tuple(self._add))
        some = next((low_rank for low_rank in found if low_rank is not None), None)
        if some is None or not len(rows):
            return
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        structs = (LowRankStruct * len(found))(*map(_struct, found))
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
            num_adapters=len(found),
            in_features=rows.shape[1],
            rank=max(low_rank.rank for low_rank in found if low_rank is not None),
        )
        self._add[rows.dtype](byref(call), torch.get_num_threads())


def check_factors_on_cpu(parts: Sequence[Factors | None]) -> None:
    """Raises KernelArgumentError, as the next."""
    for part in parts:
        if part is not None:
            checks.check_on_cpu(a=part.a, b=part.b)


def check_dense(output: torch.Tensor, rows: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """That C++ can add to the output in place."""
    checks.check_on_cpu(output=output, rows=rows)
    if rows.dtype not in dtypes:
        raise KernelArgumentError("rows", checks.describe(rows), checks.either(dtypes))
    if output.stride(1) != 1:
        raise KernelArgumentError("output", f"strided {list(output.stride())}", "dense rows")


def _struct(low_rank: FloatLowRank | None) -> LowRankStruct:
    if low_rank is None:
        return LowRankStruct()
    some = [None if part is None else part.data_ptr() for part in low_rank.b]
    none = PARTS - len(some)
    return LowRankStruct(
        a=low_rank.a.data_ptr(),
        b=(c_void_p * PARTS)(*some, *[None] * none),
        ranks=(c_int32 * PARTS)(*low_rank.ranks, *[0] * none),
    )
