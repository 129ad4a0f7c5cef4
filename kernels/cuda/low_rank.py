"""Low-rank parts of adapters in CUDA: two launches a product for all adapters of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ref

import numpy as np
import torch

from pageturner.kernels import checks
from pageturner.kernels.cuda import row_grids, variants
from pageturner.kernels.cuda.arguments import MOST_ADAPTERS, LowRankArguments, LowRankFactors
from pageturner.kernels.cuda.device_plan import to_device
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.cuda.variants import DTYPES
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
    ranks_of,
    stacked,
)

RANK_UNIT = 8
"""Ranks of a part are filled up to a multiple: one access of 16 bytes."""


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The rows of a step by adapter, in pieces that one block takes.

    words: int32 on the device, (adapter, first, count, 0) of each piece, then the rows of the step that have
    an adapter, in the order that `first` counts in. adapters: of each piece, on the host.
    """

    words: torch.Tensor
    adapters: np.ndarray[tuple[int], np.dtype[np.int32]]
    num_rows: int


class CudaLowRankOps:
    """`LowRankOps` by kernels of this package. dtype: of rows, and of the factors as they are kept.

    A row's bits depend on the row and its adapter alone. What A makes of it is rounded to the dtype, as in
    torch; the sum with the output is not before it is whole.
    """

    def __init__(self, launcher: Launcher, dtype: torch.dtype) -> None:
        if dtype not in DTYPES:
            raise KernelArgumentError("dtype", str(dtype), checks.either(DTYPES))
        self._launcher, self._dtype = launcher, dtype
        self._device = torch.empty(0, device=launcher.runtime.device).device
        self._last: tuple[ref[AdapterRows], _Pieces] | None = None

    def prepare(self, parts: Sequence[Factors | None], sizes: ProductSizes) -> FloatLowRank | None:
        """B as it comes, [out, rank]; ranks filled up with zeros."""
        if not check_factors(parts, sizes):
            return None
        filled = [None if part is None else _filled(part) for part in parts]
        b = tuple(None if part is None else part.b.to(self._device, self._dtype) for part in filled)
        a = stacked(filled).to(self._device, self._dtype)
        return FloatLowRank(ranks_of(filled), sizes.sizes, sizes.in_features, a, b)

    def add(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        adapters: AdapterRows,
        low_ranks: Sequence[LowRank | None],
    ) -> None:
        found = check_add(output, rows, adapters, low_ranks, FloatLowRank)
        checks.check_device(self._device, output=output, rows=rows)
        if rows.dtype is not self._dtype:
            raise KernelArgumentError("rows", checks.describe(rows), str(self._dtype))
        if output.stride(1) != 1:
            raise KernelArgumentError("output", f"strided {list(output.stride())}", "dense rows")
        some = next((low_rank for low_rank in found if low_rank is not None), None)
        pieces = self._pieces_of(adapters)
        if some is None or not len(pieces.adapters):
            return
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        most = max(low_rank.rank for low_rank in found if low_rank is not None)
        stride = row_grids.RANK_TILE * -(-most // row_grids.RANK_TILE)
        hidden = rows.new_empty(pieces.num_rows, stride)
        sizes = (*some.sizes, *[0] * (PARTS - len(some.sizes)))
        arguments = LowRankArguments(
            rows=rows.data_ptr(),
            output=output.data_ptr(),
            hidden=hidden.data_ptr(),
            row_ids=pieces.words[4 * len(pieces.adapters) :].data_ptr(),
            row_stride=rows.stride(0),
            output_stride=output.stride(0),
            num_rows=len(rows),
            in_features=rows.shape[1],
            hidden_stride=stride,
        )
        arguments.starts[:] = [sum(sizes[:part]) for part in range(PARTS + 1)]
        for first in range(0, len(found), MOST_ADAPTERS):
            begin, end = np.searchsorted(pieces.adapters, (first, first + MOST_ADAPTERS)).tolist()
            if begin == end:
                continue
            arguments.pieces = pieces.words[4 * begin :].data_ptr()
            arguments.first_adapter = first
            for index, low_rank in enumerate(found[first : first + MOST_ADAPTERS]):
                arguments.factors[index] = _factors(low_rank)
            shrink, expand = variants.low_rank_shrink(self._dtype), variants.low_rank_expand(self._dtype)
            launch = self._launcher.launch
            launch(shrink, row_grids.low_rank_shrink(arguments, end - begin), arguments)
            launch(expand, row_grids.low_rank_expand(arguments, end - begin), arguments)

    def _pieces_of(self, adapters: AdapterRows) -> _Pieces:
        """Made once for all products of a step."""
        last = self._last
        if last is not None and last[0]() is adapters:
            return last[1]
        by_adapter = [adapters.rows_of(adapter) for adapter in range(adapters.num_adapters)]
        pieces: list[tuple[int, int, int, int]] = []
        first = 0
        for adapter, rows in enumerate(by_adapter):
            for begin in range(0, len(rows), row_grids.PIECE_ROWS):
                count = min(row_grids.PIECE_ROWS, len(rows) - begin)
                pieces.append((adapter, first + begin, count, 0))
            first += len(rows)
        table = np.array(pieces, dtype=np.int32).reshape(-1, 4)
        words = to_device(np.concatenate((table.ravel(), *by_adapter)), self._device)
        made = _Pieces(words, table[:, 0].copy(), first)
        self._last = ref(adapters), made
        return made


def _filled(part: Factors) -> Factors:
    missing = -part.a.shape[0] % RANK_UNIT
    pad = torch.nn.functional.pad
    return Factors(pad(part.a, (0, 0, 0, missing)), pad(part.b, (0, missing)).contiguous())


def _factors(low_rank: FloatLowRank | None) -> LowRankFactors:
    factors = LowRankFactors()
    if low_rank is not None:
        factors.a = low_rank.a.data_ptr()
        for part, (b, rank) in enumerate(zip(low_rank.b, low_rank.ranks, strict=True)):
            factors.b[part] = None if b is None else b.data_ptr()
            factors.ranks[part] = rank
    return factors
