"""What low-rank parts mean, written for reading: every backend is tested against it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pageturner.kernels.low_rank import (
    AdapterRows,
    Factors,
    FloatLowRank,
    LowRank,
    PackedLowRank,
    ProductSizes,
    check_add,
    check_factors,
    ranks_of,
    stacked,
)
from pageturner.kernels.packed_low_rank import packed_low_rank
from pageturner.kernels.reference import ReferenceQuantisedOps


class ReferenceLowRankOps:
    """`LowRankOps` by definition: row by row, part by part, in float64; the sum rounds once, to the
    output."""

    def prepare(self, parts: Sequence[Factors | None], sizes: ProductSizes) -> FloatLowRank | None:
        """B as it comes: [out, rank]."""
        if not check_factors(parts, sizes):
            return None
        b = tuple(None if part is None else part.b for part in parts)
        return FloatLowRank(ranks_of(parts), sizes.sizes, sizes.in_features, stacked(parts), b)

    def add(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        adapters: AdapterRows,
        low_ranks: Sequence[LowRank | None],
    ) -> None:
        found = check_add(output, rows, adapters, low_ranks, FloatLowRank)
        for row, adapter in enumerate(adapters.of_row.tolist()):
            low_rank = None if adapter < 0 else found[adapter]
            if low_rank is None:
                continue
            hidden = torch.split(low_rank.a.double() @ rows[row].double(), list(low_rank.ranks))
            for part, outputs in enumerate(torch.split(output[row], list(low_rank.sizes))):
                b = low_rank.b[part]
                if b is not None:
                    outputs.copy_(outputs.double() + b.double() @ hidden[part])


class ReferencePackedLowRankOps:
    """`LowRankOps` of packed factors by definition: two quantised products of a row, and a sum in float32."""

    def prepare(self, parts: Sequence[Factors | None], sizes: ProductSizes) -> PackedLowRank | None:
        return packed_low_rank(parts, sizes)

    def add(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        adapters: AdapterRows,
        low_ranks: Sequence[LowRank | None],
    ) -> None:
        found = check_add(output, rows, adapters, low_ranks, PackedLowRank)
        ops = ReferenceQuantisedOps()
        for row, adapter in enumerate(adapters.of_row.tolist()):
            low_rank = None if adapter < 0 else found[adapter]
            if low_rank is None:
                continue
            hidden = torch.split(ops.linear(rows[row : row + 1], low_rank.a), list(low_rank.ranks), dim=1)
            for part, outputs in enumerate(torch.split(output[row], list(low_rank.sizes))):
                b = low_rank.b[part]
                if b is not None:
                    outputs += ops.linear(hidden[part].contiguous(), b)[0]
