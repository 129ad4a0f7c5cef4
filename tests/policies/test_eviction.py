"""What sets each eviction policy apart."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from support.policy_views import BLOCK

from pageturner.policies.eviction import CostAware, Lfu, Lru, PriorityWithTtl, SegmentedLru
from pageturner.policies.interfaces import EvictionPolicy
from pageturner.policies.views import BlockView


def goes_first(policy: EvictionPolicy, first: BlockView, second: BlockView) -> bool:
    return policy.score(first) < policy.score(second)


def block(**changes: float) -> BlockView:
    return replace(BLOCK, **changes)  # type: ignore[arg-type]  # fields by name


def test_lru_orders_by_last_use_only() -> None:
    assert goes_first(Lru(), block(released_at=1.0, num_hits=99), block(released_at=2.0))


def test_lfu_keeps_what_is_hit_often_until_its_fame_fades() -> None:
    policy = Lfu(seconds_per_hit=10.0)
    famous = block(released_at=0.0, num_hits=5)
    assert goes_first(policy, block(released_at=49.0), famous)
    assert goes_first(policy, famous, block(released_at=51.0))
    assert goes_first(policy, block(num_hits=1), block(num_hits=2))


def test_segments_know_two_ranks_only() -> None:
    policy = SegmentedLru(protect_after_hits=2, protected_seconds=100.0)
    probation, protected = block(num_hits=1, released_at=99.0), block(num_hits=2, released_at=0.0)
    assert goes_first(policy, probation, protected)
    assert goes_first(policy, protected, block(num_hits=0, released_at=101.0))  # protection ends
    assert policy.score(block(num_hits=2)) == policy.score(block(num_hits=50))
    assert policy.score(block(num_hits=0)) == policy.score(block(num_hits=1))


def test_segments_survive_a_scan_that_lru_does_not() -> None:
    system_prompt = block(released_at=0.0, num_hits=3)
    scan = [block(released_at=float(at)) for at in range(1, 50)]
    assert min([system_prompt, *scan], key=Lru().score) is system_prompt
    assert max([system_prompt, *scan], key=SegmentedLru().score) is system_prompt


@given(length=st.integers(2, 500), hits=st.integers(0, 9), context=st.floats(0, 1), data=st.data())
def test_cost_aware_evicts_a_chain_from_its_tail(
    length: int, hits: int, context: float, data: st.DataObject
) -> None:
    policy = CostAware(context_weight=context)
    depth = data.draw(st.integers(0, length - 2))
    head, tail = (block(depth=d, num_chain_blocks=length, num_hits=hits) for d in (depth, depth + 1))
    assert goes_first(policy, tail, head)


def test_cost_aware_keeps_long_chains_and_popular_ones() -> None:
    policy = CostAware(seconds_per_block=1.0, context_weight=0.5)
    short, long = block(num_chain_blocks=2), block(num_chain_blocks=4)
    assert policy.score(short) == 100.0 + 1 + 1.5
    assert policy.score(long) == 100.0 + 1 + 1.5 + 2 + 2.5
    assert policy.score(block(num_chain_blocks=2, num_hits=2)) == 100.0 + 3 * 2.5
    assert goes_first(CostAware(), block(depth=3, num_chain_blocks=4), short)


def test_cost_aware_does_not_judge_a_chain_it_does_not_know() -> None:
    assert CostAware().score(block(depth=0)) == CostAware().score(block(depth=7)) == 101.0


def test_a_level_of_priority_outlives_those_below_for_its_time_to_live() -> None:
    policy = PriorityWithTtl(ttl_seconds=60.0)
    urgent = replace(BLOCK, priority=1, released_at=100.0)
    assert policy.score(replace(BLOCK, released_at=159.9)) < policy.score(urgent)
    assert policy.score(replace(BLOCK, released_at=160.1)) > policy.score(urgent)
    assert policy.score(replace(BLOCK, priority=2, released_at=99.0)) > policy.score(urgent)
    assert policy.score(replace(BLOCK, priority=-1, released_at=150.0)) < policy.score(BLOCK)


def test_levels_of_priority_are_bounded() -> None:
    policy = PriorityWithTtl(ttl_seconds=60.0, max_level=2)
    assert policy.score(replace(BLOCK, priority=1 << 30)) == policy.score(replace(BLOCK, priority=2))
    assert policy.score(replace(BLOCK, priority=-(1 << 30))) == policy.score(replace(BLOCK, priority=-2))
