"""Bugs of the kernels of adapters."""

from __future__ import annotations

from pageturner.kernels.cuda.runtime import Launcher
from support.low_rank_kernels import CASES, MIXED, check, check_company
from support.planted_kernels import Bug, bug

LOW_RANK = "low_rank.cu"


def mixed(launcher: Launcher) -> None:
    check(launcher, MIXED)


def company(launcher: Launcher) -> None:
    check_company(launcher, MIXED)


def wide(launcher: Launcher) -> None:
    check(launcher, CASES["one part, wide"])


def unaligned(launcher: Launcher) -> None:
    check(launcher, CASES["unaligned"])


def many_adapters(launcher: Launcher) -> None:
    check(launcher, CASES["more adapters than a launch has"])


UNORDERED_LOW_RANK: dict[str, Bug] = {
    "low_rank: no barrier before the warps' sums are added": bug(LOW_RANK, "__syncthreads();", "", wide),
}

LOW_RANK_BUGS: dict[str, Bug] = {
    "low_rank: the second step takes the first one's columns": bug(
        LOW_RANK, "word(column, 2 * step + 1)", "word(column, 1)", mixed,
    ),
    "low_rank: the high rows' second half is the low ones'": bug(
        LOW_RANK, "word(high, 2 * step + 1)", "word(low, 2 * step + 1)", mixed,
    ),
    "low_rank: a launch's adapters are counted from the step's first": bug(
        LOW_RANK, "piece.adapter - args.first_adapter", "piece.adapter % kMostAdapters + 1", many_adapters,
    ),
    "low_rank: every piece has the adapter's first rows": bug(
        LOW_RANK, "args.row_ids[piece.first + index]", "args.row_ids[index]", mixed,
    ),
    "low_rank: one warp's sums are left out": bug(
        LOW_RANK, "of < kLowRankWarps", "of < kLowRankWarps - 1", wide,
    ),
    "low_rank: warps begin with the same inputs": bug(
        LOW_RANK, "warp * kDepth + octet", "0 * warp + octet", wide,
    ),
    "low_rank: rows behind a piece's end are written": bug(
        LOW_RANK, "index >= piece.count || count <= 0", "count <= 0", mixed,
    ),
    "low_rank: every part has the first one's ranks": bug(
        LOW_RANK, "(part > 0 ? factors.ranks[0] : 0)", "0", mixed,
    ),
    "low_rank: the third part's ranks begin with the second's": bug(
        LOW_RANK, "(part > 1 ? factors.ranks[1] : 0)", "0", mixed,
    ),
    "low_rank: outputs lie in the order of the products": bug(
        LOW_RANK, "first + group / 2 * kOctet + tile * 2 + group % 2", "first + tile * 8 + group", mixed,
    ),
    "low_rank: the sum replaces the output": bug(
        LOW_RANK, "elements[j] += sums[j / 2][half * 2 + j % 2];",
        "elements[j] = sums[j / 2][half * 2 + j % 2];",
        mixed,
    ),
    "low_rank: a part begins where the product does": bug(
        LOW_RANK, "args.starts[part] + first + octet", "first + octet", mixed,
    ),
    "low_rank: a row reaches into the next": bug(
        LOW_RANK, "has_row[0] ? size - k : 0", "has_row[0] ? kOctet : 0", unaligned,
    ),
    "low_rank: the last octet of outputs is whole": bug(
        LOW_RANK, "store_octet(to, pack_octet<T>(elements), count);",
        "store_octet(to, pack_octet<T>(elements));",
        unaligned,
    ),
    "low_rank: hidden rows lie as in the step": bug(
        LOW_RANK, "int64_t(piece.first + row) * args.hidden_stride",
        "int64_t(row) * args.hidden_stride", mixed,
    ),
}  # fmt: skip
