"""Launches the attention kernels on a paged case, after a plain plan: every split is the test's choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from pageturner.kernels.cuda import arguments, tiles, variants
from pageturner.kernels.cuda.attention_plan import Int32Array
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.layout import KvLayout
from pageturner.kernels.reference import ReferenceOps
from support.paged import PagedCase, make_case

IDLE_BLOCKS = 2
"""Blocks launched beyond the work, as a grid of fixed size has them."""

TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2.5e-3}
"""Weights and results are rounded to 8 and 11 bits; results are of order 1."""


@dataclass(frozen=True)
class AttentionCase:
    """sequences: (rows, seq_len) each. split: keys of a decode item, None for one item a sequence."""

    sequences: tuple[tuple[int, int], ...]
    head_dim: int = 64
    group: int = 3
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    num_kv_heads: int = 2
    split: int | None = None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None

    def build(self, seed: int = 0) -> tuple[PagedCase, AttentionSpec]:
        """In the second layer of a pool of two. Blocks are dealt at random, slots of no sequence hold NaN."""
        layout = KvLayout(2, self.num_kv_heads, self.head_dim, self.block_size, self.dtype)
        num_heads = self.num_kv_heads * self.group
        case = make_case(self.sequences, layout=layout, num_heads=num_heads, layer=1, seed=seed)
        # Table entries behind a sequence's end may name any block, even one that is not there.
        entries = torch.arange(case.batch.block_tables.shape[1]) * self.block_size
        case.batch.block_tables[entries[None] >= case.batch.seq_lens[:, None]] = 10**9
        spec = AttentionSpec(
            scale=self.head_dim**-0.5 if self.scale is None else self.scale,
            sliding_window=self.window,
            chunk=self.chunk,
            logit_softcap=self.softcap,
            sinks=torch.linspace(-3, 3, num_heads) if self.sinks else None,
        )
        return case, spec


def check_attention_kernels(launcher: Launcher, case: AttentionCase, seed: int = 0) -> torch.Tensor:
    """Against the definition; returns the kernels' result."""
    paged, spec = case.build(seed)
    result = run_attention(launcher, paged, spec, split=case.split)
    batch = paged.batch
    readable = batch.block_tables.where(batch.block_tables < 10**9, 0)
    batch.block_tables.copy_(readable)
    expected = ReferenceOps().attention(paged.query, paged.kv_layer, batch, spec)
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)
    return result


def run_attention(
    launcher: Launcher, case: PagedCase, spec: AttentionSpec, *, split: int | None = None
) -> torch.Tensor:
    """Decode what fits 16 packed rows, prefill the rest; results that are not written stay NaN."""
    query, kv_layer, batch = case.query, case.kv_layer, case.batch
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_layer.shape
    group = query.shape[1] // num_kv_heads
    decode_items, merge_items, prefill_tiles, num_partials = _plan(case, group, head_dim, spec, split)
    output = torch.full_like(query, torch.nan)
    partial_outputs = torch.full((max(num_partials, 1), num_kv_heads, tiles.MMA_ROWS, head_dim), torch.nan)
    partial_sums = torch.full((max(num_partials, 1), num_kv_heads, tiles.MMA_ROWS, 2), torch.nan)
    num_items = np.array([len(decode_items), len(merge_items)], np.int32)
    sinks = spec.sinks
    struct = arguments.AttentionArguments(
        output=output.data_ptr(),
        query=query.data_ptr(),
        kv=arguments.KvLayer(
            keys=kv_layer[:, 0].data_ptr(),
            values=kv_layer[:, 1].data_ptr(),
            block_stride=kv_layer.stride(0),
            head_stride=kv_layer.stride(2),
            num_blocks=num_blocks,
            block_size_log2=block_size.bit_length() - 1,
        ),
        query_start_loc=batch.query_start_loc.data_ptr(),
        seq_lens=batch.seq_lens.data_ptr(),
        block_tables=batch.block_tables.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        decode_items=decode_items.ctypes.data,
        num_decode_items=num_items.ctypes.data,
        merge_items=merge_items.ctypes.data,
        num_merge_items=num_items[1:].ctypes.data,
        prefill_tiles=prefill_tiles.ctypes.data,
        partial_outputs=partial_outputs.data_ptr(),
        partial_sums=partial_sums.data_ptr(),
        query_stride=query.stride(0),
        table_stride=batch.block_tables.stride(0),
        num_kv_heads=num_kv_heads,
        group=group,
        window=spec.sliding_window or 0,
        chunk=spec.chunk or 0,
        scale=spec.scale,
        softcap=spec.logit_softcap or 0.0,
    )
    bounded = spec.sliding_window is not None or spec.chunk is not None
    softcap = spec.logit_softcap is not None
    if len(decode_items):
        variant = variants.paged_decode(query.dtype, head_dim, bounded=bounded, softcap=softcap)
        launcher.launch(variant, (len(decode_items) + IDLE_BLOCKS, num_kv_heads, 1), struct)
    if len(merge_items):
        variant = variants.decode_merge(query.dtype, head_dim)
        launcher.launch(variant, (len(merge_items) + IDLE_BLOCKS, num_kv_heads, tiles.MMA_ROWS), struct)
    if len(prefill_tiles):
        variant = variants.paged_prefill(query.dtype, head_dim, bounded=bounded, softcap=softcap)
        launcher.launch(variant, (len(prefill_tiles), num_kv_heads, 1), struct)
    return output


def _plan(
    case: PagedCase, group: int, head_dim: int, spec: AttentionSpec, split: int | None
) -> tuple[Int32Array, Int32Array, Int32Array, int]:
    """Items from the first key that a sequence's rows see, in pieces of `split` keys."""
    items: list[tuple[int, int, int, int]] = []
    merges: list[tuple[int, int, int, int]] = []
    prefills: list[tuple[int, int]] = []
    num_partials = 0
    starts, seq_lens = case.batch.query_start_loc.tolist(), case.batch.seq_lens.tolist()
    for sequence, seq_len in enumerate(seq_lens):
        num_rows = starts[sequence + 1] - starts[sequence]
        if num_rows * group > tiles.MMA_ROWS:
            height = tiles.PREFILL[head_dim].rows
            prefills += [(sequence, row) for row in range(0, num_rows * group, height)]
            continue
        position = seq_len - num_rows
        first = 0 if spec.sliding_window is None else max(0, position - spec.sliding_window + 1)
        first = first if spec.chunk is None else max(first, position - position % spec.chunk)
        first -= first % tiles.DECODE_KEYS
        cuts = [*range(first, max(seq_len, first + 1), split or max(seq_len, 1)), seq_len]
        if len(cuts) == 2:
            items.append((sequence, first, seq_len, -1))
            continue
        merges.append((sequence, num_partials, len(cuts) - 1, 0))
        for first_key, end_key in pairwise(cuts):
            items.append((sequence, first_key, end_key, num_partials))
            num_partials += 1
    return _int32(items, 4), _int32(merges, 4), _int32(prefills, 2), num_partials


def _int32(rows: Sequence[tuple[int, ...]], width: int) -> Int32Array:
    return np.array(rows, np.int32).reshape(-1, width)
