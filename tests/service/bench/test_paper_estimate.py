"""Bounds of attention on paper, and where their instructions are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from pageturner.kernels.errors import KernelsUnavailable
from pageturner.service.bench.attention_cases import MODELS, Case, cases
from pageturner.service.bench.paper_estimate import (
    GPUS,
    TileInstructions,
    count_instructions,
    estimate,
    kernels_of,
    read_machine_code,
)


def _no_compiler(*_: object) -> dict[str, tuple[int, int]]:
    raise KernelsUnavailable("no NVRTC")


KV = ("bfloat16", "int8")
CASES = tuple(cases(MODELS, (1,), (128,)))
KERNELS = kernels_of([*CASES, *cases(MODELS, (1,), (128,), "int8")])
INSTRUCTIONS = TileInstructions({v.expression: (1000, 3000) for v in KERNELS}, "a test")


def test_decode_counts_each_key_tile_of_each_kv_head_once() -> None:
    found = estimate(Case("decode", MODELS[1], 3, 33), GPUS["H200"], INSTRUCTIONS)
    assert found.warp_tiles == 3 * 8 * 3
    moved = 3 * 33 * 8 * 128 * 2 * 2 + 3 * 32 * 128 * 2 * 2
    assert found.memory == pytest.approx(moved / 4.8e12)
    assert found.issue == pytest.approx(72 * 1000 / (132 * 4 * 1.98e9))
    assert found.issue_of_all == pytest.approx(3 * found.issue)


def test_codes_move_their_bytes_and_their_scales_and_take_kernels_of_their_own() -> None:
    plain, coded = (estimate(Case("decode", MODELS[1], 3, 33, kv), GPUS["H200"], INSTRUCTIONS) for kv in KV)
    moved = 3 * 33 * 8 * (128 + 2) * 2 + 3 * 32 * 128 * 2 * 2
    assert coded.memory == pytest.approx(moved / 4.8e12)
    assert coded.warp_tiles == plain.warp_tiles
    assert [variant.kernel for variant in KERNELS] == [
        f"{kind}_{step}" for kind in ("paged", "coded") for _ in MODELS for step in ("decode", "prefill")
    ]


def test_prefill_counts_the_turns_that_its_row_tiles_take() -> None:
    """Row by row, by the definition of the tiles, against the closed form."""
    case, gpu = Case("prefill", MODELS[1], 2, 100), GPUS["A100"]
    rows, keys, group, warps = 128, 32, 4, 4
    turns = 0
    for first in range(0, 100 * group, rows):
        last_position = (min(first + rows, 100 * group) - 1) // group
        turns += len({position // keys for position in range(last_position + 1)})
    found = estimate(case, gpu, INSTRUCTIONS)
    assert found.warp_tiles == 2 * 8 * warps * turns
    assert found.products * gpu.tensor_flops >= case.flops  # masked products are products, too
    assert found.seconds == max(found.memory, found.issue, found.products)


def test_without_a_compiler_the_budgets_stand_in() -> None:
    found = count_instructions(kernels_of(CASES), "sm_90", _no_compiler)
    assert "budgets" in found.source
    assert "no NVRTC" in found.source
    assert min(found.by_expression.values()) > (100, 100)


@pytest.mark.slow
def test_instructions_are_counted_in_the_machine_code(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    counted = count_instructions(kernels_of(CASES), "sm_90", read_machine_code(tmp_path))
    allowed = count_instructions(kernels_of(CASES), "sm_90", _no_compiler)
    assert counted.source == "counted in the machine code for sm_90, on the shortest path and on all"
    for expression, (_, most) in allowed.by_expression.items():
        shortest, all_paths = counted.by_expression[expression]
        assert 50 < shortest <= all_paths <= most
        assert all_paths > most / 2
