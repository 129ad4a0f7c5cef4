"""Bit for bit: a row's result depends on its own tokens, not on its batch, its chunk or its padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_checks import check_batch_mates, check_chunking, layout_for
from support.ops import BACKENDS

from pageturner.kernels.interface import AttentionSpec

DETERMINISTIC = [name for name in BACKENDS if "deterministic" in name]
DTYPES = (torch.float32, torch.bfloat16)
SPECS = (
    AttentionSpec(scale=0.2),
    AttentionSpec(scale=0.2, sliding_window=75),
    AttentionSpec(scale=0.2, logit_softcap=3.0, sinks=torch.linspace(-1, 1, 9)),
)


@given(
    cuts=st.sets(st.integers(1, 149), max_size=6),
    spec=st.sampled_from(SPECS),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=12, deadline=None)
@pytest.mark.parametrize("backend", DETERMINISTIC)
def test_any_chunking_gives_the_rows_of_the_whole(
    backend: str, cuts: set[int], spec: AttentionSpec, dtype: torch.dtype
) -> None:
    ops = BACKENDS[backend]()
    check_chunking(ops, layout_for(ops, 3, 64, 16, dtype), 150, sorted(cuts), 3, spec)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", DETERMINISTIC)
def test_decode_gives_the_rows_of_prefill(backend: str, dtype: torch.dtype, spec: AttentionSpec) -> None:
    ops = BACKENDS[backend]()
    check_chunking(ops, layout_for(ops, 3, 64, 16, dtype), 90, range(60, 90), 3, spec)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=2, max_size=9),
    spec=st.sampled_from(SPECS),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=12, deadline=None)
@pytest.mark.parametrize("backend", DETERMINISTIC)
def test_a_row_has_the_same_bits_in_any_batch(
    backend: str, lengths: list[tuple[int, int]], spec: AttentionSpec, dtype: torch.dtype
) -> None:
    ops = BACKENDS[backend]()
    sequences = [(rows, rows + past) for rows, past in lengths]
    check_batch_mates(ops, layout_for(ops, 3, 64, 16, dtype), sequences, 3, spec)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("backend", DETERMINISTIC)
def test_long_contexts_keep_their_bits(backend: str, spec: AttentionSpec) -> None:
    """Beyond one partial sum: few sequences and many are shared among threads in different ways."""
    ops = BACKENDS[backend]()
    layout = layout_for(ops, 1, 64, 16)
    check_batch_mates(ops, layout, [(1, 1100), (1, 513), (2, 700), (1, 512), (1, 30)], 9, spec)
    check_chunking(ops, layout, 1100, [500, 1000, 1001, 1099], 9, spec)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_norm_and_activation_rows_are_independent(backend: str, dtype: torch.dtype) -> None:
    """In every backend, deterministic or not."""
    ops = BACKENDS[backend]()
    hidden, residual = torch.randn(2, 70, 576).to(dtype)
    gate_up = torch.randn(70, 3072).to(dtype)
    weight = torch.randn(576).to(dtype)
    normed, summed = ops.rms_norm(hidden, weight, 1e-5, residual)
    gated = ops.silu_and_mul(gate_up)
    for start, stop in ((0, 1), (3, 5), (10, 17), (69, 70)):
        part_normed, part_summed = ops.rms_norm(hidden[start:stop], weight, 1e-5, residual[start:stop])
        assert torch.equal(part_normed, normed[start:stop])
        assert torch.equal(part_summed, summed[start:stop])
        assert torch.equal(ops.silu_and_mul(gate_up[start:stop]), gated[start:stop])
