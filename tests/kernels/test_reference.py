"""The definition itself, against dense attention over contiguous tensors and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from support.paged import PagedCase, assert_near, assert_same, make_case, read_slot

from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.layout import KeyOrder, KvLayout
from pageturner.kernels.reference import ReferenceOps, first_key

SPECS = {
    "plain": AttentionSpec(scale=0.3),
    "window": AttentionSpec(scale=0.3, sliding_window=7),
    "softcap": AttentionSpec(scale=0.3, logit_softcap=1.5),
    "sinks": AttentionSpec(scale=0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 30.0])),
    "chunk": AttentionSpec(scale=0.3, chunk=5),
}


def dense_attention(case: PagedCase, spec: AttentionSpec) -> torch.Tensor:
    """All of it at once on contiguous tensors, in float64: no pages, no ranges."""
    outputs = []
    starts = case.batch.query_start_loc.tolist()
    for index, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        query = case.query[starts[index] : starts[index + 1]].double()
        group = query.shape[1] // keys.shape[1]
        keys = keys.double().repeat_interleave(group, dim=1)
        values = values.double().repeat_interleave(group, dim=1)
        position = torch.arange(len(keys) - len(query), len(keys))[:, None]
        key_position = torch.arange(len(keys))[None]
        mask = key_position <= position
        if spec.sliding_window is not None:
            mask &= key_position > position - spec.sliding_window
        if spec.chunk is not None:
            mask &= key_position // spec.chunk == position // spec.chunk
        logits = torch.einsum("qhd,khd->hqk", query, keys) * spec.scale
        if spec.logit_softcap is not None:
            logits = spec.logit_softcap * torch.tanh(logits / spec.logit_softcap)
        logits = logits.masked_fill(~mask, -math.inf).exp()
        sums = logits.sum(-1, keepdim=True)
        if spec.sinks is not None:
            sums = sums + spec.sinks.double().exp()[:, None, None]
        outputs.append(torch.einsum("hqk,khd->qhd", logits / sums, values))
    return torch.cat(outputs).to(case.query.dtype)


@pytest.mark.parametrize("key_order", KeyOrder)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_attention_is_dense_attention(key_order: KeyOrder, spec: AttentionSpec) -> None:
    layout = KvLayout(2, 2, 8, 16, torch.float32, key_order)
    case = make_case([(1, 1), (1, 17), (20, 33), (4, 4)], layout=layout, num_heads=4, layer=1)
    result = ReferenceOps(key_order).attention(case.query, case.kv_layer, case.batch, spec)
    assert_near(result, dense_attention(case, spec))


def test_first_key_with_window_and_chunk() -> None:
    spec = AttentionSpec(scale=1.0, sliding_window=3, chunk=4)
    assert [first_key(position, spec) for position in range(10)] == [0, 0, 0, 1, 4, 4, 4, 5, 8, 8]


@pytest.mark.parametrize("key_order", KeyOrder)
def test_write_kv_writes_its_slots_and_no_other(key_order: KeyOrder) -> None:
    layout = KvLayout(3, 2, 4, 16, torch.float32, key_order)
    case = make_case([(5, 20)], layout=layout, num_heads=2, layer=1)
    case.batch.slot_mapping[2] = -1
    before = case.kv_layer.clone()
    key, value = torch.randn(5, 2, 4), torch.randn(5, 2, 4)
    ReferenceOps(key_order).write_kv(key, value, case.kv_layer, case.batch)
    slots = case.batch.slot_mapping.tolist()
    for slot in range(case.kv_layer.shape[0] * 16):
        stored = read_slot(case.kv_layer, slot, key_order)
        expected = (
            (key[slots.index(slot)], value[slots.index(slot)])
            if slot in slots
            else read_slot(before, slot, key_order)
        )
        for have, want in zip(stored, expected, strict=True):
            assert_same(have, want)


def test_rotation_turns_pairs_half_a_head_apart() -> None:
    angle = torch.tensor([0.5, 1.25])
    layout = KvLayout(1, 1, 4, 2, torch.float32)
    case = make_case([(1, 1)], layout=layout, num_heads=1)
    row = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    cos, sin = angle.cos().repeat(2)[None], angle.sin().repeat(2)[None]
    turned = ReferenceOps().rope_and_write_kv(row, row, row, cos, sin, case.kv_layer, case.batch)
    as_complex = torch.complex(row[..., :2], row[..., 2:]) * torch.polar(torch.ones(2), angle)
    torch.testing.assert_close(turned, torch.cat((as_complex.real, as_complex.imag), dim=-1))
    key, value = read_slot(case.kv_layer, int(case.batch.slot_mapping[0]), KeyOrder.PLAIN)
    assert torch.equal(key, turned[0])
    assert torch.equal(value, row[0])


def test_norm_and_activation_by_hand() -> None:
    ops = ReferenceOps()
    normed, residual = ops.rms_norm(
        torch.tensor([[1.0, 2.0]]), torch.tensor([2.0, 0.5]), 0.0, torch.tensor([[2.0, 2.0]])
    )
    assert residual.tolist() == [[3.0, 4.0]]
    torch.testing.assert_close(normed, torch.tensor([[6.0, 2.0]]) / math.sqrt(12.5))
    gated = ops.silu_and_mul(torch.tensor([[0.0, 1.0, 5.0, 3.0]]))
    torch.testing.assert_close(gated, torch.tensor([[0.0, 3.0 / (1 + math.exp(-1))]]))


def test_copies_read_before_they_write() -> None:
    pool = torch.arange(5.0)[:, None].clone()
    ReferenceOps().copy_blocks(pool, [(0, 1), (1, 2), (2, 0), (3, 4)])
    assert pool.flatten().tolist() == [2, 0, 1, 3, 3]
