"""Every shipped kernel on every architecture is within its budget; and what is over one is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.ops import cpu_cache_dir

from pageturner.kernels.cuda import budgets, variants
from pageturner.kernels.cuda.attention_plan import BLOCKS_PER_MULTIPROCESSOR
from pageturner.kernels.cuda.compiler import Compiler
from pageturner.kernels.cuda.occupancy import MULTIPROCESSORS
from pageturner.kernels.cuda.ptxas import Resources
from pageturner.kernels.cuda.report import Row, inspect_kernels, label_of
from pageturner.kernels.cuda.sass import KernelCode, Loop, find_nvdisasm
from pageturner.kernels.cuda.variants import Variant

# Compiling all kernels for all architectures takes a minute of processor time, on a busy machine several.
pytestmark = pytest.mark.timeout(900)


def inspect(
    compiler: Compiler, shipped: Sequence[Variant], archs: Sequence[str] = ("sm_90",)
) -> tuple[Row, ...]:
    return inspect_kernels(compiler, find_nvdisasm(), shipped, archs)


@pytest.fixture(scope="module")
def shipped_rows() -> tuple[Row, ...]:
    """Compiled once for each state of the sources on this machine."""
    return inspect(Compiler(cpu_cache_dir()), variants.shipped(), budgets.ARCHS)


@pytest.mark.parametrize("arch", budgets.ARCHS)
def test_every_shipped_kernel_is_within_its_budget(arch: str, shipped_rows: tuple[Row, ...]) -> None:
    rows = [row for row in shipped_rows if row.arch == arch]
    assert len(rows) == len(variants.shipped()) == 111
    over = [f"{row.label}: {'; '.join(row.violations)}" for row in rows if row.violations]
    assert not over, "\n".join(over)
    assert all(row.blocks > 0 for row in rows)


def test_tiles_fit_the_machines_that_they_are_made_for(shipped_rows: tuple[Row, ...]) -> None:
    """A block, the GPUs that give it least; decode blocks, side by side as plans take them to be."""
    least = min(machine.block_shared_bytes for machine in MULTIPROCESSORS.values())
    too_large = [variant.expression for variant in variants.shipped() if variant.shared_bytes > least]
    assert not too_large, f"more than {least:,} bytes of shared memory a block: {too_large}"
    decode = [row for row in shipped_rows if row.label.startswith(("paged_decode", "coded_decode"))]
    assert decode
    too_few = [
        f"{row.arch} {row.label}: {row.blocks}" for row in decode if row.blocks < BLOCKS_PER_MULTIPROCESSOR
    ]
    assert not too_few, f"fewer than {BLOCKS_PER_MULTIPROCESSOR} blocks a multiprocessor: {too_few}"


def test_budgets_are_no_larger_than_what_they_are_for(shipped_rows: tuple[Row, ...]) -> None:
    """A ceiling far above the kernels would let the next change pass unseen."""
    for key, budget in budgets.BUDGETS.items():
        rows = [row for variant, row in _by_variant(shipped_rows) if _key(variant) == key]
        plain = [row for row in rows if not row.label.endswith("softcap")]
        assert budget.registers <= 1.2 * max(row.registers for row in rows) + 8, key
        for arch in budgets.ARCHS:
            needed = max(row.instructions or 0 for row in plain if row.arch == arch)
            assert budget.instructions_on(arch, softcap=False) <= 1.35 * needed + 8, (key, arch)


def _by_variant(rows: Sequence[Row]) -> list[tuple[Variant, Row]]:
    by_expression = {variant.expression: variant for variant in variants.shipped()}
    return [(by_expression[row.expression], row) for row in rows]


def _key(variant: Variant) -> tuple[str, int | None]:
    return variant.kernel, budgets.head_dim_of(variant)


def test_each_budget_is_of_a_shipped_kernel_and_each_of_those_has_one() -> None:
    assert {_key(variant) for variant in variants.shipped()} == set(budgets.BUDGETS)
    assert {variant.kernel for variant in variants.shipped()} - set(budgets.EXPECTED) == {
        "decode_merge",
        "coded_write_kv",
    }


def test_labels_tell_the_kernels_apart() -> None:
    labels = [label_of(variant) for variant in variants.shipped()]
    assert len(set(labels)) == len(labels)
    assert "paged_decode bf16 128 bounded softcap" in labels
    assert "paged_prefill fp16 64" in labels
    assert "coded_decode bf16 128 int8" in labels
    assert "rope_and_write_kv bf16 float" in labels
    assert "copy_blocks" in labels


DECODE = variants.paged_decode(torch.bfloat16, 128, bounded=False, softcap=False)
BUDGET = budgets.budget_of(DECODE)
FRUGAL = Resources(BUDGET.registers, spill_bytes=0, stack_bytes=0, static_shared_bytes=0)
OPCODES = ("HMMA.16816.F32.BF16", "LDGSTS.E.BYPASS.LTC128B.128", "LDSM.16.M88.4", "LDSM.16.MT88.4", "EXIT")
GOOD = KernelCode(OPCODES, (Loop(BUDGET.instructions, products=32, shortest=100),))


def violations(
    resources: Resources = FRUGAL, code: KernelCode = GOOD, arch: str = "sm_90"
) -> tuple[str, ...]:
    return budgets.violations(DECODE, arch, resources, code)


def test_exactly_at_its_ceilings_a_kernel_is_within() -> None:
    assert violations() == ()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"registers": BUDGET.registers + 1},
            f"registers: {BUDGET.registers + 1}, at most {BUDGET.registers}",
        ),
        ({"spill_bytes": 4}, "bytes spilled: 4, at most 0"),
        ({"stack_bytes": 8}, "bytes of stack: 8, at most 0"),
        ({"static_shared_bytes": 170_000}, "bytes of shared memory: 235,536, at most 232,448"),
    ],
)
def test_resources_over_budget_are_named_with_the_limit(changed: dict[str, int], told: str) -> None:
    assert violations(replace(FRUGAL, **changed)) == (told,)


def test_shared_memory_is_that_of_the_architecture() -> None:
    some = replace(FRUGAL, static_shared_bytes=110_000)
    assert violations(some) == ()
    assert violations(some, arch="sm_80") == ("bytes of shared memory: 175,536, at most 166,912",)


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("LDGSTS", "no asynchronous 16-byte copies"),
        ("LDSM.16.M88", "no matrix loads"),
        ("LDSM.16.MT88", "no transposed matrix loads"),
    ],
)
def test_a_missing_instruction_is_named(missing: str, told: str) -> None:
    opcodes = tuple(opcode for opcode in OPCODES if not opcode.startswith(missing))
    assert violations(code=replace(GOOD, opcodes=opcodes)) == (told,)


def test_narrow_copies_are_not_wide_ones() -> None:
    opcodes = tuple(opcode.replace("LDGSTS.E.BYPASS.LTC128B.128", "LDGSTS.E.64") for opcode in OPCODES)
    assert violations(code=replace(GOOD, opcodes=opcodes)) == ("no asynchronous 16-byte copies",)


def test_local_memory_is_found_in_the_code() -> None:
    code = replace(GOOD, opcodes=(*OPCODES, "STL.64", "LDL"))
    assert violations(code=code) == ("local memory accesses: 2, at most 0",)


def test_the_main_loop_is_the_smallest_that_holds_a_tile() -> None:
    """HMMA loops before it hold less than a tile's products, those around it more."""
    loops = (Loop(10, 8, shortest=9), Loop(2000, 40, shortest=50), Loop(400, 32, shortest=90))
    assert budgets.instructions_of(DECODE, replace(GOOD, loops=loops)) == budgets.Instructions(400, 90)
    unrolled = replace(GOOD, loops=(Loop(900, 96, shortest=300),))
    assert budgets.instructions_of(DECODE, unrolled) == budgets.Instructions(300, 100)
    assert violations(code=replace(GOOD, loops=(Loop(10, 8, shortest=9),))) == (
        "no loop with the 32 products of a tile",
    )


def test_scores_that_are_capped_may_cost_more() -> None:
    capped = variants.paged_decode(torch.bfloat16, 128, bounded=True, softcap=True)
    bounded = variants.paged_decode(torch.bfloat16, 128, bounded=True, softcap=False)
    code = replace(GOOD, loops=(Loop(BUDGET.instructions + BUDGET.softcap, 32, shortest=100),))
    assert budgets.violations(capped, "sm_90", FRUGAL, code) == ()
    assert len(budgets.violations(bounded, "sm_90", FRUGAL, code)) == 1


SPILLING = """
struct bfloat16 { unsigned short bits; };
template <class T> __global__ void __launch_bounds__(1024, 2) write_kv(float4* values) {
  float4 held[40];
#pragma unroll
  for (int i = 0; i < 40; i++) held[i] = values[threadIdx.x + i * 64];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 40; i++) values[threadIdx.x + (39 - i) * 64] = held[i];
}
"""


@pytest.mark.parametrize("arch", budgets.ARCHS)
def test_a_kernel_that_spills_is_refused(arch: str, tmp_path: Path) -> None:
    (tmp_path / "write_kv.cu").write_text(SPILLING)
    compiler = Compiler(tmp_path / "cache", sources=tmp_path)
    (row,) = inspect(compiler, (variants.write_kv(torch.bfloat16),), (arch,))
    assert row.spill_bytes > 0
    reasons = [violation.partition(":")[0] for violation in row.violations]
    assert "bytes spilled" in reasons
    assert "local memory accesses" in reasons


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared_bytes", "blocks"),
    [
        ("sm_90", 128, 96, 0, 5),
        ("sm_90", 128, 97, 0, 4),
        ("sm_90", 128, 128, 0, 4),
        ("sm_90", 128, 168, 0, 3),
        ("sm_90", 128, 169, 0, 2),
        ("sm_90", 128, 255, 0, 2),
        ("sm_90", 64, 255, 0, 4),
        ("sm_90", 256, 32, 0, 8),  # 64 warps
        ("sm_90", 32, 16, 0, 32),  # blocks
        ("sm_90", 128, 32, 227 * 1024, 1),
        ("sm_90", 128, 32, 227 * 1024 + 1, 0),
        ("sm_90", 128, 32, 113 * 1024, 2),  # each takes 1 KiB more
        ("sm_90", 128, 32, 113 * 1024 + 1, 1),
        ("sm_80", 128, 32, 48 * 1024, 3),
        ("sm_86", 128, 32, 48 * 1024, 2),
        ("sm_89", 128, 32, 0, 12),
    ],
)
def test_resident_blocks(arch: str, threads: int, registers: int, shared_bytes: int, blocks: int) -> None:
    """As NVIDIA's occupancy calculator has them."""
    assert MULTIPROCESSORS[arch].resident_blocks(threads, registers, shared_bytes) == blocks
