"""`pageturner bench steps`: a step of a quantised decoder of SmolLM2-135M's shape, and where its time goes.

Weights are random, in the embedded model's kinds of groups (4 bits with offsets; 8 bits for embedding and
head), and lie in huge pages as loaded ones do. The KV pool holds bfloat16, and is read in a plain loop as
well: attention can be as fast as that at best, once contexts don't fit in caches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pageturner.kernels.cpu.build import NATIVE, load_library
from pageturner.kernels.cpu.forward import CpuDecoder, DecoderWeights, LayerWeights
from pageturner.kernels.grouped import GroupedWeight
from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.layout import AttentionBatch, KeyOrder, KvLayout
from pageturner.kernels.packed import PackedLayout, PackedWeight, pack
from pageturner.service.bench.kernels import fill_at_random
from pageturner.service.model.pages import own_pages

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of the decoder that is timed; SmolLM2-135M's by default."""

    num_layers: int = 30
    hidden_size: int = 576
    inner_size: int = 1536
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    vocab_size: int = 49_152


@dataclass(frozen=True, slots=True)
class StepCase:
    """num_sequences that hold num_keys each and decode, or one prompt of so many tokens, chunk by chunk."""

    num_sequences: int
    num_keys: int
    chunk: int | None = None
    """Tokens of a prompt's step, at most; None: they decode."""

    def steps(self) -> Iterator[tuple[int, int]]:
        """(rows, keys) of each sequence in each step."""
        if self.chunk is None:
            yield 1, self.num_keys
            return
        for begin in range(0, self.num_keys, self.chunk):
            end = min(begin + self.chunk, self.num_keys)
            yield end - begin, end


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Median milliseconds of a case, all steps of a prompt together. phases: means.

    kv_bytes: that decodes read, 0 of a prompt. loop_bytes_per_second: of a plain loop over the same pool.
    """

    num_sequences: int
    num_keys: int
    chunk: int | None
    milliseconds: float
    phases: dict[str, float]
    kv_bytes: int
    loop_bytes_per_second: float

    @property
    def bytes_per_second(self) -> float:
        """Of keys and values, in attention."""
        return 1e3 * self.kv_bytes / self.phases["attention"]


def measure_steps(
    shape: DecoderShape,
    cases: Sequence[StepCase],
    num_threads: int,
    seconds: float,
    cache_dir: Path,
    on_case: Callable[[StepTiming], object] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
    machine: Sequence[str] = NATIVE,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> list[StepTiming]:
    """Each case is run for so many seconds and at least once, over a pool of `kv_dtype`.

    machine: the compiler's flags for the kind of machine whose code runs.
    Raises CompilerUnavailable where there is no compiler, MemoryError where the pool does not fit.
    """
    weights = _random_weights(shape, max(case.num_keys for case in cases))
    decoder = CpuDecoder(load_library(cache_dir, machine=machine), weights, num_threads)
    timings = []
    for case in cases:
        timings.append(_time_case(shape, decoder, case, seconds, clock, kv_dtype))
        on_case(timings[-1])
    return timings


def _time_case(
    shape: DecoderShape,
    decoder: CpuDecoder,
    case: StepCase,
    seconds: float,
    clock: Callable[[], float],
    kv_dtype: torch.dtype,
) -> StepTiming:
    width = -(-case.num_keys // BLOCK_SIZE)
    num_blocks = case.num_sequences * width
    # Scattered, as the blocks of requests are.
    tables = torch.randperm(num_blocks, dtype=torch.int32).view(case.num_sequences, width)
    layout = KvLayout(
        shape.num_layers,
        shape.num_kv_heads,
        shape.head_dim,
        BLOCK_SIZE,
        kv_dtype,
        KeyOrder.TILED16,
    )
    pool = own_pages(layout.pool_shape(num_blocks), layout.dtype, huge=True)
    fill_at_random(pool)
    batches = [_batch(tables, rows, keys) for rows, keys in case.steps()]
    steps = [(torch.randint(0, shape.vocab_size, batch.positions.shape), batch) for batch in batches]
    no_rows, last_rows = torch.zeros(0, dtype=torch.int64), batches[-1].query_start_loc[1:].long() - 1

    def run() -> None:
        for token_ids, batch in steps:
            decoder.forward(token_ids, batch, last_rows if batch is batches[-1] else no_rows, pool)

    run()
    decoder.profile()
    times = _repeated(run, seconds, clock)
    phases = {name: 1e3 * spent / len(times) for name, spent in decoder.profile().items() if name != "host"}
    words = pool.view(torch.uint8).flatten()[: pool.nbytes // 4 * 4].view(torch.float32)
    reads = _repeated(words.sum, seconds / 4, clock)
    return StepTiming(
        case.num_sequences,
        case.num_keys,
        case.chunk,
        1e3 * statistics.median(times),
        phases,
        0 if case.chunk else layout.block_bytes // BLOCK_SIZE * case.num_sequences * case.num_keys,
        pool.nbytes / statistics.median(reads),
    )


def _repeated(work: Callable[[], object], seconds: float, clock: Callable[[], float]) -> list[float]:
    """Seconds of each run, of at least one."""
    times: list[float] = []
    end = clock() + seconds
    while not times or clock() < end:
        begun = clock()
        work()
        times.append(clock() - begun)
    return times


def _batch(tables: torch.Tensor, num_rows: int, num_keys: int) -> AttentionBatch:
    """The last num_rows of num_keys of each sequence."""
    num_sequences = len(tables)
    positions = torch.arange(num_keys - num_rows, num_keys).repeat(num_sequences)
    blocks = tables.repeat_interleave(num_rows, 0).gather(1, (positions // BLOCK_SIZE)[:, None]).squeeze(1)
    return AttentionBatch(
        query_start_loc=torch.arange(num_sequences + 1, dtype=torch.int32) * num_rows,
        seq_lens=torch.full((num_sequences,), num_keys, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=blocks.long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        positions=positions,
        max_query_len=num_rows,
        max_seq_len=num_keys,
    )


def _random_weights(shape: DecoderShape, num_positions: int) -> DecoderWeights:
    hidden, inner, query = shape.hidden_size, shape.inner_size, shape.num_heads * shape.head_dim
    qkv = query + 2 * shape.num_kv_heads * shape.head_dim
    whole = _layout(shape.vocab_size, hidden, bits=8)
    parts = [
        _layout(*size, bits=4)
        for size in ((qkv, hidden), (hidden, query), (2 * inner, hidden), (hidden, inner))
    ]
    # One run of bytes, as a loaded file is.
    num_bytes = whole.num_bytes + shape.num_layers * sum(part.num_bytes for part in parts)
    free = own_pages((num_bytes,), torch.uint8, huge=True)

    def take(layout: PackedLayout) -> PackedWeight:
        nonlocal free
        buffer, free = free[: layout.num_bytes], free[layout.num_bytes :]
        return PackedWeight(layout, buffer.copy_(pack(_random_groups(layout)).buffer))

    def layer() -> LayerWeights:
        merged, out, gate_up, down = map(take, parts)
        return LayerWeights(
            attention_norm=torch.ones(hidden),
            qkv=merged,
            q_norm=None,
            k_norm=None,
            rotated=True,
            attention=AttentionSpec(scale=shape.head_dim**-0.5),
            out=out,
            mlp_norm=torch.ones(hidden),
            gate_up=gate_up,
            down=down,
        )

    embedding = take(whole)
    angles = torch.randn(num_positions, shape.head_dim // 2).repeat(1, 2)
    return DecoderWeights(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        eps=1e-5,
        embedding=embedding,
        layers=tuple(layer() for _ in range(shape.num_layers)),
        norm=torch.ones(hidden),
        head=embedding,
        cos=angles.cos(),
        sin=angles.sin(),
    )


def _layout(out_features: int, in_features: int, *, bits: int) -> PackedLayout:
    return PackedLayout(out_features, in_features, bits, 32, torch.float16, has_offsets=bits == 4)


def _random_groups(layout: PackedLayout) -> GroupedWeight:
    dtype, bounds = (torch.uint8, (0, 16)) if layout.bits == 4 else (torch.int8, (-127, 128))
    codes = torch.randint(*bounds, (layout.out_features, layout.in_features), dtype=dtype)
    scales = torch.rand(layout.out_features, layout.groups).half() * (0.01 if layout.bits == 4 else 0.001)
    return GroupedWeight(codes, scales, -7.5 * scales if layout.has_offsets else None, layout.group)
