"""A decode step at fixed addresses: the same launches again and again, over what is loaded in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.emulation import emulated_launcher
from support.paged import PagedCase, assert_same, make_case

from pageturner.kernels.address_checks import HOST_ARRAYS
from pageturner.kernels.cuda.attention_plan import AttentionShape
from pageturner.kernels.cuda.ops import CudaOps
from pageturner.kernels.cuda.static_batch import StaticBatch
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.layout import AttentionBatch, HostBatch, KvLayout

LAYOUT = KvLayout(2, 2, 64, 16, torch.bfloat16)
SHAPE = AttentionShape(num_kv_heads=2, group=2, head_dim=64)
PLAIN = AttentionSpec(scale=0.2)


@pytest.fixture
def ops() -> CudaOps:
    return CudaOps(emulated_launcher())


def static_batch(ops: CudaOps, num_keys: int) -> StaticBatch:
    """Of two sequences."""
    return StaticBatch(2, -(-num_keys // 16), 16, (SHAPE,), ops.planner, ops.device)


def decode(lengths: Sequence[int]) -> PagedCase:
    return make_case([(1, length) for length in lengths], layout=LAYOUT, num_heads=4)


def host_of(batch: AttentionBatch) -> HostBatch:
    return HostBatch(*(getattr(batch, name).numpy() for name in HOST_ARRAYS))


def test_attention_follows_what_was_loaded_last(ops: CudaOps) -> None:
    static = static_batch(ops, 1500)
    ops.register(static.attention, static.plans)
    for lengths in ((1500, 2), (60, 1100), (5, 5)):
        step = decode(lengths)
        static.load(torch.zeros(2, dtype=torch.int64), host_of(step.batch))
        result = ops.attention(step.query, step.kv_layer, static.attention, PLAIN)
        assert_same(result, ops.attention(step.query, step.kv_layer, step.batch, PLAIN))


def test_a_mask_without_a_plan_is_refused_until_the_batch_is_forgotten(ops: CudaOps) -> None:
    static, step, window = static_batch(ops, 100), decode((5, 5)), replace(PLAIN, sliding_window=3)
    ops.register(static.attention, static.plans)
    with pytest.raises(KernelArgumentError, match="registered without a plan"):
        ops.attention(step.query, step.kv_layer, static.attention, window)
    ops.forget(static.attention)
    assert ops.attention(step.query, step.kv_layer, static.attention, window).shape == step.query.shape


def test_a_step_whose_plan_does_not_fit_changes_nothing(ops: CudaOps) -> None:
    static = static_batch(ops, 100)
    before = static._buffer.clone()
    for starts, lens in (([0, 1, 2, 3], [5, 5, 5]), ([0, 1, 2], [9000, 9000]), ([0, 9], [9])):
        host = HostBatch(
            np.array(starts, np.int32),
            np.array(lens, np.int32),
            np.zeros((len(lens), 1), np.int32),
            np.zeros(starts[-1], np.int64),
        )
        with pytest.raises(KernelArgumentError, match="the device plan's"):
            static.load(torch.zeros(starts[-1], dtype=torch.int64), host)
    assert torch.equal(static._buffer, before)
