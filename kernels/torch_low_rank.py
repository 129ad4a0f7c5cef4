"""Low-rank parts of adapters in torch alone, for any device: rows gathered by adapter, products in
batches."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

import numpy as np
import torch

from pageturner.kernels.low_rank import (
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

ROWS_TOGETHER = 16
"""Rows of one adapter that are multiplied at once. Always as many, the last filled up with zeros: a product
of one shape adds up in one order."""


class TorchLowRankOps:
    """`LowRankOps` in torch. dtype: of rows, and of the factors as they are kept.

    The rows of an adapter are cut into pieces of ROWS_TOGETHER; all pieces of all adapters whose factors have
    one shape go through one batched product each. B is kept as [rank, out].
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._pieces: tuple[ref[AdapterRows], torch.device, list[tuple[int, torch.Tensor]]] | None = None

    def prepare(self, parts: Sequence[Factors | None], sizes: ProductSizes) -> FloatLowRank | None:
        if not check_factors(parts, sizes):
            return None
        return FloatLowRank(
            ranks_of(parts),
            sizes.sizes,
            sizes.in_features,
            stacked(parts).to(self._dtype),
            tuple(None if part is None else part.b.T.contiguous().to(self._dtype) for part in parts),
        )

    def add(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        adapters: AdapterRows,
        low_ranks: Sequence[LowRank | None],
    ) -> None:
        found = check_add(output, rows, adapters, low_ranks, FloatLowRank)
        alike: dict[tuple[int, ...], list[tuple[torch.Tensor, FloatLowRank]]] = {}
        for adapter, index in self._pieces_of(adapters, rows.device):
            low_rank = found[adapter]
            if low_rank is not None:
                alike.setdefault(low_rank.ranks, []).append((index, low_rank))
        padded = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
        for ranks, pieces in alike.items():
            index = torch.stack([index for index, _ in pieces])  # [pieces, ROWS_TOGETHER], T for padding
            factors = [low_rank for _, low_rank in pieces]
            down = torch.stack([low_rank.a.T for low_rank in factors])
            hidden = torch.bmm(padded[index], down)
            real = index.flatten() < len(rows)
            targets = index.flatten()[real]
            first, start = 0, 0
            for part, (rank, size) in enumerate(zip(ranks, factors[0].sizes, strict=True)):
                if rank:
                    up = torch.stack([_of(low_rank, part) for low_rank in factors])
                    added = torch.bmm(hidden[..., first : first + rank], up).flatten(0, 1)[real]
                    output[:, start : start + size].index_add_(0, targets, added)
                first, start = first + rank, start + size

    def _pieces_of(self, adapters: AdapterRows, device: torch.device) -> list[tuple[int, torch.Tensor]]:
        """(adapter, its rows) of each piece; made once for all products of a step."""
        known = self._pieces
        if known is not None and known[0]() is adapters and known[1] == device:
            return known[2]
        pieces = []
        for adapter in range(adapters.num_adapters):
            found = adapters.rows_of(adapter)
            for start in range(0, len(found), ROWS_TOGETHER):
                piece = np.full(ROWS_TOGETHER, len(adapters.of_row), dtype=np.int64)
                some = found[start : start + ROWS_TOGETHER]
                piece[: len(some)] = some
                pieces.append((adapter, torch.from_numpy(piece).to(device)))
        self._pieces = ref(adapters), device, pieces
        return pieces


def _of(low_rank: FloatLowRank, part: int) -> torch.Tensor:
    b = low_rank.b[part]
    assert b is not None, "a part with a rank has a B"
    return b
