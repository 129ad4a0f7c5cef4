"""What attention can reach at best, from the paper: bytes moved, instructions issued, products computed.

Each call is bound by the slowest of three: memory that moves its bytes, schedulers that issue its
instructions (one a cycle each), tensor cores that compute its products, masked ones and padding included. A
real call also starts, ends and waits, which this does not know: no figure here was measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pageturner.kernels.cuda import tiles, variants
from pageturner.kernels.cuda.budgets import budget_of
from pageturner.kernels.cuda.compiler import Compiler
from pageturner.kernels.cuda.report import inspect_kernels
from pageturner.kernels.cuda.sass import find_nvdisasm
from pageturner.kernels.cuda.variants import Variant
from pageturner.kernels.errors import KernelsUnavailable
from pageturner.kernels.layout import is_coded
from pageturner.service.bench.attention_cases import Case

Inspect = Callable[[tuple[Variant, ...], str], Mapping[str, tuple[int, int]]]
"""(variants, arch) -> what `TileInstructions` holds. Raises KernelsUnavailable."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A model's figures by its maker.

    bandwidth: bytes/s of HBM. tensor_flops: dense bfloat16, FLOP/s. clock: Hz, boosted. mma_share: of
    tensor_flops that mma.sync reaches, where other instructions are faster.
    """

    name: str
    arch: str
    multiprocessors: int
    bandwidth: float
    clock: float
    tensor_flops: float
    mma_share: float
    schedulers: int = 4

    @property
    def issue_rate(self) -> float:
        """Instructions/s of warps."""
        return self.multiprocessors * self.schedulers * self.clock


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", "sm_80", 108, 2.039e12, 1.41e9, 312e12, 1.0),
        # On Hopper only wgmma reaches the peak; mma.sync was measured at 62-65 % of it (arXiv:2402.13499).
        Gpu("H100", "sm_90", 132, 3.35e12, 1.98e9, 989e12, 0.63),
        Gpu("H200", "sm_90", 132, 4.8e12, 1.98e9, 989e12, 0.63),
    )
}


@dataclass(frozen=True, slots=True)
class TileInstructions:
    """Of a warp, for one tile of the main loop: (on its shortest path, on all paths together) by expression.

    A turn takes one path, so that its cost lies between the two. source: where the figures are from.
    """

    by_expression: Mapping[str, tuple[int, int]]
    source: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """Lower bounds of one call's seconds, by what bounds it. warp_tiles: turns of the main loop of a warp.

    issue: if every turn took the shortest path. issue_of_all: if it took the instructions of all paths.
    """

    case: Case
    warp_tiles: int
    memory: float
    issue: float
    issue_of_all: float
    products: float

    @property
    def seconds(self) -> float:
        """The longest of the bounds."""
        return max(self.memory, self.issue, self.products)

    @property
    def bound(self) -> str:
        """Which bound is the longest."""
        bounds = {"memory": self.memory, "issue": self.issue, "tensor cores": self.products}
        return max(bounds, key=bounds.__getitem__)


def kernels_of(chosen: Iterable[Case]) -> tuple[Variant, ...]:
    """The attention kernels that the cases run, each once."""
    return tuple(dict.fromkeys(map(_kernel_of, chosen)))


def _kernel_of(case: Case) -> Variant:
    rows, head_dim = torch.bfloat16, case.heads.head_dim
    if is_coded(case.kv_dtype):
        coded = variants.coded_decode if case.kind == "decode" else variants.coded_prefill
        return coded(rows, case.kv_dtype, head_dim, bounded=False, softcap=False)
    plain = variants.paged_decode if case.kind == "decode" else variants.paged_prefill
    return plain(rows, head_dim, bounded=False, softcap=False)


def estimate(case: Case, gpu: Gpu, instructions: TileInstructions) -> Estimate:
    """How long the case takes at least on `gpu`, by bytes, instructions and products."""
    heads, variant = case.heads, _kernel_of(case)
    if case.kind == "decode":
        warp_tiles = case.batch * heads.num_kv_heads * -(-case.context // tiles.DECODE_KEYS)
        rows, keys = tiles.MMA_ROWS, tiles.DECODE_KEYS
    else:
        shape = tiles.PREFILL[heads.head_dim]
        warp_tiles = case.batch * heads.num_kv_heads * shape.warps * _key_tiles(case, shape)
        rows, keys = shape.row_tiles * tiles.MMA_ROWS, shape.keys
    # Scores and outputs: rows x keys x head_dim each.
    shortest, all_paths = instructions.by_expression[variant.expression]
    flops = warp_tiles * 2 * (2 * rows * keys * heads.head_dim)
    return Estimate(
        case,
        warp_tiles,
        memory=case.bytes_moved / gpu.bandwidth,
        issue=warp_tiles * shortest / gpu.issue_rate,
        issue_of_all=warp_tiles * all_paths / gpu.issue_rate,
        products=flops / (gpu.tensor_flops * gpu.mma_share),
    )


def _key_tiles(case: Case, shape: tiles.PrefillTiles) -> int:
    """Of all the row tiles of one sequence and kv head: each looks at the keys up to its last row."""
    group = case.heads.num_heads // case.heads.num_kv_heads
    packed = case.context * group
    last_rows = np.minimum(np.arange(shape.rows, packed + shape.rows, shape.rows), packed) - 1
    return int((-(-(last_rows // group + 1) // shape.keys)).sum())


def count_instructions(wanted: Iterable[Variant], arch: str, inspect: Inspect) -> TileInstructions:
    """Read from the machine code where that can be made here, else what the budgets allow."""
    kernels = tuple(wanted)
    try:
        return TileInstructions(
            inspect(kernels, arch), f"counted in the machine code for {arch}, on the shortest path and on all"
        )
    except KernelsUnavailable as reason:
        most = {variant.expression: budget_of(variant).instructions for variant in kernels}
        allowed = {expression: (count, count) for expression, count in most.items()}
        return TileInstructions(allowed, f"the most that the budgets allow, since {reason}")


def read_machine_code(cache_dir: Path) -> Inspect:
    """The `inspect` of this machine: NVRTC compiles, nvdisasm takes apart, neither needs a GPU."""

    def inspect(wanted: tuple[Variant, ...], arch: str) -> Mapping[str, tuple[int, int]]:
        rows = inspect_kernels(Compiler(cache_dir), find_nvdisasm(), wanted, (arch,))
        return {
            row.expression: (row.shortest, row.instructions)
            for row in rows
            if row.shortest is not None and row.instructions is not None
        }

    return inspect
