"""What sets each reclaim policy apart, the cost model by costs worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from support.policy_views import LOAD, VICTIM, counts, load_views, rates, victim_views

from pageturner.policies.interfaces import Reclaim
from pageturner.policies.reclaim import (
    AlwaysRecompute,
    AlwaysSwap,
    CostModel,
    HostHeadroom,
    SwapGroups,
    TailFirst,
)
from pageturner.policies.views import LoadView, Rates, VictimView

# A block of 16 tokens moves in 1 s out and 1 s in; a token is computed in 0.1 s, at any context.
EVEN = Rates(
    swap_out_bytes_per_second=1000.0,
    swap_in_bytes_per_second=1000.0,
    block_bytes=1000,
    prefill_seconds_fixed=0.0,
    prefill_seconds_per_token=0.1,
    prefill_seconds_per_token_context=0.0,
)
HELD = replace(VICTIM, num_blocks=4, num_exclusive_blocks=4, num_recompute_tokens=64, num_tail_blocks=0)


def host(num_free: int, num_blocks: int = 100) -> LoadView:
    return replace(LOAD, host=replace(LOAD.host, num_blocks=num_blocks, num_free=num_free))


def test_always_means_always_but_for_a_full_host() -> None:
    assert AlwaysRecompute().choose(HELD, 1, EVEN, LOAD) is Reclaim.RECOMPUTE
    assert AlwaysSwap().choose(HELD, 1, EVEN, host(4)) is Reclaim.SWAP
    assert AlwaysSwap().choose(HELD, 1, EVEN, host(3)) is Reclaim.RECOMPUTE


def test_there_is_nothing_to_swap_in_no_blocks() -> None:
    empty = replace(HELD, num_blocks=0, num_exclusive_blocks=0, num_recompute_tokens=0)
    for policy in (AlwaysSwap(), HostHeadroom(), CostModel(), TailFirst(swap_rest=True)):
        assert policy.choose(empty, 1, EVEN, LOAD) is Reclaim.RECOMPUTE


def test_the_cheaper_way_is_taken() -> None:
    # To swap 4 blocks both ways takes 8 s, to compute 64 tokens 6.4 s.
    assert CostModel().choose(HELD, 1, EVEN, LOAD) is Reclaim.RECOMPUTE
    slow = replace(EVEN, prefill_seconds_per_token=0.2)  # 12.8 s
    assert CostModel().choose(HELD, 1, slow, LOAD) is Reclaim.SWAP
    assert CostModel().choose(HELD, 1, slow, host(3)) is Reclaim.RECOMPUTE


def test_both_directions_cost() -> None:
    slow = replace(EVEN, prefill_seconds_per_token=0.2)  # 12.8 s to compute again
    assert (
        CostModel().choose(HELD, 1, replace(slow, swap_out_bytes_per_second=400.0), LOAD) is Reclaim.RECOMPUTE
    )
    assert (
        CostModel().choose(HELD, 1, replace(slow, swap_in_bytes_per_second=400.0), LOAD) is Reclaim.RECOMPUTE
    )


def test_shared_blocks_are_moved_but_not_computed_again() -> None:
    slow = replace(EVEN, prefill_seconds_per_token=0.2)
    shared = replace(HELD, num_exclusive_blocks=1, num_recompute_tokens=16)  # 3.2 s against still 8 s
    assert CostModel().choose(shared, 1, slow, LOAD) is Reclaim.RECOMPUTE


def test_attention_to_the_context_that_stays_costs_too() -> None:
    victim = replace(HELD, request=replace(HELD.request, num_tokens=1064, num_uncomputed_tokens=0))
    deep = replace(EVEN, prefill_seconds_per_token=0.0, prefill_seconds_per_token_context=1e-3)
    # 64 tokens on top of 1000: 66.08 s against 8; on top of nothing: 2.08 s.
    assert CostModel().choose(victim, 1, deep, LOAD) is Reclaim.SWAP
    alone = replace(victim, request=replace(victim.request, num_tokens=64))
    assert CostModel().choose(alone, 1, deep, LOAD) is Reclaim.RECOMPUTE


def test_the_tail_is_taken_if_it_ends_the_shortage_and_is_cheaper() -> None:
    tailed = replace(HELD, num_tail_blocks=2)
    plain = CostModel(tail_weight=1.0)
    assert plain.choose(tailed, 2, EVEN, LOAD) is Reclaim.TAIL  # 3.2 s
    assert plain.choose(tailed, 3, EVEN, LOAD) is Reclaim.RECOMPUTE
    dear = replace(EVEN, prefill_seconds_per_token=1.0)  # the tail: 32 s; the swap: 8 s
    assert CostModel().choose(tailed, 2, dear, LOAD) is Reclaim.SWAP


def test_the_tail_attends_to_all_that_stays_before_it() -> None:
    deep = replace(EVEN, prefill_seconds_per_token=0.0, prefill_seconds_per_token_context=1e-3)
    request = replace(HELD.request, num_tokens=64, num_uncomputed_tokens=0)
    tailed = replace(HELD, request=request, num_tail_blocks=2)
    # 32 tokens on top of 32: 1.552 s, against 2.08 for all 64; on top of 1032: 33.552, against 8 to swap.
    plain = CostModel(tail_weight=1.0)
    assert plain.choose(tailed, 2, deep, LOAD) is Reclaim.TAIL
    behind = replace(tailed, request=replace(request, num_tokens=1064))
    assert plain.choose(behind, 2, deep, LOAD) is Reclaim.SWAP
    # A swap of 1.504 s is cheaper than the tail, though dearer than 32 tokens on top of nothing (0.528 s).
    quick = replace(deep, swap_out_bytes_per_second=1e6, swap_in_bytes_per_second=4000 / 1.5)
    assert plain.choose(tailed, 2, quick, LOAD) is Reclaim.SWAP


def test_what_a_victim_keeps_may_be_lost_as_well() -> None:
    """A tail of 3.2 s at the weight of two costs as much as all 64 tokens do, and then the whole yields."""
    tailed = replace(HELD, num_tail_blocks=2)
    assert CostModel(tail_weight=1.9).choose(tailed, 2, EVEN, LOAD) is Reclaim.TAIL
    assert CostModel().choose(tailed, 2, EVEN, LOAD) is Reclaim.RECOMPUTE


def test_a_shortage_of_slots_alone_is_no_reason_for_a_tail() -> None:
    tailed = replace(HELD, num_tail_blocks=2)
    for policy in (CostModel(), TailFirst()):
        assert policy.choose(tailed, 0, EVEN, LOAD) is not Reclaim.TAIL


def test_the_weight_of_a_swap() -> None:
    slow = replace(EVEN, prefill_seconds_per_token=0.2)  # 12.8 s against 8
    assert CostModel(swap_weight=1.5).choose(HELD, 1, slow, LOAD) is Reclaim.SWAP
    assert CostModel(swap_weight=1.7).choose(HELD, 1, slow, LOAD) is Reclaim.RECOMPUTE


@given(victim_views(), counts, rates, load_views())
def test_a_faster_link_never_turns_a_swap_into_something_else(
    victim: VictimView, num_blocks_short: int, measured: Rates, load: LoadView
) -> None:
    faster = replace(measured, swap_out_bytes_per_second=2 * measured.swap_out_bytes_per_second)
    if CostModel().choose(victim, num_blocks_short, measured, load) is Reclaim.SWAP:
        assert CostModel().choose(victim, num_blocks_short, faster, load) is Reclaim.SWAP


@pytest.mark.parametrize(("num_free", "answer"), [(29, Reclaim.SWAP), (28, Reclaim.RECOMPUTE)])
def test_headroom_is_what_is_left_after_the_swap(num_free: int, answer: Reclaim) -> None:
    assert HostHeadroom(headroom=0.25).choose(HELD, 1, EVEN, host(num_free)) is answer


def test_tail_first_takes_the_tail_at_any_price_and_else_what_it_is_told() -> None:
    tailed = replace(HELD, num_tail_blocks=2)
    dear = replace(EVEN, prefill_seconds_per_token=1e6)
    assert TailFirst().choose(tailed, 2, dear, LOAD) is Reclaim.TAIL
    assert TailFirst().choose(tailed, 3, dear, LOAD) is Reclaim.RECOMPUTE
    assert TailFirst(swap_rest=True).choose(tailed, 3, dear, LOAD) is Reclaim.SWAP
    assert TailFirst(swap_rest=True).choose(tailed, 3, dear, host(3)) is Reclaim.RECOMPUTE


def test_groups_are_swapped_while_the_host_has_room() -> None:
    group = replace(HELD, request=replace(HELD.request, num_sequences=2))
    assert SwapGroups().choose(group, 1, EVEN, LOAD) is Reclaim.SWAP
    assert SwapGroups().choose(group, 1, EVEN, host(3)) is Reclaim.RECOMPUTE
    assert SwapGroups().choose(HELD, 1, EVEN, LOAD) is Reclaim.RECOMPUTE
