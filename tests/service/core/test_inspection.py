"""An inspection tells what a scheduler holds, and leaves it as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.core_harness import CoreHarness
from support.inspection_checks import check_inspection, owners_of

from pageturner.policies import registry
from pageturner.policies.interfaces import PolicySet
from pageturner.service.core.inspection import MAX_OWNERS, UNTOLD, BlockUse, RequestState, SchedulerInspection
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.scheduling import inspect

ROOMY = SchedulerOptions(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=32)


def _policies(reclaim: str) -> PolicySet:
    chosen: Any = {"reclaim": registry.create("reclaim", reclaim, {})}
    chosen["admission"] = registry.create("admission", "first-chunk", {})
    return replace(registry.default_policies(), **chosen)


def test_each_use_of_a_block_is_told_with_its_owner() -> None:
    harness = CoreHarness(registry.default_policies(), num_blocks=12, block_size=4, options=ROOMY, depth=1)
    first = harness.submit(tuple(range(9)), max_tokens=4, seed=1)
    harness.run_to_end()
    seen = check_inspection(harness.scheduler, harness.now)
    assert not seen.requests
    assert BlockUse.EVICTABLE in seen.block_map().uses, "its full blocks are cached"
    second = harness.submit(tuple(range(9)), max_tokens=20, n=2, seed=2)
    for _ in range(4):
        harness.step()
    seen = check_inspection(harness.scheduler, harness.now)
    (told,) = seen.requests
    assert (told.request_id, told.tenant, told.state) == (second, "t0", RequestState.RUNNING)
    assert told.number == 1, f"{first} was number 0"
    assert (told.num_prompt_tokens, told.num_cached_prompt_tokens, told.num_choices) == (9, 8, 2)
    assert told.num_output_tokens > 0
    assert told.first_token_seconds is not None
    assert BlockUse.SHARED in seen.block_map().uses, "two choices of one prompt"
    harness.abort(second)
    assert BlockUse.PENDING in check_inspection(harness.scheduler, harness.now).block_map().uses


@pytest.mark.parametrize("reclaim", ["always-swap", "always-recompute"])
def test_what_was_preempted_waits_and_says_where_its_tokens_are(reclaim: str) -> None:
    harness = CoreHarness(
        _policies(reclaim),
        num_blocks=6,
        block_size=4,
        num_host_blocks=12,
        options=ROOMY,
        enable_prefix_caching=False,
    )
    for seed in range(3):
        harness.submit((seed,) * 6, max_tokens=16, seed=seed, deadline=500.0, priority=seed)
    states = set()
    for _ in range(60):
        harness.step()
        seen = check_inspection(harness.scheduler, harness.now)
        for told in seen.requests:
            states.add(told.state)
            assert told.deadline_seconds == pytest.approx(500.0 - harness.now)
            if told.num_preemptions and told.state is RequestState.WAITING:
                assert told.num_uncomputed_tokens == told.num_prompt_tokens + told.num_output_tokens
    assert RequestState.RUNNING in states
    assert (RequestState.SWAPPED in states) == (reclaim == "always-swap")
    harness.run_to_end()
    harness.check_finished()


def test_more_requests_than_owners_fit_are_told_as_the_last() -> None:
    tables = ((0, (2,)), (MAX_OWNERS + 5, (0, 1)))
    blocks = SchedulerInspection(num_blocks=4, free=(3,), tables=tables).block_map()
    assert owners_of(blocks.owners) == [MAX_OWNERS, MAX_OWNERS, 1, 0]
    assert list(blocks.uses) == [BlockUse.LIVE] * 3 + [BlockUse.FREE]


def test_of_a_long_queue_the_first_are_told_and_the_rest_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "MAX_TOLD", 3)
    options = SchedulerOptions(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32)
    harness = CoreHarness(_policies("tail-first"), num_blocks=40, block_size=4, options=options)
    for seed in range(6):
        harness.scheduler.add_request(
            NewRequest(f"r{seed}", (seed,) * 6, SamplingParams(max_tokens=8), seed, 0.0)
        )
    output = harness.scheduler.schedule(1.0)
    assert len(output.scheduled) == 2
    seen = harness.scheduler.inspect(1.0)
    assert [request.request_id for request in seen.requests] == ["r0", "r1", "r2"]
    assert seen.num_requests == 6


def test_blocks_of_a_request_that_is_not_told_are_held_by_none() -> None:
    blocks = SchedulerInspection(
        num_blocks=3, free=(2,), tables=((UNTOLD, (0, 1)), (UNTOLD, (1,)))
    ).block_map()
    assert owners_of(blocks.owners) == [0, 0, 0]
    assert list(blocks.uses) == [BlockUse.LIVE, BlockUse.SHARED, BlockUse.FREE]
