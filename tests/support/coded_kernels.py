"""The CUDA kernels over codes, on cases, against the definition."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.layout import KvLayout
from pageturner.kernels.reference import ReferenceOps
from support.cuda_cases import cuda_ops
from support.paged import make_case

BF16, FP16, INT8, FP8 = torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn


@dataclass(frozen=True)
class CodedCase:
    """sequences: (rows, seq_len) each."""

    sequences: tuple[tuple[int, int], ...]
    code: torch.dtype
    rows: torch.dtype = BF16
    head_dim: int = 64
    group: int = 3
    block_size: int = 16
    spec: AttentionSpec = AttentionSpec(scale=0.125)


def run_coded(launcher: Launcher, case: CodedCase) -> tuple[torch.Tensor, torch.Tensor]:
    layout = KvLayout(2, 2, case.head_dim, case.block_size, case.code)
    paged = make_case(case.sequences, layout=layout, num_heads=2 * case.group, layer=1, row_dtype=case.rows)
    result = cuda_ops(launcher).attention(paged.query, paged.kv_layer, paged.batch, case.spec)
    return result, ReferenceOps().attention(paged.query, paged.kv_layer, paged.batch, case.spec)


def check_coded_kernels(launcher: Launcher, case: CodedCase) -> torch.Tensor:
    """Weights are rounded to bfloat16, also of float16 rows: see code_tile.cuh."""
    result, expected = run_coded(launcher, case)
    torch.testing.assert_close(result, expected, atol=1.6e-2, rtol=1.6e-2)
    return result
