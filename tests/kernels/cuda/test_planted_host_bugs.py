"""Bugs beside the kernels, which are those that are shipped: in their grids, and in the order of copies."""

from __future__ import annotations

from types import ModuleType

import pytest
from support import planted_checks as on
from support import row_kernels
from support.emulation import emulated_launcher
from support.planted_checks import Check
from support.planting import plant

from pageturner.kernels.cuda import block_moves, row_grids

BUGS: dict[str, tuple[ModuleType, str, str, Check]] = {
    "keys and values of the first head only": (
        row_grids, "_blocks(args.num_kv_heads * args.head_dim, OCTET)", "1", on.wide_rows,
    ),
    "rope forgets that values come along": (
        row_grids, "num_heads + 2 * args.num_kv_heads", "num_heads + args.num_kv_heads", on.wide_rope,
    ),
    "rows that fill no block of threads are not normed": (
        row_grids, "ceil(rows / rows_per_block)", "rows // rows_per_block", on.rms_norm,
    ),
    "long rows are normed four a block": (
        row_grids, "if args.size <= WARP_ROW_SIZE else 1", "if args.size else 1", on.rms_norm,
    ),
    "the end of a row or block has no threads": (
        row_grids, "ceil(total / (per_thread * ROW_THREADS))", "max(1, total // (per_thread * ROW_THREADS))",
        on.large_copy,
    ),
    "what reads a block comes after what overwrites it": (
        block_moves, "reversed(reached)", "reached", on.copies,
    ),
    "a cycle goes round before its trees are copied": (
        block_moves, "trees + _round(cycle)", "_round(cycle) + trees", on.copies,
    ),
    "a cycle's bytes are taken up too late": (
        block_moves, "[Move(first, CARRIED), *steps, ", "[*steps, Move(first, CARRIED), ", on.copies,
    ),
    "a cycle goes round with the arrows": (
        block_moves, "pairwise(cycle)]", "reversed([*pairwise(cycle)])]", on.copies,
    ),
}  # fmt: skip
"""Module, right, wrong, and the check that must fail. Outputs begin as NaN: what is not written is seen."""


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, right, wrong, check = BUGS[name]
    check(emulated_launcher())
    planted = plant(module, right, wrong)
    monkeypatch.setattr(row_kernels, "row_grids", planted if module is row_grids else row_grids)
    monkeypatch.setattr(row_kernels, "chains_of", getattr(planted, "chains_of", block_moves.chains_of))
    with pytest.raises(AssertionError):
        check(emulated_launcher())
