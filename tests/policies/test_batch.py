"""What sets each batch policy apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from support.policy_views import batch_views

from pageturner.policies.batch import DecodeFirst, EqualProgress, LongPrefillCap, PrefillFirst
from pageturner.policies.interfaces import BatchPolicy, BatchSplit
from pageturner.policies.views import BatchView

BUSY = BatchView(token_budget=100, num_decode_tokens=30, prefill_tokens=(500, 20), num_waiting=4)
POLICIES = [DecodeFirst(), PrefillFirst(), EqualProgress(), LongPrefillCap()]


def test_decode_first_leaves_the_rest_to_prefill() -> None:
    assert DecodeFirst().split(BUSY) == BatchSplit(30, 70)
    assert DecodeFirst().split(BatchView(20, 30, (500,), 0)) == BatchSplit(20, 0)


def test_prefill_first_finishes_what_was_begun() -> None:
    assert PrefillFirst().split(BUSY) == BatchSplit(0, 100)
    assert PrefillFirst().split(BatchView(100, 80, (25, 5), 4)) == BatchSplit(70, 30)


def test_prefill_first_does_not_stall_decoding_for_those_that_wait() -> None:
    assert PrefillFirst().split(BatchView(100, 30, (), 50)) == BatchSplit(30, 70)


@pytest.mark.parametrize(
    ("prefills", "num_waiting", "chunk"),
    [
        ((500, 20), 0, 50),  # 20 is all the second wants, 50 is left for the first
        ((500, 600), 0, 35),
        ((500, 20), 4, 25),  # those waiting share as one: 20, 25, 25
        ((500, 600, 700), 4, 17),
        ((10, 20), 0, 20),  # all can be finished
    ],
)
def test_equal_progress_raises_all_to_one_level(
    prefills: tuple[int, ...], num_waiting: int, chunk: int
) -> None:
    policy = EqualProgress(min_chunk_tokens=1)
    assert policy.split(BatchView(100, 30, prefills, num_waiting)) == BatchSplit(30, 70, chunk)


def test_equal_progress_cuts_no_slivers() -> None:
    assert EqualProgress(min_chunk_tokens=32).split(BatchView(100, 30, (500,) * 7, 0)) == BatchSplit(
        30, 70, 32
    )


@given(batch_views)
def test_equal_progress_wastes_nothing_that_could_be_used(batch: BatchView) -> None:
    split = EqualProgress(min_chunk_tokens=1).split(batch)
    assert split.chunk_tokens is not None
    used = sum(min(tokens, split.chunk_tokens) for tokens in batch.prefill_tokens)
    unmet = any(tokens > split.chunk_tokens for tokens in batch.prefill_tokens)
    if unmet and not batch.num_waiting:
        assert used + len(batch.prefill_tokens) > split.prefill_tokens  # one more each would not fit


def test_long_prefill_cap_holds_only_while_others_compete() -> None:
    policy = LongPrefillCap(cap_tokens=40)
    assert policy.split(BUSY) == BatchSplit(30, 70, 40)
    assert policy.split(BatchView(100, 30, (500,), 0)) == BatchSplit(30, 70, None)
    assert policy.split(BatchView(100, 30, (500,), 1)) == BatchSplit(30, 70, 40)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@given(batch=batch_views)
def test_no_budget_is_left_out(policy: BatchPolicy, batch: BatchView) -> None:
    split = policy.split(batch)
    assert split.decode_tokens + split.prefill_tokens == batch.token_budget
