"""What every backend must keep, as functions: the tests call them, and so do the planted bugs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from pageturner.kernels.interface import AttentionSpec, PagedOps
from pageturner.kernels.layout import AttentionBatch, KvLayout
from pageturner.kernels.reference import ReferenceOps
from support.paged import assert_near, assert_same, key_elements, make_batch, make_case


def layout_for(
    ops: PagedOps, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype = torch.float32
) -> KvLayout:
    return KvLayout(2, kv_heads, head_dim, block_size, dtype, ops.key_order)


def check_attention(
    ops: PagedOps,
    layout: KvLayout,
    sequences: Sequence[tuple[int, int]],
    group: int,
    spec: AttentionSpec,
    seed: int = 0,
) -> None:
    """Against the definition, in the pool's second layer."""
    case = make_case(sequences, layout=layout, num_heads=group * layout.num_kv_heads, layer=1, seed=seed)
    result = ops.attention(case.query, case.kv_layer, case.batch, spec)
    expected = ReferenceOps(ops.key_order).attention(case.query, case.kv_layer, case.batch, spec)
    assert_near(result, expected)


def check_non_finite_token(
    ops: PagedOps, layout: KvLayout, part: int, poison: float, spec: AttentionSpec
) -> None:
    """An owner whose numbers went wrong must be found out; its neighbours must not notice."""
    case = make_case([(1, 40), (1, 30), (5, 20)], layout=layout, num_heads=3)
    clean = ops.attention(case.query, case.kv_layer, case.batch, spec)
    case.kv_layer[int(case.batch.block_tables[1, 0]), part] = poison
    result = ops.attention(case.query, case.kv_layer, case.batch, spec)
    assert not torch.isfinite(result[1]).any()
    assert_same(result[0], clean[0])
    assert_same(result[2:], clean[2:])


def check_blocks_behind_a_window(
    ops: PagedOps, layout: KvLayout, row_dtype: torch.dtype | None = None
) -> None:
    """They were given back and hold anything; the table names the first block there that was kept."""
    window, sequences = 21, [(1, 200), (5, 90), (40, 160), (1, 21)]
    case = make_case(sequences, layout=layout, num_heads=2, row_dtype=row_dtype)
    spec = AttentionSpec(0.2, sliding_window=window)
    kept = ops.attention(case.query, case.kv_layer, case.batch, spec)
    tables = case.batch.block_tables.clone()
    for table, (num_rows, seq_len) in zip(tables, sequences, strict=True):
        hidden = max(0, seq_len - num_rows - window + 1) // layout.block_size
        # NaN, as a float of any width and as a scale beside codes.
        case.kv_layer.view(torch.uint8)[table[:hidden].long()] = 0xFF
        table[:hidden] = table[hidden]
    batch = make_batch(sequences, tables.tolist(), layout.block_size)
    assert_same(ops.attention(case.query, case.kv_layer, batch, spec), kept)


def check_shared_blocks(ops: PagedOps, layout: KvLayout) -> None:
    """As after a fork or a prefix hit: a table is only read."""
    case, spec = make_case([(1, 40)], layout=layout, num_heads=2), AttentionSpec(scale=0.2)
    alone = ops.attention(case.query, case.kv_layer, case.batch, spec)
    table = case.batch.block_tables[0].tolist()
    batch = make_batch([(1, 40), (1, 40), (1, 17)], [table, table, table[:2]], 16)
    together = ops.attention(case.query.expand(3, -1, -1), case.kv_layer, batch, spec)
    assert_near(together[:2], alone.expand(2, -1, -1))
    shorter = replace(case.batch, seq_lens=case.batch.seq_lens - 23, max_seq_len=17)
    expected = ReferenceOps(ops.key_order).attention(case.query, case.kv_layer, shorter, spec)
    assert_near(together[2:], expected)


def check_rising_scores(ops: PagedOps, dtype: torch.dtype) -> None:
    """Scores that rise along a sequence, by less than the CPU's SLACK, by more, and by far more."""
    spec, lengths = AttentionSpec(scale=0.125), (300, 270)
    case = make_case(
        [(1, lengths[0]), (3, lengths[1])], layout=layout_for(ops, 2, 64, 16, dtype), num_heads=6, layer=1
    )
    for sequence, length in enumerate(lengths):
        for position in range(length):  # dim 0 of the keys grows with the position, and queries look along it
            block = int(case.batch.block_tables[sequence, position // 16])
            first, *_ = key_elements(position % 16, 64, ops.key_order)
            case.kv_layer[block, 0].flatten(1)[:, first] = position / length
    for rise in (7.75, 8.25, 60.0):
        case.query[..., 0] = rise / spec.scale  # exact in bfloat16
        result = ops.attention(case.query, case.kv_layer, case.batch, spec)
        expected = ReferenceOps(ops.key_order).attention(case.query, case.kv_layer, case.batch, spec)
        assert_near(result.bfloat16(), expected.bfloat16())


def check_unseen_slots(ops: PagedOps, dtype: torch.dtype) -> None:
    """What lies behind a window may have been given away, and slots after the last row hold what they did."""
    layout = layout_for(ops, 2, 64, 16, dtype)
    spec = AttentionSpec(scale=0.2, sliding_window=21)
    for length in range(60, 64):
        case = make_case([(1, length)], layout=layout, num_heads=6, layer=1)
        expected = ops.attention(case.query, case.kv_layer, case.batch, spec)
        assert torch.isfinite(expected).all()
        for position in range(length - 21):
            block = int(case.batch.block_tables[0, position // 16])
            case.kv_layer[block, 1, :, position % 16] = torch.nan
        assert_same(ops.attention(case.query, case.kv_layer, case.batch, spec), expected)


def check_step_without_rows(ops: PagedOps, layout: KvLayout) -> None:
    """A batch of no sequences: results are as empty."""
    heads, head_dim, dtype = layout.num_kv_heads, layout.head_dim, layout.dtype
    kv_layer = make_case([(1, 4)], layout=layout, num_heads=heads).kv_layer
    batch = AttentionBatch(
        query_start_loc=torch.zeros(1, dtype=torch.int32),
        seq_lens=torch.zeros(0, dtype=torch.int32),
        block_tables=torch.zeros(0, 1, dtype=torch.int32),
        slot_mapping=torch.zeros(0, dtype=torch.int64),
        positions=torch.zeros(0, dtype=torch.int64),
        max_query_len=0,
        max_seq_len=0,
    )
    rows, table = torch.zeros(0, heads, head_dim, dtype=dtype), torch.zeros(0, head_dim, dtype=dtype)
    assert ops.attention(rows, kv_layer, batch, AttentionSpec(scale=1.0)).shape == rows.shape
    assert ops.rope_and_write_kv(rows, rows, rows, table, table, kv_layer, batch).shape == rows.shape
    assert ops.rms_norm(table, torch.ones(head_dim, dtype=dtype), 1e-5)[0].shape == table.shape
    assert ops.silu_and_mul(table).shape == (0, head_dim // 2)
    pool = kv_layer.contiguous()
    ops.copy_blocks(pool, [])
    ops.transfer_blocks(pool, pool.clone(), [])


def check_chunking(
    ops: PagedOps, layout: KvLayout, num_tokens: int, cuts: Sequence[int], group: int, spec: AttentionSpec
) -> None:
    """A prompt computed in pieces, cut at `cuts`, has the bits of the prompt computed whole."""
    case = make_case([(num_tokens, num_tokens)], layout=layout, num_heads=group * layout.num_kv_heads)
    whole = ops.attention(case.query, case.kv_layer, case.batch, spec)
    for start, stop in pairwise([0, *sorted(cuts), num_tokens]):
        chunk = case.rows(start, stop)
        assert_same(ops.attention(chunk.query, chunk.kv_layer, chunk.batch, spec), whole[start:stop])


def check_batch_mates(
    ops: PagedOps, layout: KvLayout, sequences: Sequence[tuple[int, int]], group: int, spec: AttentionSpec
) -> None:
    """Each sequence has the bits that it has alone in its batch."""
    case = make_case(sequences, layout=layout, num_heads=group * layout.num_kv_heads)
    together = ops.attention(case.query, case.kv_layer, case.batch, spec)
    for index, (start, stop) in enumerate(pairwise(case.batch.query_start_loc.tolist())):
        alone = case.sequence(index)
        result = ops.attention(alone.query, alone.kv_layer, alone.batch, spec)
        assert_same(result, together[start:stop])


def check_rope(ops: PagedOps, dtype: torch.dtype, table_dtype: torch.dtype, head_dim: int = 64) -> None:
    """Bit for bit: the roundings are part of the definition."""
    layout = layout_for(ops, 3, head_dim, 16, dtype)
    case = make_case([(1, 33), (20, 37), (1, 1)], layout=layout, num_heads=9, layer=1)
    case.batch.slot_mapping[3] = -1
    generator = torch.Generator().manual_seed(1)
    key, value = torch.randn(2, 22, 3, head_dim, generator=generator).to(dtype)
    angles = torch.randn(22, head_dim // 2, generator=generator).repeat(1, 2)
    cos, sin = angles.cos().to(table_dtype), angles.sin().to(table_dtype)

    expected_layer = case.kv_layer.clone()
    expected = ReferenceOps(ops.key_order).rope_and_write_kv(
        case.query, key, value, cos, sin, expected_layer, case.batch
    )
    # Query, key and value as a merged projection hands them over: slices of one tensor.
    merged = torch.cat((case.query, key, value), dim=1)
    query, key, value = merged[:, :9], merged[:, 9:12], merged[:, 12:]
    result = ops.rope_and_write_kv(query, key, value, cos, sin, case.kv_layer, case.batch)
    assert_same(result, expected)
    assert_same(case.kv_layer, expected_layer)


def check_copies(ops: PagedOps, pairs: Sequence[tuple[int, int]], num_blocks: int, seed: int = 0) -> None:
    """Within one pool, then into another."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(num_blocks, 2, 2, 1, 16, 4, generator=generator)
    expected = pool.clone()
    ReferenceOps().copy_blocks(expected, pairs)
    ops.copy_blocks(pool, pairs)
    assert_same(pool, expected)

    host = torch.zeros_like(pool)
    expected = host.clone()
    ReferenceOps().transfer_blocks(pool, expected, sorted(pairs))
    ops.transfer_blocks(pool, host, sorted(pairs))
    assert_same(host, expected)
