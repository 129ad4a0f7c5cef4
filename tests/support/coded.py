"""Checks of pools of codes, as functions: tests of each backend and machine call them, planted bugs too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from pageturner.kernels.interface import AttentionSpec, PagedOps
from pageturner.kernels.layout import KvLayout, split_codes
from pageturner.kernels.reference import ReferenceOps
from support.paged import assert_same, empty_pool, make_batch, make_case

RAGGED = ((1, 53), (7, 7), (1, 3), (20, 53), (17, 17), (1, 16))


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def assert_near_codes(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Codes are multiplied exactly, or in pairs of bfloat16, where rows and weights are rounded to 8 bits."""
    error = (result.double() - expected.double()).abs()
    assert torch.isfinite(result).all()
    assert float(error.max()) < 2e-2
    assert float(error.mean()) < 2e-3


def check_coded_attention(
    ops: PagedOps,
    layout: KvLayout,
    rows: torch.dtype,
    spec: AttentionSpec,
    sequences: Sequence[tuple[int, int]] = RAGGED,
    group: int = 3,
    seed: int = 0,
) -> None:
    """Against the definition, in the pool's second layer."""
    num_heads = group * layout.num_kv_heads
    case = make_case(sequences, layout=layout, num_heads=num_heads, layer=1, row_dtype=rows, seed=seed)
    result = ops.attention(case.query, case.kv_layer, case.batch, spec)
    expected = ReferenceOps(ops.key_order).attention(case.query, case.kv_layer, case.batch, spec)
    assert result.dtype is rows
    assert_near_codes(result, expected)


def check_coded_writes(ops: PagedOps, layout: KvLayout, rows: torch.dtype, seed: int = 0) -> None:
    """Bit for bit, rotated and not: rows of all sizes, of zeros, of numbers near the ends of float32, and one
    for which several scales are as good."""
    sequences = [(9, 25), (5, 37)]
    needs = [-(-length // layout.block_size) for _, length in sequences]
    tables = [list(range(1, 1 + needs[0])), list(range(1 + needs[0], 1 + sum(needs)))]
    batch = make_batch(sequences, tables, layout.block_size)
    batch.slot_mapping[3] = -1
    generator = torch.Generator().manual_seed(seed)
    heads, head_dim = layout.num_kv_heads, layout.head_dim
    sizes = torch.tensor([1, 1e-3, 1e3, 1, 0, 1e-37, 1e-39, 1e37, 1e-30, 1, 5, 20, 1e30, 1])[:, None, None]
    key, value = (torch.randn(2, 14, heads, head_dim, generator=generator) * sizes).to(rows)
    key[..., 1::5] *= 2e-5  # subnormal beside the rest, as floats of 8 bits
    value[4, :, 0] = 448.0  # also 1.75 * 256
    value[10], value[11, :, 0] = -0.0, torch.nan
    query = torch.randn(14, 2 * heads, head_dim, generator=generator).to(rows)
    angles = torch.randn(14, head_dim // 2, generator=generator).repeat(1, 2)
    reference = ReferenceOps(ops.key_order)
    for table_dtype in {torch.float32, rows}:
        cos, sin = angles.cos().to(table_dtype), angles.sin().to(table_dtype)
        pools = [empty_pool(layout, sum(needs) + 1) for _ in range(4)]
        ops.write_kv(key, value, pools[0][:, 1], batch)
        reference.write_kv(key, value, pools[1][:, 1], batch)
        assert same_bytes(pools[0], pools[1])
        turned = ops.rope_and_write_kv(query, key, value, cos, sin, pools[2][:, 1], batch)
        expected = reference.rope_and_write_kv(query, key, value, cos, sin, pools[3][:, 1], batch)
        torch.testing.assert_close(turned, expected, atol=0, rtol=0)
        assert same_bytes(pools[2], pools[3])


def check_coded_company(ops: PagedOps, layout: KvLayout, spec: AttentionSpec) -> None:
    """Each row has the bits that it has alone in its batch, and in another chunk of its prompt."""
    case = make_case([(1, 130), (20, 77), (7, 7), (1, 600)], layout=layout, num_heads=3 * layout.num_kv_heads)
    together = ops.attention(case.query, case.kv_layer, case.batch, spec)
    for index, (start, stop) in enumerate(pairwise(case.batch.query_start_loc.tolist())):
        alone = case.sequence(index)
        assert_same(ops.attention(alone.query, alone.kv_layer, alone.batch, spec), together[start:stop])
    whole = make_case([(150, 150)], layout=layout, num_heads=3 * layout.num_kv_heads)
    expected = ops.attention(whole.query, whole.kv_layer, whole.batch, spec)
    for start, stop in pairwise([0, 1, 37, 90, 150]):
        chunk = whole.rows(start, stop)
        assert_same(ops.attention(chunk.query, chunk.kv_layer, chunk.batch, spec), expected[start:stop])


def check_coded_unseen(ops: PagedOps, dtype: torch.dtype) -> None:
    """Behind a window a value's scale may be NaN: the slot has been given away."""
    layout = KvLayout(2, 2, 64, 16, dtype, ops.key_order)
    spec = AttentionSpec(scale=0.2, sliding_window=21)
    for length in range(60, 64):
        case = make_case([(1, length)], layout=layout, num_heads=6, layer=1)
        expected = ops.attention(case.query, case.kv_layer, case.batch, spec)
        assert torch.isfinite(expected).all()
        for position in range(length - 21):
            _, scales = split_codes(case.kv_layer)
            scales[int(case.batch.block_tables[0, position // 16]), :, :, position % 16] = torch.nan
        assert_same(ops.attention(case.query, case.kv_layer, case.batch, spec), expected)
