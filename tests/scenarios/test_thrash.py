"""Work done over and over, a head of the queue that stops all others, and plans that cannot be carried out.

Each test says which guard it leans on: without that guard it fails.
"""

from __future__ import annotations

import pytest
from support.fake_model import Stop, expected_tokens
from support.real_service import PagedModel, make_engine, real_service
from support.scenarios import Scenario, scenario

from pageturner.policies import registry
from pageturner.service.core.clock import ManualClock
from pageturner.service.core.outputs import FinishedEvent, SchedulerOutput, TokenEvent
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.engine.api import EngineHealth
from pageturner.service.engine.thread_messages import Submit
from pageturner.service.errors import EngineDead


def oversubscribed(admission: str, *, reclaim: str = "always-recompute", depth: int = 0) -> Scenario:
    """Twelve requests of 8 + 24 tokens over a pool that holds a little more than two of them."""
    h = scenario(
        18, 4, num_host_blocks=24, depth=depth, admission=admission, reclaim=reclaim,
        options={"max_num_seqs": 12, "watermark": 0.03}, caching=False,
    )  # fmt: skip
    for seed in range(12):
        h.submit((seed % 3, 1, 2, 0, seed % 3, 1, 2, 0), max_tokens=24, seed=seed)
    h.finish_all(4000)
    return h


TOKENS_NEEDED = 12 * (8 + 24 - 1)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("reclaim", registry.names("reclaim"))
def test_vllm_37307_25538_no_start_without_room_for_the_whole_known_sequence(
    reclaim: str, depth: int
) -> None:
    """First admissions and returns alike: all that is known fits, beside all that runs and all it knows.

    Leans on full-prompt judging num_blocks_known, outputs included.
    """
    h = scenario(
        12, 4, num_host_blocks=12, depth=depth, admission="full-prompt", reclaim=reclaim, caching=False,
        options={"max_num_seqs": 8},
    )  # fmt: skip
    for seed in range(6):
        h.submit((seed % 3,) * 9, max_tokens=24, seed=seed)
    num_starts = 0
    while h.scheduler.has_work() or h.in_flight:
        h.step()
        decision = h.decisions[-1]
        num_starts += len(decision.started)
        if any(request_id != decision.guarded for request_id in decision.started):
            assert sum(decision.known.values()) <= 12, f"{decision.started} started"
    h.finish_all()
    assert num_starts > 6, "some returned"
    assert h.num_preemptions > 0


@pytest.mark.parametrize(
    "batch", [("long-prefill-cap", {"cap_tokens": 2}), ("equal-progress", {"min_chunk_tokens": 1})]
)
def test_vllm_37307_25538_what_a_prefill_has_yet_to_take_is_not_promised_again(
    batch: tuple[str, dict[str, object]],
) -> None:
    """Prompts of 6 blocks in a pool of 8: the second does not start while the first is in mid-prefill.

    Leans on admission leaving the blocks of unfinished prefills out of what is available.
    """
    h = scenario(
        8, 4, batch=batch, admission="full-prompt", options={"max_num_batched_tokens": 4}, caching=False
    )
    for letter in (0, 1, 2):
        h.submit((letter,) * 24, max_tokens=2)
    h.finish_all()
    assert h.num_preemptions == 0


def test_vllm_37307_25538_recomputing_stays_a_small_part() -> None:
    """Admitted by first chunks the same load computes many tokens twice; by whole prompts few.

    Leans on full-prompt and its watermark.
    """
    wasted = {
        admission: oversubscribed(admission).scheduler.stats().num_scheduled_tokens_total - TOKENS_NEEDED
        for admission in ("first-chunk", "full-prompt", "guaranteed-no-evict")
    }
    assert wasted["guaranteed-no-evict"] == 0
    assert wasted["full-prompt"] <= 0.8 * TOKENS_NEEDED
    assert wasted["full-prompt"] <= wasted["first-chunk"]


@pytest.mark.parametrize("reclaim", ["always-recompute", "always-swap"])
def test_vllm_ascend_16315_pending_frees_cover_the_need(reclaim: str) -> None:
    """At depth 1 a victim's blocks are fenced by the step in flight: none is preempted for them meanwhile.

    Leans on the planner counting pending blocks before it looks for victims.
    """
    h = scenario(
        12, 2, num_host_blocks=24, depth=1, admission="first-chunk", reclaim=reclaim, caching=False,
        options={"max_num_seqs": 6},
    )  # fmt: skip
    for seed in range(12):
        h.submit((seed % 3,) * 3, max_tokens=13, stop_ids=(2,), min_tokens=4, seed=seed)
    while h.scheduler.has_work() or h.in_flight:
        h.step()
        decision = h.decisions[-1]
        if decision.only_decodes and not decision.started:
            assert not any(map(decision.is_needless, decision.preempted)), "a cascade"
    h.finish_all()
    assert any(decision.num_pending for decision in h.decisions)
    assert h.num_preemptions > 0


@pytest.mark.parametrize("lacking", ["blocks", "slots"])
@pytest.mark.parametrize("answer", ["wait", "skip"])
def test_vllm_57841_a_head_that_does_not_fit_does_not_end_the_scan(lacking: str, answer: str) -> None:
    """Behind a head that lacks blocks, or slots (n > 1), those that fit start.

    An admission policy that answers wait for want of blocks is obeyed, and then no request
    overtakes. Leans on Attempt._admit going on after a skip, and on the core alone counting slots.
    """
    h = scenario(
        8, 4, admission=("full-prompt", {"skip": answer == "skip"}),
        options={"max_num_seqs": 3, "max_num_batched_tokens": 32},
    )  # fmt: skip
    h.submit((0,) * 4, max_tokens=20)
    h.step()
    num_tokens, n = (30, 1) if lacking == "blocks" else (3, 3)
    head = h.submit((1,) * num_tokens, max_tokens=2, n=n)
    small = [h.submit((2,) * 2, max_tokens=2, seed=seed) for seed in range(2)]
    h.step()
    started = set(h.decisions[-1].started)
    assert head not in started
    holds = lacking == "blocks" and answer == "wait"
    assert started == (set() if holds else set(small))
    h.finish_all()


@pytest.mark.parametrize("queue", registry.names("queue"))
@pytest.mark.parametrize("max_bypasses", [1, 3, 8])
def test_sglang_23152_vllm_33499_the_big_one_is_overtaken_a_bounded_number_of_times(
    queue: str, max_bypasses: int
) -> None:
    """Small requests without end go past one that does not fit, so often and no more, in any order.

    Leans on max_bypasses and on admissions holding after it.
    """
    h = scenario(
        8, 4, queue=queue, admission=("full-prompt", {"skip": True}),
        options={"max_bypasses": max_bypasses, "max_num_seqs": 3, "starvation_seconds": 1000.0},
    )  # fmt: skip
    h.submit((0,) * 4, max_tokens=25)
    h.step()
    big = h.submit((1,) * 24, max_tokens=2)
    num_overtaking = 0
    for seed in range(200):
        if h.decisions[-1].started == (big,) or h.has_ended(big):
            break
        h.submit((2,), max_tokens=2, seed=seed)
        waiting_before = h.request(big).num_bypasses
        h.step()
        if big not in h.decisions[-1].started and not h.has_ended(big):
            num_overtaking = h.request(big).num_bypasses
            assert num_overtaking - waiting_before <= 1
    else:
        raise AssertionError("the big one starves")
    assert num_overtaking <= max_bypasses
    h.finish_all()


def test_tensorrt_llm_13318_a_plan_that_cannot_be_carried_out_is_done_again() -> None:
    """Block transfers fail again and again under load: all are queued again and end with their tokens.

    Leans on fail_step keeping tokens, and on Engine.step taking the failure.
    """
    model = PagedModel(12, 0, 4)
    engine = make_engine(num_blocks=12, clock=ManualClock(0.0), model=model)
    for i in range(6):
        engine.apply(Submit(NewRequest(f"r{i}", (i % 3,) * 5, SamplingParams(max_tokens=8), i, 0.0)))
    outputs: dict[str, list[int]] = {}
    num_failures = 0
    while engine.seconds_to_next_step() is not None:
        if model.num_forwards in (2, 5, 9) and num_failures < model.num_forwards:
            model.fail_apply, num_failures = 1, model.num_forwards
        for event in engine.step():
            assert not (isinstance(event, FinishedEvent) and event.error)
            if isinstance(event, TokenEvent):
                outputs.setdefault(event.request_id, []).extend(token.token_id for token in event.tokens)
    assert num_failures == 9
    for i in range(6):
        assert outputs[f"r{i}"] == expected_tokens((i % 3,) * 5, i, 0, Stop(8))
    assert engine.stats.num_blocks_used == 0


class PlanAndCommitDisagree(Scheduler):
    """The fault itself, where no step can take the blame: committing raises after the third step."""

    def schedule(self, now: float) -> SchedulerOutput:
        if self.stats().num_steps_total >= 3:
            raise AssertionError("planted: the plan promised blocks that are not there")
        return super().schedule(now)


async def test_tensorrt_llm_13318_a_dead_loop_is_not_called_healthy() -> None:
    """What cannot be survived ends every stream with a status, and health says so.

    Leans on StepThread telling of its end, and on health following it.
    """
    async with real_service(scheduler_class=PlanAndCommitDisagree) as service:
        with pytest.raises(EngineDead):
            await service.client.generate((1,) * 4, max_tokens=20)
        await service.until(lambda: service.engine.health is EngineHealth.DEAD)
        with pytest.raises(EngineDead):
            await service.client.generate((1,) * 4, max_tokens=1)


def test_tensorrt_llm_16827_both_regimes_are_measured() -> None:
    """Steps to serve the same load: where it fits all admissions are alike; over-subscribed none collapses.

    Leans on the guarded request and max_preemptions, which bound what over-subscription can waste.
    """
    steps = {}
    for admission in registry.names("admission"):
        fits = scenario(96, 4, admission=admission, options={"max_num_seqs": 12}, caching=False)
        for seed in range(12):
            fits.submit((seed % 3,) * 8, max_tokens=24, seed=seed)
        fits.finish_all()
        assert fits.num_preemptions == 0
        steps[admission] = (fits.num_steps, oversubscribed(admission).num_steps)
    assert len({fitting for fitting, _ in steps.values()}) == 1, steps
    guaranteed = steps["guaranteed-no-evict"][1]
    for admission, (_, over) in steps.items():
        assert over <= 1.5 * guaranteed, f"{admission} needs {over} steps, {guaranteed} would do"
