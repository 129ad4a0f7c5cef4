"""Low-rank parts of adapters beside quantised weights, in C++: checks here, one call below."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int, c_int32, c_int64, c_void_p

import torch

from pageturner.kernels.cpu.entry import entry
from pageturner.kernels.cpu.low_rank import check_dense, check_factors_on_cpu
from pageturner.kernels.cpu.quantised_ops import PackedWeightStruct, packed_weight_struct
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.grouped import RANK_GROUPS
from pageturner.kernels.low_rank import (
    PARTS,
    AdapterRows,
    Factors,
    LayerLowRank,
    LayerSizes,
    LowRank,
    PackedLowRank,
    ProductSizes,
    check_add,
)
from pageturner.kernels.packed_low_rank import packed_low_rank


class PackedLowRankStruct(ctypes.Structure):
    """packed_low_rank.h's PackedLowRank. It points into the tensors: keep them."""

    _fields_ = (("a", PackedWeightStruct), ("b", PackedWeightStruct * PARTS), ("group", c_int32))


class AdapterLayerStruct(ctypes.Structure):
    """packed_low_rank.h's AdapterLayer."""

    _fields_ = tuple((name, PackedLowRankStruct) for name in ("qkv", "out", "gate_up", "down"))


class _PackedLowRankCall(ctypes.Structure):
    """packed_low_rank.h's PackedLowRankCall."""

    _fields_ = (
        *((name, c_void_p) for name in ("rows", "output", "of_row", "adapters")),
        *((name, c_int64) for name in ("row_stride", "output_stride")),
        ("parts", c_int32 * PARTS),
        *((name, c_int32) for name in ("num_rows", "num_adapters", "in_features", "group", "most_ranks")),
    )


STRUCTURES = {
    "packed_low_rank": PackedLowRankStruct,
    "packed_low_rank_call": _PackedLowRankCall,
    "adapter_layer": AdapterLayerStruct,
}


class CpuAdapter:
    """One adapter as the whole forward of a model reads it: a struct a layer. layers: as
    `CpuPackedLowRankOps.prepare` made them. sizes: of the model's layers.

    Raises KernelArgumentError for one of another model, or prepared by other operations.
    """

    def __init__(self, layers: Sequence[LayerLowRank], sizes: Sequence[LayerSizes]) -> None:
        if len(sizes) != len(layers):
            raise KernelArgumentError("layers", str(len(layers)), str(len(sizes)))
        for index, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
            if not layer.fits(size):
                raise KernelArgumentError(f"layers[{index}]", "of another model", f"products of {size}")
        self.sizes = sizes
        self._layers = tuple(layers)  # the structs point into them
        structs = [AdapterLayerStruct(*map(_struct, layer.products())) for layer in self._layers]
        self.structs = (AdapterLayerStruct * len(structs))(*structs)
        products = [product for layer in layers for product in layer.products() if product is not None]
        self.ranks = max((product.rank for product in products), default=0)
        """The most of one product."""


class CpuPackedLowRankOps:
    """`LowRankOps` in C++ with packed factors, for rows in float32. Threads are torch's. library: what
    `build.load_library` returns."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._add = entry(library, "add_packed_low_rank", c_void_p, c_int)

    def prepare(self, parts: Sequence[Factors | None], sizes: ProductSizes) -> PackedLowRank | None:
        check_factors_on_cpu(parts)
        return packed_low_rank(parts, sizes)

    def add(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        adapters: AdapterRows,
        low_ranks: Sequence[LowRank | None],
    ) -> None:
        found = check_add(output, rows, adapters, low_ranks, PackedLowRank)
        check_dense(output, rows, (torch.float32,))
        some = [low_rank for low_rank in found if low_rank is not None]
        if not some or not len(rows):
            return
        if len(groups := {low_rank.a.layout.group for low_rank in some}) > 1:
            raise KernelArgumentError("low_ranks", f"in groups of {sorted(groups)}", "those of one product")
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        structs = (PackedLowRankStruct * len(found))(*map(_struct, found))
        pointers = (c_void_p * len(structs))(*(ctypes.addressof(struct) for struct in structs))
        sizes = some[0].sizes
        call = _PackedLowRankCall(
            rows=rows.data_ptr(),
            output=output.data_ptr(),
            of_row=adapters.of_row.ctypes.data,
            adapters=ctypes.addressof(pointers),
            row_stride=rows.stride(0),
            output_stride=output.stride(0),
            parts=(c_int32 * PARTS)(*sizes, *[0] * (PARTS - len(sizes))),
            num_rows=len(rows),
            num_adapters=len(found),
            in_features=rows.shape[1],
            group=groups.pop(),
            most_ranks=max(low_rank.rank for low_rank in some),
        )
        self._add(byref(call), torch.get_num_threads())


def _struct(low_rank: LowRank | None) -> PackedLowRankStruct:
    if low_rank is None:
        return PackedLowRankStruct()
    if not isinstance(low_rank, PackedLowRank):
        raise KernelArgumentError("low_rank", type(low_rank).__name__, PackedLowRank.__name__)
    parts = [
        PackedWeightStruct() if part is None else packed_weight_struct(part, RANK_GROUPS)
        for part in low_rank.b
    ]
    none = [PackedWeightStruct()] * (PARTS - len(parts))
    return PackedLowRankStruct(
        packed_weight_struct(low_rank.a), (PackedWeightStruct * PARTS)(*parts, *none), low_rank.group
    )
