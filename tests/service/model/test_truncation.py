"""The GPU's cut, by one sort, against the CPU's, by partitions: the same weights stay, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pageturner.service.model.truncation import truncate_, truncate_by_sorting_

NUM_ROWS = 5


@pytest.mark.parametrize("vocab_size", [7, 256, 3000])
@given(
    seed=st.integers(0, 10_000),
    sharpness=st.sampled_from([0.0, 0.3, 3.0]),
    options=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.01, 0.5, 1.0]),
            st.sampled_from([0, 1, 5, 100, 100_000]),
            st.sampled_from([0.0, 0.1, 0.9, 0.999, 1.0]),
        ),
        min_size=NUM_ROWS,
        max_size=NUM_ROWS,
    ),
)
def test_both_ways_keep_the_same(
    vocab_size: int, seed: int, sharpness: float, options: list[tuple[float, int, float]]
) -> None:
    logits = torch.randn(NUM_ROWS, vocab_size, generator=torch.Generator().manual_seed(seed))
    weights = torch.softmax((logits * sharpness).bfloat16().float(), -1)  # bfloat16 makes many equals
    min_p, top_k, top_p = zip(*options, strict=True)
    cuts = torch.tensor(min_p), torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64)
    by_parts, by_sorting = weights.clone(), weights.clone()
    truncate_(by_parts, *cuts)
    truncate_by_sorting_(by_sorting, *cuts)
    assert torch.equal(by_parts, by_sorting)
