"""What low-rank parts beside quantised weights must give: the bits of the definition, in any batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from pageturner.kernels.low_rank import AdapterRows, Factors, LowRankOps, ProductSizes
from pageturner.kernels.reference_low_rank import ReferencePackedLowRankOps
from support.quantised_checks import assert_bits, random_rows

Check = Callable[[LowRankOps], None]
Parts = list[Factors | None]
REFERENCE = ReferencePackedLowRankOps()


def factors(seed: int, ranks: Sequence[int], sizes: ProductSizes) -> Parts:
    """Of random numbers; None where the rank is 0."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Factors(
            torch.randn(rank, sizes.in_features, generator=generator),
            torch.randn(size, rank, generator=generator),
        )
        if rank
        else None
        for rank, size in zip(ranks, sizes.sizes, strict=True)
    ]


def of_row(adapters: Sequence[int], num_adapters: int) -> AdapterRows:
    return AdapterRows(np.array(adapters, dtype=np.int32), num_adapters)


def added(
    ops: LowRankOps, parts: Sequence[Parts], sizes: ProductSizes, rows: torch.Tensor, adapters: Sequence[int]
) -> torch.Tensor:
    """To an output of random numbers that are the same each time."""
    output = random_rows(len(rows), sum(sizes.sizes), seed=len(rows) + 99)
    ops.add(output, rows, of_row(adapters, len(parts)), [ops.prepare(each, sizes) for each in parts])
    return output


def check_added(
    ops: LowRankOps, parts: Sequence[Parts], sizes: ProductSizes, adapters: Sequence[int]
) -> None:
    rows = random_rows(len(adapters), sizes.in_features, seed=len(adapters))
    assert_bits(added(ops, parts, sizes, rows, adapters), added(REFERENCE, parts, sizes, rows, adapters))


QKV = ProductSizes((64, 32, 16), 96, 32)
RANKS = ((4, 4, 4), (8, 8, 8), (16, 16, 16), (32, 32, 32), (64, 32, 64), (9, 0, 24), (0, 17, 0), (1, 40, 2))
MIXED = (0, -1, 1, 0, 2, 7, -1, 3, 4, 0, 5, 5, 6, 7, 2, 3, 3, 3, -1, 4)


def ranks(ops: LowRankOps) -> None:
    """Each group of ranks that there is, parts that are missing, ranks that fill up no group."""
    for seed, each in enumerate(RANKS):
        check_added(ops, [factors(seed, each, QKV)], QKV, (0, -1, 0))


def mixes(ops: LowRankOps) -> None:
    """All of them in one batch; many rows of one, which are taken through it in pieces; none at all."""
    parts = [factors(seed, each, QKV) for seed, each in enumerate(RANKS)]
    for adapters in (MIXED, (-1,) * 3, (1,) * 100, tuple(index % 9 - 1 for index in range(150)), ()):
        check_added(ops, parts, QKV, adapters)


def products(ops: LowRankOps) -> None:
    """Of one part and of two, wide and narrow, in the groups of the product's rows."""
    for sizes in (
        ProductSizes((48,), 576, 32), ProductSizes((32, 32), 64, 16), ProductSizes((16,), 1536, 16),
        ProductSizes((1024, 16, 1024), 32, 32),
    ):  # fmt: skip
        parts = [factors(seed, (rank,) * len(sizes.sizes), sizes) for seed, rank in enumerate((8, 16, 5))]
        check_added(ops, parts, sizes, (2, 0, 1, -1, 1, 0, 0))


def some_without(ops: LowRankOps) -> None:
    """Adapters that leave the product as it is, beside others."""
    none: Parts = [None, None, None]
    parts = [none, factors(1, (8, 8, 8), QKV), none]
    check_added(ops, parts, QKV, (0, 1, 2, 1, 0, -1))


def company(ops: LowRankOps) -> None:
    """A row's bits are the same alone and among others, by any number of threads."""
    parts = [factors(seed, each, QKV) for seed, each in enumerate(RANKS)]
    adapters = tuple(index % 9 - 1 for index in range(90))
    rows = random_rows(90, QKV.in_features)
    prepared = [ops.prepare(each, QKV) for each in parts]
    whole = torch.zeros(90, sum(QKV.sizes))
    ops.add(whole, rows, of_row(adapters, len(parts)), prepared)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for begin, end in ((0, 1), (0, 90), (3, 12), (80, 90), (89, 90)):
                found = torch.zeros(end - begin, sum(QKV.sizes))
                ops.add(found, rows[begin:end], of_row(adapters[begin:end], len(parts)), prepared)
                assert_bits(found, whole[begin:end])
    finally:
        torch.set_num_threads(before)


def strides(ops: LowRankOps) -> None:
    """Rows and outputs that are parts of wider ones; what lies beside them stays."""
    prepared = [ops.prepare(factors(1, (8, 8, 8), QKV), QKV)]
    wide, output = random_rows(6, 192), torch.zeros(6, 2 * sum(QKV.sizes))
    adapters = (0, 0, -1, 0, 0, 0)
    ops.add(output[:, : sum(QKV.sizes)], wide[:, 3:99], of_row(adapters, 1), prepared)
    expected = torch.zeros(6, sum(QKV.sizes))
    REFERENCE.add(expected, wide[:, 3:99].contiguous(), of_row(adapters, 1), prepared)
    assert_bits(output[:, : sum(QKV.sizes)], expected)
    assert not output[:, sum(QKV.sizes) :].any()


def not_finite(ops: LowRankOps) -> None:
    """NaN in every output of the row, and in no other."""
    parts = [factors(1, (8, 16, 8), QKV), factors(2, (4, 4, 4), QKV)]
    rows = random_rows(7, QKV.in_features)
    rows[2, 5], rows[5, 90] = math.inf, math.nan
    adapters = (0, 1, 0, 0, -1, 1, 1)
    found = added(ops, parts, QKV, rows, adapters)
    assert found.isnan().all(1).nonzero().flatten().tolist() == [2, 5]
    assert_bits(found, added(REFERENCE, parts, QKV, rows, adapters))


CHECKS: dict[str, Check] = {
    "ranks": ranks,
    "mixes": mixes,
    "products": products,
    "some without": some_without,
    "company": company,
    "strides": strides,
    "not finite": not_finite,
}
