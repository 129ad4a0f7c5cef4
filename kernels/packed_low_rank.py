"""Low-rank parts in groups of integers, beside weights that are: half the bytes of bfloat16, and products of
the same kind.

    u = A x, a quantised product with the rows as the weight's own product reads them
    y += B u, another: u is quantised again, in groups of ranks

Each part's ranks are filled up with zeros to whole groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.grouped import RANK_GROUPS, GroupedWeight
from pageturner.kernels.low_rank import (
    Factors,
    PackedLowRank,
    ProductSizes,
    check_factors,
    ranks_of,
)
from pageturner.kernels.packed import TILE, PackedWeight, pack
from pageturner.kernels.reference import quantise_rows


def packed_low_rank(parts: Sequence[Factors | None], sizes: ProductSizes) -> PackedLowRank | None:
    """None for one that has no part. Its ranks are those with what fills them up.

    Raises KernelArgumentError for parts that do not fit, and for outputs of a part that TILE does not divide,
    as theirs are the tiles of the product that they are added to.
    """
    if not check_factors(parts, sizes):
        return None
    if any(size % TILE for size in sizes.sizes):
        raise KernelArgumentError("sizes", str(list(sizes.sizes)), f"multiples of {TILE}")
    group = rank_group(ranks_of(parts))
    a: list[torch.Tensor] = []
    b: list[PackedWeight | None] = []
    for part in parts:
        if part is None:
            b.append(None)
            continue
        missing = -part.a.shape[0] % group
        a.append(torch.nn.functional.pad(part.a, (0, 0, 0, missing)))
        b.append(_packed(torch.nn.functional.pad(part.b, (0, missing)), group))
    return PackedLowRank(
        tuple(0 if part is None else part.layout.in_features for part in b),
        sizes.sizes,
        sizes.in_features,
        _packed(torch.cat(a), sizes.group),
        tuple(b),
        group,
    )


def rank_group(ranks: Sequence[int]) -> int:
    """The widest group that fills up no rank by more than the narrowest would."""
    least = RANK_GROUPS[-1]
    filled = [-(-rank // least) * least for rank in ranks]
    return next(group for group in RANK_GROUPS if not any(rank % group for rank in filled))


def _packed(matrix: torch.Tensor, group: int) -> PackedWeight:
    """float32 [out, in] as codes of 8 bits with float32 scales."""
    groups = quantise_rows(matrix.contiguous(), group)
    return pack(GroupedWeight(groups.codes, groups.scales, None, group))
