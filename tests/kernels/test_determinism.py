"""Bit for bit: a row's result depends on its own tokens, not on its batch, its chunk or its padding."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pageturner.kernels.layout import KvLayout
from pageturner.kernels.ops import AttentionSpec
from support.ops import BACKENDS
from support.paged import make_case

DETERMINISTIC = [name for name in BACKENDS if "deterministic" in name]
DTYPES = (torch.float32, torch.bfloat16)
SPECS = (
    AttentionSpec(scale=0.2),
    AttentionSpec(scale=0.2, sliding_window=21),
    AttentionSpec(scale=0.2, logit_softcap=3.0, sinks=torch.linspace(-1, 1, 9)),
)


@given(
    cuts=st.sets(st.integers(1, 149), max_size=6),
    spec=st.sampled_from(SPECS),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("backend", DETERMINISTIC)
def test_any_chunking_gives_the_rows_of_the_whole(
    backend: str, cuts: set[int], spec: AttentionSpec, dtype: torch.dtype
) -> None:
    ops = BACKENDS[backend]()
    layout = KvLayout(1, 3, 64, 16, dtype, ops.key_page)
    case = make_case([(150, 150)], layout=layout, num_heads=9)
    whole = ops.attention(case.query, case.kv_layer, case.batch, spec)
    edges = [0, *sorted(cuts), 150]
    for start, stop in pairwise(edges):
        chunk = case.rows(start, stop)
        part = ops.attention(chunk.query, chunk.kv_layer, chunk.batch, spec)
        assert torch.equal(part, whole[start:stop])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", DETERMINISTIC)
def test_decode_gives_the_rows_of_prefill(backend: str, dtype: torch.dtype, spec: AttentionSpec) -> None:
    ops = BACKENDS[backend]()
    layout = KvLayout(1, 3, 64, 16, dtype, ops.key_page)
    case = make_case([(90, 90)], layout=layout, num_heads=9)
    whole = ops.attention(case.query, case.kv_layer, case.batch, spec)
    for position in (0, 1, 15, 16, 63, 64, 65, 89):
        row = case.rows(position, position + 1)
        result = ops.attention(row.query, row.kv_layer, row.batch, spec)
        assert torch.equal(result, whole[position : position + 1])


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=2, max_size=9),
    spec=st.sampled_from(SPECS),
    dtype=st.sampled_from(DTYPES),
    width=st.integers(0, 5),
)
@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("backend", DETERMINISTIC)
def test_company_and_padding_change_nothing(
    backend: str, lengths: list[tuple[int, int]], spec: AttentionSpec, dtype: torch.dtype, width: int
) -> None:
    ops = BACKENDS[backend]()
    layout = KvLayout(1, 3, 64, 16, dtype, ops.key_page)
    case = make_case([(rows, rows + past) for rows, past in lengths], layout=layout, num_heads=9)
    padding = torch.zeros(len(lengths), width, dtype=torch.int32)
    batch = replace(case.batch, block_tables=torch.cat((case.batch.block_tables, padding), dim=1))
    together = ops.attention(case.query, case.kv_layer, batch, spec)
    starts = batch.query_start_loc.tolist()
    for index in range(len(lengths)):
        alone = case.sequence(index)
        result = ops.attention(alone.query, alone.kv_layer, alone.batch, spec)
        assert torch.equal(result, together[starts[index] : starts[index + 1]])


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
