"""Requests that can never be served, and loops that stand still.

Each test says which guard it leans on: without that guard it fails.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.real_service import MAX_EMPTY_SCHEDULES, make_engine, real_service
from support.scenarios import Scenario, scenario

from pageturner.policies import registry
from pageturner.service.core.clock import ManualClock
from pageturner.service.core.outputs import FinishedEvent, SchedulerOutput
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.engine.thread_messages import Submit
from pageturner.service.errors import InvalidArgument, RequestAborted, StepFailed

PROPERTY = settings(deadline=None, derandomize=True, database=None)


def peak_when_unlimited(num_prompt: int, max_tokens: int, n: int, block_size: int) -> int:
    """Blocks that a request is seen to hold at most, alone in a pool that never runs short."""
    h = scenario(64, block_size, options={"max_num_batched_tokens": 64}, caching=False)
    h.submit((1,) * num_prompt, max_tokens=max_tokens, n=n)
    peak = 0
    while h.scheduler.has_work():
        output = h.scheduler.schedule(h.now)
        peak = max(peak, h.scheduler.stats().num_blocks_used)
        h.take(h.scheduler.update(output, h.model.run(output), h.now))
    h.check_finished()
    return peak


@PROPERTY
@given(
    num_blocks=st.integers(1, 10),
    block_size=st.integers(1, 4),
    num_prompt=st.integers(1, 30),
    max_tokens=st.integers(1, 20),
    n=st.integers(1, 3),
    admission=st.sampled_from(registry.names("admission")),
)
def test_vllm_39734_35541_prompt_larger_than_pool(
    num_blocks: int, block_size: int, num_prompt: int, max_tokens: int, n: int, admission: str
) -> None:
    """Below max_model_len, over the pool: refused at submit by its field, or else served; those behind too.

    Leans on checked_max_tokens.
    """
    h = scenario(num_blocks, block_size, admission=admission)
    refusal: InvalidArgument | None = None
    try:
        h.submit((1,) * num_prompt, max_tokens=max_tokens, n=n)
    except InvalidArgument as error:
        refusal = error
    if refusal is not None:
        assert refusal.field in ("prompt", "max_tokens")
        assert h.scheduler.stats().num_waiting == 0
        assert not h.text.live
        assert num_prompt + max_tokens - 1 > num_blocks * block_size or n > 1
    for letter in (0, 2):
        h.submit((letter,), max_tokens=1)
    h.finish_all(500)


@settings(PROPERTY, max_examples=60)
@given(
    block_size=st.integers(1, 4),
    num_prompt=st.integers(1, 14),
    max_tokens=st.integers(1, 9),
    n=st.integers(1, 3),
)
def test_vllm_39866_admitted_by_the_real_need(
    block_size: int, num_prompt: int, max_tokens: int, n: int
) -> None:
    """A pool of exactly the peak seen serves the request undisturbed; one block less refuses it.

    Leans on num_peak_blocks, which charges neither more nor less than is used.
    """
    peak = peak_when_unlimited(num_prompt, max_tokens, n, block_size)
    h = scenario(peak, block_size)
    h.submit((1,) * num_prompt, max_tokens=max_tokens, n=n)
    h.finish_all(500)
    assert h.num_preemptions == 0
    if peak > 1:
        with pytest.raises(InvalidArgument):
            scenario(peak - 1, block_size).submit((1,) * num_prompt, max_tokens=max_tokens, n=n)


def test_vllm_39866_what_is_shared_is_not_charged_twice() -> None:
    """A second request on a cached prompt of 6 blocks starts in a pool of 8 beside the first.

    Leans on the hits being claimed before the admission policy is asked.
    """
    h = scenario(8, 4, options={"max_num_batched_tokens": 32}, admission="full-prompt")
    prompt = (0, 1, 2, 1) * 6
    h.submit(prompt, max_tokens=4)
    h.step()
    h.submit((*prompt, 2), max_tokens=3)
    h.step()
    assert h.decisions[-1].started == ("r1",)
    assert h.scheduler.stats().num_running == 2
    h.finish_all()
    assert h.num_preemptions == 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("reclaim", registry.names("reclaim"))
@pytest.mark.parametrize("n", [1, 2])
def test_sglang_19881_14948_the_last_one_running_never_runs_out(reclaim: str, depth: int, n: int) -> None:
    """Requests that each need the whole pool at their peak: one left alone fits, so none fails.

    Leans on the refusal at submit and on victims yielding to the guarded request.
    """
    h = scenario(
        6, 4, num_host_blocks=6, depth=depth, admission="first-chunk", reclaim=reclaim,
        options={"max_num_seqs": 6},
    )  # fmt: skip
    max_tokens = 25 - 8 if n == 1 else 25 - 16
    for seed in range(4):
        h.submit((seed % 3,) * 8, max_tokens=max_tokens, n=n, seed=seed)
    h.finish_all(2000)
    assert h.num_preemptions > 0


def test_nano_vllm_274_277_an_empty_schedule_is_no_accident() -> None:
    """Nothing submitted, all paused, all aborted, all in flight: schedule is falsy and nothing breaks.

    Leans on SchedulerOutput.__bool__ and on schedule leaving the step count alone.
    """
    h = scenario(depth=1)
    assert not h.step()
    first = h.submit((1,) * 4, max_tokens=1)
    assert h.step()
    assert not h.scheduler.schedule(h.now), "its only token is in flight"
    h.update()
    assert h.has_ended(first)
    paused, other = h.submit((2,) * 4, max_tokens=4), h.submit((0,) * 4, max_tokens=4)
    for request_id in (paused, other):
        h.scheduler.pause_request(request_id)
    assert not h.scheduler.has_work()
    assert not h.step()
    h.abort(other)
    assert not h.step()
    h.scheduler.resume_request(paused)
    h.run_to_end()
    h.check_finished()
    assert isinstance(h.error_of(other), RequestAborted)
    assert h.error_of(paused) is None


class StandsStill(Scheduler):
    """A scheduler with the fault looked for: it has work, and plans nothing."""

    def schedule(self, now: float) -> SchedulerOutput:
        return SchedulerOutput(0, ())


def test_nano_vllm_277_the_only_request_that_still_does_not_fit_ends_with_an_error() -> None:
    """The engine does not retry for ever what no schedule takes up.

    Leans on Engine._notice_standstill.
    """
    engine = make_engine(scheduler_class=StandsStill, clock=ManualClock(0.0))
    for name in ("a", "b"):
        engine.apply(Submit(NewRequest(name, (1, 2), SamplingParams(max_tokens=2), 0, 0.0)))
    ends: list[FinishedEvent] = []
    for _ in range(2 * MAX_EMPTY_SCHEDULES):
        ends += [event for event in engine.step() if isinstance(event, FinishedEvent)]
    assert [(end.request_id, type(end.error)) for end in ends] == [("a", StepFailed), ("b", StepFailed)]
    assert engine.seconds_to_next_step() is None


def fill_slots(h: Scenario, count: int) -> list[str]:
    ids = [h.submit((i % 3,) * 4, max_tokens=20, seed=i) for i in range(count)]
    h.step()
    assert h.scheduler.stats().num_running == count
    return ids


@pytest.mark.parametrize("reclaim", ["always-swap", "always-recompute", "tail-first"])
def test_vllm_53130_parked_requests_take_no_slots(reclaim: str) -> None:
    """However many are preempted, as many may run as ever: the slots of the parked go to others.

    Leans on slots being counted over the running only.
    """
    h = scenario(
        12, 4, num_host_blocks=12, reclaim=reclaim, admission=("first-chunk", {"skip": True}),
        options={"max_num_seqs": 3, "max_bypasses": 8},
    )  # fmt: skip
    for seed in range(3):
        h.submit((seed,) * 8, max_tokens=24, seed=seed)
    while not h.num_preemptions:
        h.step()
    for seed in range(4):
        h.submit((2, 1), max_tokens=2, seed=seed)
    seen_beside_parked = 0
    while h.scheduler.has_work():
        h.step()
        stats = h.scheduler.stats()
        assert stats.num_running_sequences <= 3
        parked = any(r.num_preemptions for r in h.scheduler.state.waiting)
        seen_beside_parked += parked and stats.num_running_sequences == 3
    assert seen_beside_parked > 0, "with one parked, three others run"
    h.finish_all()


def test_vllm_53130_sequence_slots_of_paused_requests_go_to_waiting_ones() -> None:
    """Every slot is held by a request whose reader sleeps: the next one runs all the same.

    Leans on the guarded request, which a paused request cannot be, and on its claim to slots.
    """
    h = scenario(16, 4, options={"max_num_seqs": 2})
    sleepers = fill_slots(h, 2)
    for request_id in sleepers:
        h.scheduler.pause_request(request_id)
    awake = h.submit((2,) * 4, max_tokens=3)
    for _ in range(8):
        h.step()
    assert h.has_ended(awake)
    for request_id in sleepers:
        h.scheduler.resume_request(request_id)
    h.finish_all()


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "n"),
    [(0, 1, 1), (64, 1, 1), (65, 1, 1), (1000, 1, 1), (33, 1, 1), (4, 61, 1), (4, 1, 5)],
)
def test_over_long_requests_are_always_answered(num_prompt: int, max_tokens: int, n: int) -> None:
    """Refused by an error, never logged and dropped; and the reason names a number.

    Leans on add_request raising before anything is kept.
    """
    h = scenario()
    with pytest.raises(InvalidArgument) as refusal:
        h.submit((0,) * num_prompt, max_tokens=max_tokens, n=n)
    assert refusal.value.field in ("prompt", "max_tokens", "n")
    assert num_prompt == 0 or any(character.isdigit() for character in refusal.value.reason)
    assert h.records == {}
    assert not h.scheduler.has_work()


async def test_over_long_requests_are_always_answered_on_the_wire() -> None:
    """Both calls, in whichever package the length is noticed: rpc, engine or scheduler."""
    async with real_service(num_blocks=8, block_size=4, max_model_len=40) as service:
        for num_prompt, max_tokens, field in ((40, 1, "prompt"), (33, 1, "prompt"), (8, 30, "max_tokens")):
            prompt = (1,) * num_prompt
            with pytest.raises(InvalidArgument) as unary:
                await service.client.generate(prompt, max_tokens=max_tokens)
            with pytest.raises(InvalidArgument) as streamed:
                _ = [item async for item in service.client.stream(prompt, max_tokens=max_tokens)]
            assert unary.value.field == streamed.value.field
            assert field in unary.value.field
        assert (await service.client.generate((1,) * 8, max_tokens=3)).usage.num_output_tokens == 3
        assert (await service.client.load()).num_waiting == 0
