"""The CUDA operations and what they are tried on, for whatever runs them: the emulator, or a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from pageturner.kernels.cuda import tiles
from pageturner.kernels.cuda.compiler import Compiler
from pageturner.kernels.cuda.cupy_runtime import CupyRuntime
from pageturner.kernels.cuda.ops import CudaOps
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.interface import PagedOps
from pageturner.kernels.reference import ReferenceOps
from support.attention_kernels import TOLERANCE, AttentionCase
from support.emulation import emulated_launcher
from support.on_device import OnDevice
from support.ops import cpu_cache_dir
from support.pairwise import pairwise_cases

BF16, FP16 = torch.bfloat16, torch.float16
FAR = 10**9
"""What AttentionCase writes where no table is read."""


@cache
def gpu_launcher() -> Launcher:
    return Launcher(CupyRuntime(torch.device("cuda"), Compiler(cpu_cache_dir())))


LAUNCHERS: dict[str, Callable[[], Launcher]] = {"emulated": emulated_launcher, "gpu": gpu_launcher}
RUNTIMES = ("emulated", pytest.param("gpu", marks=pytest.mark.gpu))


def cuda_ops(launcher: Launcher, split: int | None = None) -> PagedOps:
    """For tensors on the CPU, wherever the kernels run."""
    return OnDevice(CudaOps(launcher, split=split), launcher.runtime.device)


BATCHES: dict[str, tuple[tuple[int, int], ...]] = {
    "decode": ((1, 1), (1, 15), (1, 16), (1, 17), (1, 120)),
    "prefill": ((30, 30), (17, 61)),
    "mixed": ((1, 70), (19, 19), (1, 16), (0, 20), (17, 48)),
    "speculative": ((3, 80), (1, 33), (2, 2)),
}
"""(rows, seq_len) each. Of the speculative rows, those of large groups are prefilled."""
MASKS: dict[str, dict[str, Any]] = {
    "window": {"window": 21},
    "chunk": {"chunk": 24},
    "both": {"window": 37, "chunk": 64},
}

INSTANCES = tuple(
    (dtype, head_dim, bool(dtype is FP16) ^ bool(index % 2), bool(dtype is FP16) ^ bool(index // 2))
    for index, head_dim in enumerate(tiles.HEAD_DIMS)
    for dtype in (BF16, FP16)
)
"""dtype, head_dim, masked, capped: any two of them in every combination, by the fewest kernels."""

FACTORS = {
    "instance": INSTANCES,
    "batch": tuple(BATCHES),
    "group": (1, 3, 4, 8, 16),
    "block_size": (16, 32, 64),
    "mask": tuple(MASKS),
    "sinks": (False, True),
    "split": (None, 16, 48),
}


def attention_case(
    instance: tuple[torch.dtype, int, bool, bool], batch: str, mask: str, **others: Any
) -> AttentionCase:
    dtype, head_dim, masked, capped = instance
    return AttentionCase(
        BATCHES[batch],
        head_dim=head_dim,
        dtype=dtype,
        num_kv_heads=2 if others["group"] <= 4 else 1,
        softcap=2.5 if capped else None,
        **(MASKS[mask] if masked else {}),
        **others,
    )


def describe(case: dict[str, Any]) -> str:
    dtype, head_dim, masked, capped = case["instance"]
    words = [str(dtype).removeprefix("torch."), f"d{head_dim}", case["batch"], f"g{case['group']}"]
    words += [f"b{case['block_size']}", f"split{case['split']}"]
    words += [case["mask"]] * masked + ["cap"] * capped + ["sinks"] * case["sinks"]
    return "-".join(words)


PAIRWISE = pairwise_cases(FACTORS)


def check_cuda_attention(launcher: Launcher, case: AttentionCase, seed: int = 0) -> torch.Tensor:
    """Against the definition; returns the result."""
    paged, spec = case.build(seed)
    result = cuda_ops(launcher, case.split).attention(paged.query, paged.kv_layer, paged.batch, spec)
    tables = paged.batch.block_tables
    tables.masked_fill_(tables == FAR, 0)
    expected = ReferenceOps().attention(paged.query, paged.kv_layer, paged.batch, spec)
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)
    return result
