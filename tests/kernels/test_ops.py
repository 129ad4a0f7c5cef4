"""Every backend against the definition: ragged lengths, scattered blocks, NaN in slots of no sequence."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_checks import (
    check_attention,
    check_blocks_behind_a_window,
    check_copies,
    check_non_finite_token,
    check_rope,
    check_shared_blocks,
    check_step_without_rows,
    layout_for,
)
from support.ops import BACKENDS
from support.paged import assert_near, assert_same, make_case

from pageturner.kernels.address_checks import BATCH_TENSORS
from pageturner.kernels.interface import AttentionSpec, PagedOps
from pageturner.kernels.layout import CODE_DTYPES, KeyOrder
from pageturner.kernels.reference import ReferenceOps

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> PagedOps:
    return BACKENDS[request.param]()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("group", "kv_heads", "head_dim"), [(1, 2, 64), (3, 3, 64), (4, 1, 128), (8, 1, 96), (5, 1, 48)]
)
def test_attention_over_ragged_lengths(
    ops: PagedOps, dtype: torch.dtype, group: int, kv_heads: int, head_dim: int
) -> None:
    layout = layout_for(ops, kv_heads, head_dim, 16, dtype)
    lengths = (1, 15, 16, 17, 53)
    spec = AttentionSpec(scale=head_dim**-0.5)
    check_attention(ops, layout, [(1, length) for length in lengths], group, spec)
    check_attention(ops, layout, [(1, 53), (7, 7), (1, 3), (20, 53), (17, 17)], group, spec)


def test_attention_over_long_contexts(ops: PagedOps) -> None:
    """Longer than the partial sums that a backend may keep."""
    layout = layout_for(ops, 1, 64, 16)
    spec = AttentionSpec(scale=0.3, sinks=torch.linspace(-1, 1, 3))
    check_attention(ops, layout, [(1, 1100), (2, 513), (1, 512), (3, 1026)], 3, spec)


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(scale=0.2, sliding_window=1),
        AttentionSpec(scale=0.2, sliding_window=19),
        AttentionSpec(scale=2.0, logit_softcap=2.5),
        AttentionSpec(scale=0.2, sinks=torch.tensor([0.5, -3.0, 0.0, 20.0])),
        AttentionSpec(scale=0.2, chunk=24),
        AttentionSpec(
            scale=0.2, sliding_window=9, logit_softcap=3.0, sinks=torch.tensor([0.5, -3.0, 0.0, 2.0])
        ),
    ],
    ids=["window-1", "window-19", "softcap", "sinks", "chunk", "all"],
)
def test_attention_options(ops: PagedOps, spec: AttentionSpec) -> None:
    layout = layout_for(ops, 2, 64, 16)
    check_attention(ops, layout, [(1, 70), (1, 5), (30, 70), (1, 24), (25, 25)], 2, spec)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_of_any_shape(backend: str, data: st.DataObject) -> None:
    ops = BACKENDS[backend]()
    block_size = data.draw(st.sampled_from((16, 32) if ops.key_order is KeyOrder.TILED16 else (1, 3, 8, 16)))
    head_dim = data.draw(st.sampled_from((16, 64, 80) if ops.name == "cpu" else (2, 8, 16, 40, 64)))
    group, kv_heads = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    lengths = st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n)))
    sequences = data.draw(st.lists(lengths, min_size=1, max_size=4))
    spec = AttentionSpec(
        scale=head_dim**-0.5,
        sliding_window=data.draw(st.none() | st.integers(1, 50)),
        logit_softcap=data.draw(st.none() | st.floats(1, 30)),
        sinks=torch.linspace(-1, 1, group * kv_heads) if data.draw(st.booleans()) else None,
        chunk=data.draw(st.none() | st.integers(1, 50)),
    )
    layout = layout_for(ops, kv_heads, head_dim, block_size)
    check_attention(ops, layout, sequences, group, spec, seed=data.draw(st.integers(0, 1000)))


@pytest.mark.parametrize(
    ("dtype", "table_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_rope_and_write(ops: PagedOps, dtype: torch.dtype, table_dtype: torch.dtype) -> None:
    for head_dim in (64, 48):
        check_rope(ops, dtype, table_dtype, head_dim)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv(ops: PagedOps, dtype: torch.dtype) -> None:
    layout = layout_for(ops, 2, 32, 16, dtype)
    case = make_case([(4, 33), (1, 16)], layout=layout, num_heads=2, layer=1)
    case.batch.slot_mapping[1] = -1
    key, value = torch.randn(2, 5, 2, 32).to(dtype)
    expected = case.kv_layer.clone()
    ReferenceOps(ops.key_order).write_kv(key, value, expected, case.batch)
    ops.write_kv(key, value, case.kv_layer, case.batch)
    assert_same(case.kv_layer, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (7, 576), (3, 100), (5, 4, 64)])
def test_rms_norm(ops: PagedOps, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    hidden, residual = torch.randn(2, *shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    for added in (None, residual):
        normed, summed = ops.rms_norm(hidden, weight, 1e-5, added)
        expected_normed, expected_sum = ReferenceOps().rms_norm(hidden, weight, 1e-5, added)
        assert torch.equal(summed, expected_sum)
        assert_near(normed, expected_normed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3072), (9, 3072), (3, 50)])
def test_silu_and_mul(ops: PagedOps, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate_up = (torch.randn(shape) * 4).to(dtype)
    assert_near(ops.silu_and_mul(gate_up), ReferenceOps().silu_and_mul(gate_up))


@given(seed=st.integers(0, 10_000), count=st.integers(0, 6))
@settings(max_examples=20, deadline=None)
@pytest.mark.parametrize("backend", BACKENDS)
def test_block_copies_and_transfers(backend: str, seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Destinations are distinct; sources may repeat, so that chains, cycles and fans all come up.
    destinations = torch.randperm(6, generator=generator)[:count].tolist()
    sources = torch.randint(6, (count,), generator=generator).tolist()
    check_copies(BACKENDS[backend](), list(zip(sources, destinations, strict=True)), num_blocks=6)


def test_a_batch_without_written_rows(ops: PagedOps) -> None:
    layout = layout_for(ops, 1, 16, 16)
    case = make_case([(1, 4)], layout=layout, num_heads=1)
    batch = replace(case.batch, slot_mapping=torch.tensor([-1]))
    before = case.kv_layer.clone()
    ops.write_kv(torch.ones(1, 1, 16), torch.ones(1, 1, 16), case.kv_layer, batch)
    assert_same(case.kv_layer, before)


@pytest.mark.parametrize("spec", [AttentionSpec(scale=0.2), AttentionSpec(scale=0.2, logit_softcap=3.0)])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_a_non_finite_token_changes_its_own_sequence_alone(
    ops: PagedOps, part: int, poison: float, spec: AttentionSpec
) -> None:
    check_non_finite_token(ops, layout_for(ops, 1, 16, 16), part, poison, spec)


def test_sequences_may_share_blocks(ops: PagedOps) -> None:
    check_shared_blocks(ops, layout_for(ops, 1, 16, 16))


@pytest.mark.parametrize("dtype", [torch.float32, *CODE_DTYPES])
def test_blocks_behind_a_window_may_be_anothers(ops: PagedOps, dtype: torch.dtype) -> None:
    check_blocks_behind_a_window(ops, layout_for(ops, 1, 64, 16, dtype))


def test_a_step_without_rows(ops: PagedOps) -> None:
    check_step_without_rows(ops, layout_for(ops, 1, 16, 16))


def test_strided_arguments_are_read_as_they_are(ops: PagedOps) -> None:
    """Columns of wider tensors, every other entry, tables cut at their right edge."""
    layout = layout_for(ops, 2, 16, 16)
    case = make_case([(1, 40), (3, 20)], layout=layout, num_heads=4)
    spec = AttentionSpec(scale=0.2, sinks=torch.linspace(-1, 1, 4))
    expected = ops.attention(case.query, case.kv_layer, case.batch, spec)
    assert spec.sinks is not None

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat_interleave(2, dim=-1)[..., ::2]

    batch = replace(case.batch, **{name: spread(getattr(case.batch, name)) for name in BATCH_TENSORS})  # type: ignore[arg-type]  # tensors all
    strided = replace(spec, sinks=spread(spec.sinks))
    assert_same(ops.attention(spread(case.query), case.kv_layer, batch, strided), expected)

    key, value = torch.randn(2, 4, 2, 16)
    ops.write_kv(key, value, case.kv_layer, case.batch)
    written = case.kv_layer.clone()
    ops.write_kv(spread(key), spread(value), case.kv_layer, batch)
    assert_same(case.kv_layer, written)

    hidden, weight = torch.randn(3, 4, 16), torch.randn(16)
    for view in (spread(hidden), hidden.transpose(0, 1).contiguous().transpose(0, 1), hidden[:, 1:3]):
        dense = view.contiguous()
        assert_same(ops.rms_norm(view, weight, 1e-5, view)[0], ops.rms_norm(dense, weight, 1e-5, dense)[0])
        flat = view.flatten(1)
        assert_same(ops.silu_and_mul(spread(flat)), ops.silu_and_mul(flat))
