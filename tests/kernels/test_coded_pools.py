"""Pools of codes: every backend writes what the definition writes, bit for bit, and attends as it does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.coded import check_coded_attention, check_coded_company, check_coded_writes, same_bytes
from support.kernel_checks import layout_for
from support.ops import BACKENDS
from support.paged import assert_same, empty_pool, make_batch, make_case, read_slot, store_row

from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.interface import AttentionSpec, PagedOps
from pageturner.kernels.layout import CODE_DTYPES, KeyOrder, KvLayout
from pageturner.kernels.reference import ReferenceOps
from pageturner.kernels.torch_ops import TorchOps

SPECS = {
    "plain": AttentionSpec(scale=0.2),
    "window": AttentionSpec(scale=0.2, sliding_window=19),
    "chunk, softcap and sinks": AttentionSpec(
        scale=0.5, chunk=24, logit_softcap=3.0, sinks=torch.linspace(-1, 1, 6)
    ),
}


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> PagedOps:
    return BACKENDS[request.param]()


@pytest.mark.parametrize("dtype", CODE_DTYPES)
@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_attention_over_codes(
    ops: PagedOps, dtype: torch.dtype, rows: torch.dtype, spec: AttentionSpec
) -> None:
    check_coded_attention(ops, layout_for(ops, 2, 64, 16, dtype), rows, spec)


@pytest.mark.parametrize("dtype", CODE_DTYPES)
@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16])
def test_writes_have_the_bits_of_the_definition(ops: PagedOps, dtype: torch.dtype, rows: torch.dtype) -> None:
    for head_dim in (64, 48):
        check_coded_writes(ops, layout_for(ops, 3, head_dim, 16, dtype), rows)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("backend", BACKENDS)
def test_pools_of_any_shape(backend: str, data: st.DataObject) -> None:
    ops = BACKENDS[backend]()
    tiled, compiled = ops.key_order is KeyOrder.TILED16, ops.name == "cpu"
    layout = KvLayout(
        2,
        data.draw(st.integers(1, 3)),
        data.draw(st.sampled_from((16, 64, 80) if compiled else (2, 8, 16, 40, 64))),
        data.draw(st.sampled_from((16, 32) if tiled else (1, 3, 8, 16))),
        data.draw(st.sampled_from(CODE_DTYPES)),
        ops.key_order,
    )
    lengths = st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n)))
    sequences = data.draw(st.lists(lengths, min_size=1, max_size=3))
    spec = AttentionSpec(
        scale=layout.head_dim**-0.5,
        sliding_window=data.draw(st.none() | st.integers(1, 50)),
        chunk=data.draw(st.none() | st.integers(1, 50)),
    )
    rows, seed = data.draw(st.sampled_from((torch.float32, torch.bfloat16))), data.draw(st.integers(0, 99))
    check_coded_writes(ops, layout, rows, seed)
    check_coded_attention(ops, layout, rows, spec, sequences, group=data.draw(st.integers(1, 5)), seed=seed)


@pytest.mark.parametrize("key_order", KeyOrder)
@pytest.mark.parametrize("dtype", CODE_DTYPES)
def test_the_definition_writes_codes_before_scales_and_touches_no_other_token(
    dtype: torch.dtype, key_order: KeyOrder
) -> None:
    layout = KvLayout(2, 2, 16, 16, dtype, key_order)
    pool = empty_pool(layout, 3)
    before, expected = pool.clone(), pool.clone()
    batch = make_batch([(2, 18)], [[2, 1]], 16)
    key, value = torch.randn(2, 2, 2, 16)
    ReferenceOps(key_order).write_kv(key, value, pool[:, 1], batch)
    for row, slot in enumerate(batch.slot_mapping.tolist()):
        block, offset = divmod(slot, 16)
        for part, rows, order in ((0, key, key_order), (1, value, KeyOrder.PLAIN)):
            wanted = store_row(expected[block, 1, part], offset, rows[row], order)
            assert_same(read_slot(pool[:, 1], slot, key_order)[part], wanted)
    assert same_bytes(pool, expected)
    assert not same_bytes(pool, before)


@pytest.mark.parametrize("dtype", CODE_DTYPES)
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_token_that_is_no_number_changes_its_own_sequence_alone(
    ops: PagedOps, dtype: torch.dtype, part: int, poison: float
) -> None:
    layout, spec = layout_for(ops, 1, 16, 16, dtype), AttentionSpec(scale=0.2)
    case = make_case([(1, 40), (1, 30), (5, 20)], layout=layout, num_heads=3)
    clean = ops.attention(case.query, case.kv_layer, case.batch, spec)
    rows = torch.zeros(7, 1, 16)
    rows[1, 0, 3] = poison
    zeros = torch.zeros_like(rows)
    only = replace(case.batch, slot_mapping=case.batch.slot_mapping.where(torch.arange(7) == 1, -1))
    ops.write_kv(*((rows, zeros) if part == 0 else (zeros, rows)), case.kv_layer, only)
    result = ops.attention(case.query, case.kv_layer, case.batch, spec)
    assert not torch.isfinite(result[1]).any()
    assert_same(result[0], clean[0])
    assert_same(result[2:], clean[2:])


@pytest.mark.parametrize("dtype", CODE_DTYPES)
def test_deterministic_rows_do_not_depend_on_their_company(dtype: torch.dtype) -> None:
    check_coded_company(TorchOps(deterministic=True), KvLayout(2, 1, 32, 16, dtype), SPECS["plain"])


@pytest.mark.parametrize("dtype", CODE_DTYPES)
def test_copies_take_scales_along(ops: PagedOps, dtype: torch.dtype) -> None:
    layout = layout_for(ops, 2, 16, 16, dtype)
    generator = torch.Generator().manual_seed(4)
    pool, host = (empty_pool(layout, 5) for _ in range(2))
    pool.view(torch.uint8).random_(0, 256, generator=generator)
    expected, expected_host = pool.clone(), host.clone()
    pairs = [(0, 1), (1, 2), (2, 0), (3, 4)]
    ops.copy_blocks(pool, pairs)
    for source, destination in pairs:
        assert same_bytes(pool[destination], expected[source])
    ops.transfer_blocks(pool, host, [(4, 0), (0, 3)])
    expected_host.view(torch.uint8)[[0, 3]] = pool.view(torch.uint8)[[4, 0]]
    assert same_bytes(host, expected_host)


@pytest.mark.parametrize("dtype", CODE_DTYPES)
def test_rows_that_codes_are_not_made_of_are_refused(ops: PagedOps, dtype: torch.dtype) -> None:
    layout = layout_for(ops, 1, 16, 16, dtype)
    case = make_case([(1, 4)], layout=layout, num_heads=1)
    before = case.kv_layer.clone()
    for wrong in (torch.float64, torch.int8):
        rows = torch.zeros(1, 1, 16, dtype=wrong)
        with pytest.raises(KernelArgumentError, match="key"):
            ops.write_kv(rows, rows, case.kv_layer, case.batch)
        with pytest.raises(KernelArgumentError, match="query"):
            ops.attention(rows, case.kv_layer, case.batch, SPECS["plain"])
    mixed = torch.zeros(1, 1, 16), torch.zeros(1, 1, 16, dtype=torch.bfloat16)
    with pytest.raises(KernelArgumentError, match="value"):
        ops.write_kv(*mixed, case.kv_layer, case.batch)
    assert same_bytes(case.kv_layer, before)


def test_a_layout_says_what_codes_take() -> None:
    plain = KvLayout(30, 3, 64, 16, torch.bfloat16)
    for dtype in CODE_DTYPES:
        layout = KvLayout(30, 3, 64, 16, dtype)
        assert layout.pool_shape(7) == (7, 30, 2, 3, 16, 66)
        assert layout.block_bytes == empty_pool(layout, 1).nbytes
        assert plain.block_bytes / layout.block_bytes == 128 / 66
    with pytest.raises(ValueError, match="odd"):
        KvLayout(1, 1, 3, 5, torch.int8)
