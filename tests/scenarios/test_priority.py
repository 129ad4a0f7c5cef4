"""Which requests are preempted, how often, and that each of them finishes.

Each test says which guard it leans on: without that guard it fails.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.scenarios import Decision, Scenario, scenario

from pageturner.policies import registry
from pageturner.service.core.request import RequestStatus

WAYS = ["always-recompute", "always-swap", "tail-first", "cost-model"]


def run_watched(h: Scenario, check: Callable[[Decision], None], max_steps: int = 2000) -> None:
    """To the end, and `check` every decision."""
    for _ in range(max_steps):
        if not h.scheduler.has_work() and not h.in_flight:
            break
        h.step()
        check(h.decisions[-1])
    h.finish_all()


def crowd(*, depth: int, reclaim: str, victim: str = "least-computed", block_size: int = 2) -> Scenario:
    """Eight requests of three priorities in a pool that holds three or four of them."""
    h = scenario(
        24 // block_size, block_size, num_host_blocks=48, depth=depth, reclaim=reclaim, victim=victim,
        admission="first-chunk", caching=False, options={"max_num_seqs": 8},
    )  # fmt: skip
    for seed in range(8):
        h.submit((seed % 3,) * 3, max_tokens=9 + seed % 3, priority=seed % 3, seed=seed)
    return h


@pytest.mark.parametrize("victim", registry.names("victim"))
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("reclaim", WAYS)
def test_vllm_49097_no_runnable_request_is_skipped_in_a_step_with_victims(
    reclaim: str, depth: int, victim: str
) -> None:
    """A running request with tokens to compute is scheduled, or preempted, or lacks a block on its way.

    Leans on an attempt building its list of running requests anew, never changing it while it walks.
    """
    h = crowd(depth=depth, reclaim=reclaim, victim=victim)
    remaining: dict[str, bool] = {}

    def check(decision: Decision) -> None:
        for request_id, could in remaining.items():
            if could and request_id in decision.running and request_id not in decision.preempted:
                assert request_id in decision.scheduled or decision.lacking[request_id], request_id
        remaining.clear()
        # At depth 0 every request that still runs has a token to compute in the next step.
        remaining.update((r.request_id, depth == 0) for r in h.scheduler.state.running.values())

    run_watched(h, check)
    assert any(decision.preempted for decision in h.decisions)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("reclaim", WAYS)
def test_vllm_41951_56843_a_preempted_request_is_not_the_victim_every_time(
    reclaim: str, limit: int, reverse: bool
) -> None:
    """After `limit` preemptions a request yields to the guarded request alone, whichever order they came in.

    Leans on max_preemptions.
    """
    h = scenario(
        12, 2, num_host_blocks=24, reclaim=reclaim, victim="last-arrived", admission="first-chunk",
        caching=False, options={"max_num_seqs": 8, "max_preemptions": limit},
    )  # fmt: skip
    letters = (0, 1, 2, 0, 1, 2)
    for seed in reversed(range(6)) if reverse else range(6):
        h.submit((letters[seed],) * 3, max_tokens=13, seed=seed)
    counts: dict[str, int] = dict.fromkeys(h.records, 0)

    def check(decision: Decision) -> None:
        # Who waits and gives up what it still holds is not preempted again by that.
        for request_id in set(decision.preempted) & set(decision.running):
            if counts[request_id] >= limit:
                guarded = decision.guarded
                assert guarded is not None
                assert request_id != guarded
                lacked = decision.lacking.get(guarded, 1)
                assert lacked or guarded in decision.started, (
                    f"{request_id} yields, but not to the guarded request"
                )
            counts[request_id] += 1

    run_watched(h, check)
    assert max(counts.values()) >= limit


def test_vllm_41951_56843_a_preempted_request_keeps_its_place() -> None:
    """It comes back before those who arrived after it, whatever its way out.

    Leans on the queue key staying what arrival made it.
    """
    for reclaim in WAYS:
        h = scenario(
            8, 2, num_host_blocks=16, reclaim=reclaim, victim="last-arrived", admission="full-prompt",
            caching=False, options={"max_num_seqs": 4},
        )  # fmt: skip
        for seed in range(3):
            h.submit((seed,) * 3, max_tokens=10, seed=seed)
        while not h.num_preemptions:
            h.step()
        (victim,) = h.decisions[-1].preempted
        later = h.submit((1, 2, 1), max_tokens=2, seed=9)
        queue = [request.request_id for request in h.scheduler.state.waiting]
        assert queue.index(victim) < queue.index(later)
        h.finish_all()


@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("victim", registry.names("victim"))
@pytest.mark.parametrize("reclaim", ["always-recompute", "always-swap"])
def test_sglang_12494_the_victim_set_is_minimal(
    reclaim: str, victim: str, depth: int, block_size: int
) -> None:
    """Without any one of the victims of a step, a scheduled request would have lacked a block.

    Leans on _minimal_victims and on sparing those a later one made needless.
    """
    h = scenario(
        24 // block_size, block_size, num_host_blocks=48, depth=depth, reclaim=reclaim, victim=victim,
        admission="first-chunk", caching=False, options={"max_num_seqs": 8},
    )  # fmt: skip
    for seed in range(8):
        h.submit((seed % 3,) * 3, max_tokens=9 + seed % 3, stop_ids=(seed % 3,), min_tokens=5, seed=seed)
    num_checked = 0

    def check(decision: Decision) -> None:
        nonlocal num_checked
        if decision.only_decodes and not decision.started:
            needless = [request_id for request_id in decision.preempted if decision.is_needless(request_id)]
            assert not needless, f"{needless} of {decision.preempted} need not have yielded"
            num_checked += bool(decision.preempted)

    run_watched(h, check)
    assert num_checked > 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("phase", range(5))
def test_tensorrt_llm_9931_10943_a_pause_is_idempotent_and_adds_no_token(phase: int, depth: int) -> None:
    """Paused twice and resumed once, at any phase and with a step in flight: no token more, none lost.

    Leans on is_paused being a state and not a count, and on results of a step in flight being taken still.
    """
    h = scenario(16, 4, depth=depth, caching=False)
    request_id = h.submit((0, 1, 2, 1, 0), max_tokens=8)
    other = h.submit((2,) * 3, max_tokens=20)
    for _ in range(phase):
        h.step()
    for _ in range(2):
        h.scheduler.pause_request(request_id)
    seen = h.num_tokens_of(request_id) + sum(
        row.seq_id == h.request(request_id).sequences[0].seq_id
        for output, _ in h.in_flight
        for part in output.scheduled
        for row in part.samples
    )
    for _ in range(4):
        output = h.step()
        assert request_id not in [part.request_id for part in output.scheduled]
    assert h.num_tokens_of(request_id) == seen, "what was in flight arrives, and nothing else"
    assert h.num_tokens_of(other) >= 3
    h.scheduler.resume_request(request_id)
    h.finish_all()
    assert h.num_tokens_of(request_id) == 8


@pytest.mark.parametrize("reclaim", WAYS)
def test_tensorrt_llm_10943_a_preemption_with_a_step_in_flight_repeats_no_token(reclaim: str) -> None:
    """Victims whose next token is in flight: that one is dropped, and sampled again.

    Leans on the epoch being raised with every reset.
    """
    h = crowd(depth=1, reclaim=reclaim)
    in_flight_victims = 0

    previous: set[str] = set()

    def check(decision: Decision) -> None:
        nonlocal previous, in_flight_victims
        in_flight_victims += len(previous & set(decision.preempted))
        previous = set(decision.scheduled)

    run_watched(h, check)
    assert in_flight_victims > 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("reclaim", WAYS)
def test_no_request_is_preempted_for_a_candidate_that_cannot_be_served(reclaim: str, depth: int) -> None:
    """An urgent request whose need the less urgent cannot cover: planned first, so none is preempted.

    Leans on the plan standing before any of it is carried out.
    """
    h = scenario(8, 4, num_host_blocks=8, depth=depth, reclaim=reclaim, caching=False)
    h.submit((0,) * 12, max_tokens=5, priority=5, seed=1)  # the guarded request: 4 blocks
    low = h.submit((1,) * 8, max_tokens=9, seed=2)  # 4 blocks at the end
    for _ in range(3):
        h.step()
    urgent = h.submit((2,) * 28, max_tokens=2, priority=3)  # 8 blocks: more than low holds and is free
    for _ in range(2):
        h.step()
        assert not h.decisions[-1].preempted
    assert h.request(low).status is RequestStatus.RUNNING
    assert h.request(urgent).status is RequestStatus.WAITING
    h.finish_all()


@pytest.mark.parametrize("variant", range(6))
def test_victims_finish_though_their_claimant_is_aborted_or_ends(variant: int) -> None:
    """Claimants are aborted, or end, right after others yielded to them; each victim returns and finishes.

    Leans on requeue: a request is running or waiting, and nothing between.
    """
    h = scenario(
        10, 2, num_host_blocks=10, admission="first-chunk", caching=False,
        reclaim=WAYS[variant % 4], options={"max_num_seqs": 4},
    )  # fmt: skip
    for seed in range(4):
        h.submit((seed % 3,) * 3, max_tokens=8, seed=seed)
    h.step()
    h.step()
    for attempt in range(6):
        urgent = h.submit((2,) * (4 + variant), max_tokens=4, priority=9, seed=attempt)
        h.step()
        if not h.has_ended(urgent):
            h.abort(urgent)
        live = {request.request_id for request in h.watched.live_requests()}
        assert live == {request_id for request_id in h.records if not h.has_ended(request_id)}
    assert h.num_preemptions > 0
    h.run_to_end()
    h.check_finished()
    assert all(h.error_of(f"r{i}") is None for i in range(4))
