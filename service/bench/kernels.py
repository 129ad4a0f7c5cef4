"""Attention of one layer: the C++ operations beside gather + SDPA, on the shapes that serving meets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pageturner.kernels.cpu.build import load_library
from pageturner.kernels.cpu.ops import CpuOps
from pageturner.kernels.interface import AttentionSpec, PagedOps
from pageturner.kernels.layout import AttentionBatch, KvLayout, is_coded, split_codes
from pageturner.kernels.torch_ops import TorchOps

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
SHAPES = ((1, 1, 2048), (8, 1, 512), (64, 1, 512), (64, 1, 2048), (1, 512, 512), (4, 128, 1024))
"""(sequences, rows each, keys each)."""


@dataclass(frozen=True, slots=True)
class CpuTiming:
    """Median milliseconds of one layer's attention. int8_ms, fp8_ms: of `cpu_ms` over a pool of codes."""

    dtype: str
    num_sequences: int
    num_rows: int
    num_keys: int
    torch_ms: float
    torch_deterministic_ms: float
    cpu_ms: float
    int8_ms: float
    fp8_ms: float

    @property
    def ratio(self) -> float:
        """How many times as long torch takes."""
        return self.torch_ms / self.cpu_ms


def measure_cpu_kernels(cache_dir: Path, shapes: Sequence[tuple[int, int, int]]) -> list[CpuTiming]:
    """Each shape in float32 and bfloat16. Raises CompilerUnavailable where there is nothing to compare."""
    ops = CpuOps(load_library(cache_dir))
    return [_time_shape(dtype, ops, *shape) for dtype in (torch.float32, torch.bfloat16) for shape in shapes]


def cpu_document(timings: Sequence[CpuTiming]) -> dict[str, Any]:
    """For JSON."""
    return {"num_threads": torch.get_num_threads(), "timings": [asdict(timing) for timing in timings]}


def cpu_lines(timings: Sequence[CpuTiming]) -> Iterator[str]:
    """A table, line by line."""
    yield (
        f"one layer, {NUM_HEADS} query and {NUM_KV_HEADS} kv heads of {HEAD_DIM}, "
        f"blocks of {BLOCK_SIZE}, {torch.get_num_threads()} threads of this CPU, ms"
    )
    yield (
        f"{'dtype':>9} {'seqs':>5} {'rows':>5} {'keys':>5} "
        f"{'torch':>9} {'determ.':>9} {'C++':>9} {'ratio':>7} {'int8 KV':>9} {'fp8 KV':>9}"
    )
    for t in timings:
        yield (
            f"{t.dtype:>9} {t.num_sequences:5} {t.num_rows:5} {t.num_keys:5} {t.torch_ms:9.3f} "
            f"{t.torch_deterministic_ms:9.3f} {t.cpu_ms:9.3f} {t.ratio:6.1f}x "
            f"{t.int8_ms:9.3f} {t.fp8_ms:9.3f}"
        )


def _time_shape(
    dtype: torch.dtype, cpu_ops: CpuOps, num_sequences: int, num_rows: int, num_keys: int
) -> CpuTiming:
    width = -(-num_keys // BLOCK_SIZE)
    tables = torch.randperm(num_sequences * width, dtype=torch.int32).view(num_sequences, width)
    batch = AttentionBatch(
        query_start_loc=torch.arange(num_sequences + 1, dtype=torch.int32) * num_rows,
        seq_lens=torch.full((num_sequences,), num_keys, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.full((num_sequences * num_rows,), -1),
        positions=torch.arange(num_keys - num_rows, num_keys).repeat(num_sequences),
        max_query_len=num_rows,
        max_seq_len=num_keys,
    )
    query = torch.randn(num_sequences * num_rows, NUM_HEADS, HEAD_DIM).to(dtype)
    spec = AttentionSpec(scale=HEAD_DIM**-0.5)

    def milliseconds(ops: PagedOps, kv_dtype: torch.dtype = dtype) -> float:
        layout = KvLayout(1, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, kv_dtype, ops.key_order)
        pool = torch.empty(layout.pool_shape(num_sequences * width), dtype=kv_dtype)
        fill_at_random(pool)
        kv_layer = pool[:, 0]
        return _median_ms(lambda: ops.attention(query, kv_layer, batch, spec))

    return CpuTiming(
        str(dtype).removeprefix("torch."),
        num_sequences,
        num_rows,
        num_keys,
        torch_ms=milliseconds(TorchOps()),
        torch_deterministic_ms=milliseconds(TorchOps(deterministic=True)),
        cpu_ms=milliseconds(cpu_ops),
        int8_ms=milliseconds(cpu_ops, torch.int8),
        fp8_ms=milliseconds(cpu_ops, torch.float8_e4m3fn),
    )


def fill_at_random(pool: torch.Tensor) -> None:
    """Numbers of order 1; or codes of all sizes, with scales that make them so."""
    if not is_coded(pool.dtype):
        pool.normal_()
        return
    pool.view(torch.uint8).random_(0, 127)
    _, scales = split_codes(pool)
    scales.fill_(1 / 127)


def _median_ms(call: Callable[[], object]) -> float:
    """Over at least 5 calls and a fifth of a second, after one to warm up."""
    call()
    times: list[float] = []
    while len(times) < 5 or sum(times) < 0.2:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return median(times) * 1e3
