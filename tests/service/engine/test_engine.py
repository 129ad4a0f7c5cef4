"""The step loop on a clock that moves only when told to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from support.scripted import ScriptedModel, ScriptedScheduler, recording_logger

from pageturner.service.core.clock import ManualClock
from pageturner.service.core.outputs import (
    BlockCopies,
    ChoiceFinishedEvent,
    Event,
    FinishedEvent,
    SchedulerOutput,
    TokenEvent,
)
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.engine.api import AcceptedEvent
from pageturner.service.engine.engine import STATS_INTERVAL, Engine
from pageturner.service.engine.metrics import Metrics
from pageturner.service.engine.options import EngineOptions
from pageturner.service.engine.step_computation import Device, DirectSteps
from pageturner.service.engine.thread_messages import (
    Abort,
    EngineOutput,
    Pause,
    Resume,
    Submit,
    SubmitRefused,
)
from pageturner.service.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineDead,
    PageturnerError,
    QueueFull,
    RequestAborted,
    SlowConsumer,
    StepFailed,
)

SEARCH = settings(max_examples=2000, database=None, phases=[Phase.generate])
OPTIONS = EngineOptions(max_consecutive_failures=8, max_empty_schedules=4, slow_consumer_timeout_seconds=5)


@dataclass
class Bench:
    """An engine and everything below it, within reach."""

    clock: ManualClock
    scheduler: ScriptedScheduler
    model: ScriptedModel
    engine: Engine

    def submit(
        self, request_id: str, max_tokens: int = 3, n: int = 1, deadline: float | None = None
    ) -> EngineOutput:
        params = SamplingParams(max_tokens=max_tokens, n=n)
        request = NewRequest(request_id, (1, 2), params, 7, self.clock.now(), deadline=deadline)
        (output,) = self.engine.apply(Submit(request))
        return output

    def steps(self, count: int) -> list[EngineOutput]:
        return [event for _ in range(count) for event in self.engine.step()]


def make_bench(
    max_requests: int = 1000,
    *,
    engine_class: Callable[..., Engine] = Engine,
    scheduler_class: type[ScriptedScheduler] = ScriptedScheduler,
    device: Device | None = None,
) -> Bench:
    clock, scheduler, model = ManualClock(100.0), scheduler_class(max_requests), ScriptedModel()
    engine = engine_class(
        scheduler,
        DirectSteps(model, model, model),
        clock=clock,
        options=OPTIONS,
        metrics=Metrics(),
        logger=recording_logger()[0],
        device=device,
    )
    return Bench(clock, scheduler, model, engine)


@pytest.fixture
def bench() -> Bench:
    return make_bench()


def error_of(events: list[EngineOutput], request_id: str) -> PageturnerError | None:
    (finished,) = [e for e in events if isinstance(e, FinishedEvent) and e.request_id == request_id]
    return finished.error


def test_a_step_moves_blocks_then_computes_then_samples(bench: Bench) -> None:
    assert bench.submit("a") == AcceptedEvent("a", 7, 2, 3)
    events = bench.steps(1)
    assert bench.model.calls == ["apply", "forward", "sample"]
    assert [type(event) for event in events] == [TokenEvent]


def test_a_step_of_copies_alone_does_not_run_the_model(bench: Bench) -> None:
    bench.scheduler.copies = BlockCopies(clears=(1,))
    assert bench.engine.step() == ()
    assert bench.model.calls == ["apply"]


def test_a_request_runs_to_its_end(bench: Bench) -> None:
    bench.submit("a", max_tokens=3, n=2)
    events = bench.steps(3)
    assert Counter(type(event) for event in events) == {
        TokenEvent: 6,
        ChoiceFinishedEvent: 2,
        FinishedEvent: 1,
    }
    assert isinstance(events[-1], FinishedEvent)
    assert bench.engine.stats.num_blocks_used == 0
    assert bench.engine.seconds_to_next_step() is None


def test_a_full_queue_refuses(bench: Bench) -> None:
    bench.scheduler.max_requests = 1
    bench.submit("a")
    refused = bench.submit("b")
    assert isinstance(refused, SubmitRefused)
    assert isinstance(refused.error, QueueFull)
    assert error_of(bench.steps(3), "a") is None


@pytest.mark.parametrize("where", ["apply", "forward", "sample"])
def test_a_failed_step_fails_no_other_request(bench: Bench, where: str) -> None:
    bench.submit("a")
    bench.submit("b")
    bench.model.fail_in[where] = RuntimeError("once")
    assert bench.steps(1) == []
    bench.model.fail_in.clear()
    events = bench.steps(5)
    assert error_of(events, "a") is None
    assert error_of(events, "b") is None


def test_only_the_request_that_fails_every_forward_ends_with_an_error(bench: Bench) -> None:
    for name in "abcd":
        bench.submit(name)
    bench.model.poison.add("c")
    events = bench.steps(12)
    assert isinstance(error_of(events, "c"), StepFailed)
    assert [error_of(events, name) for name in "abd"] == [None] * 3


def test_too_many_failures_in_a_row_kill_the_engine(bench: Bench) -> None:
    bench.model.fail_in["forward"] = RuntimeError("broken")
    for i in range(40):
        bench.submit(str(i))
    with pytest.raises(EngineDead, match=r"9 steps failed in a row.*broken"):
        bench.steps(9)


class LosableDevice:
    """A GPU whose context may break: from then on every wait for it raises."""

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.num_waits = 0

    def adopt_thread(self) -> None: ...

    def synchronize(self) -> None:
        self.num_waits += 1
        if self.fault is not None:
            raise self.fault


def test_a_lost_device_kills_the_engine_and_blames_no_request() -> None:
    device = LosableDevice()
    bench = make_bench(device=device)
    for i in range(3):
        bench.submit(str(i))
    bench.steps(1)
    assert device.num_waits == 0
    device.fault = bench.model.fail_in["forward"] = RuntimeError("CUDA error: an illegal memory access")
    with pytest.raises(EngineDead, match=r"can't go on: CUDA error"):
        bench.steps(1)
    assert bench.scheduler.suspects == []


def test_a_step_that_fails_on_a_sound_device_is_survived() -> None:
    bench = make_bench(device=LosableDevice())
    bench.submit("a", max_tokens=2)
    bench.model.fail_in["forward"] = RuntimeError("CUDA out of memory")
    bench.steps(1)
    bench.model.fail_in.clear()
    bench.submit("b")
    assert error_of(bench.steps(6), "b") is None


def test_a_success_clears_the_count_of_failures(bench: Bench) -> None:
    bench.submit("a", max_tokens=1000)
    bench.submit("b", max_tokens=1000)
    for _ in range(10):
        bench.model.fail_in["forward"] = RuntimeError("now and then")
        bench.steps(1)
        bench.model.fail_in.clear()
        bench.steps(2)
    assert bench.scheduler.stats().num_blocks_used == 2


def test_a_fault_of_the_scheduler_is_not_survived(bench: Bench) -> None:
    bench.submit("a")
    bench.scheduler.fault = AssertionError("our bug")
    with pytest.raises(AssertionError, match="our bug"):
        bench.steps(1)


def test_a_standstill_gives_up_the_oldest(bench: Bench) -> None:
    for name in "ab":
        bench.submit(name)
    bench.scheduler.is_stuck |= {"a", "b"}
    events = bench.steps(OPTIONS.max_empty_schedules)
    assert isinstance(error_of(events, "a"), StepFailed)
    assert not any(isinstance(e, FinishedEvent) and e.request_id == "b" for e in events)
    bench.scheduler.is_stuck.clear()
    assert error_of(bench.steps(3), "b") is None
    counters = bench.engine.metrics.snapshot(bench.engine.stats).counters
    assert counters["requests_given_up_total"] == 1


def test_empty_schedules_do_not_spin(bench: Bench) -> None:
    bench.submit("a")
    assert bench.engine.seconds_to_next_step() == 0
    bench.scheduler.is_stuck.add("a")
    bench.steps(1)
    wait = bench.engine.seconds_to_next_step()
    assert wait is not None
    assert wait > 0


def test_a_paused_request_rests_until_resumed(bench: Bench) -> None:
    bench.submit("a")
    bench.engine.apply(Pause("a", until=105.0))
    assert bench.steps(3) == []
    assert bench.engine.seconds_to_next_step() == 5.0
    bench.engine.apply(Resume("a"))
    bench.clock.advance(60)
    assert error_of(bench.steps(3), "a") is None


def test_a_request_paused_too_long_is_cancelled(bench: Bench) -> None:
    bench.submit("a")
    bench.submit("b")
    bench.engine.apply(Pause("a", until=105.0))
    bench.clock.advance(4.9)
    assert not any(isinstance(e, TokenEvent) and e.request_id == "a" for e in bench.steps(1))
    bench.clock.advance(0.2)
    assert not any(isinstance(e, FinishedEvent) and e.request_id == "a" for e in bench.steps(1))
    bench.clock.advance(1.25)  # a quarter of its time: its reader may be heard of
    events = bench.steps(2)
    assert isinstance(error_of(events, "a"), SlowConsumer)
    assert error_of(events, "b") is None


def test_a_deadline_ends_even_a_paused_request(bench: Bench) -> None:
    bench.submit("a", deadline=103.0)
    bench.engine.apply(Pause("a", until=105.0))
    bench.steps(1)
    assert bench.engine.seconds_to_next_step() == 3.0
    bench.clock.advance(3.0)
    assert isinstance(error_of(bench.steps(1), "a"), DeadlineExceeded)
    assert bench.engine.seconds_to_next_step() is None


def test_commands_for_unknown_requests_do_nothing(bench: Bench) -> None:
    for command in (Abort("x", RequestAborted("gone")), Pause("x", 1.0), Resume("x")):
        assert bench.engine.apply(command) == ()
    assert bench.engine.step() == ()


def test_figures_are_read_now_and_then_and_before_a_rest(bench: Bench) -> None:
    bench.submit("a", max_tokens=4)
    bench.steps(1)
    seen = [bench.engine.stats.num_steps_total]
    bench.steps(1)
    seen.append(bench.engine.stats.num_steps_total)
    bench.clock.advance(STATS_INTERVAL)
    bench.steps(1)
    seen.append(bench.engine.stats.num_steps_total)
    bench.steps(1)
    seen.append(bench.engine.stats.num_steps_total)
    assert seen == [1, 1, 3, 4]


def test_latencies_are_those_of_the_clock(bench: Bench) -> None:
    bench.submit("a", max_tokens=3)
    for seconds in (2.0, 0.5, 0.25):
        bench.clock.advance(seconds)
        bench.steps(1)
    snapshot = bench.engine.metrics.snapshot(bench.engine.stats)
    first, between = (
        snapshot.histograms[name] for name in ("time_to_first_token_seconds", "inter_token_latency_seconds")
    )
    assert (first.count, first.sum) == (1, 2.0)
    assert (between.count, between.sum) == (2, 0.75)
    assert between.cumulative[between.bounds.index(0.3)] == 1
    assert snapshot.histograms["e2e_request_latency_seconds"].sum == 2.75
    assert snapshot.counters["prompt_tokens_total"] == 2
    assert snapshot.counters["generation_tokens_total"] == 3
    assert snapshot.requests_finished_total == {"ok": 1}


operations = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 5)),
    st.tuples(st.just("abort"), st.integers(0, 5)),
    st.tuples(st.just("pause"), st.integers(0, 5)),
    st.tuples(st.just("resume"), st.integers(0, 5)),
    st.tuples(st.just("poison"), st.integers(0, 5)),
    st.tuples(st.just("stick"), st.integers(0, 5)),
    st.tuples(st.just("fail"), st.just(0)),
    st.tuples(st.just("step"), st.just(0)),
    st.tuples(st.just("advance"), st.integers(1, 4)),
)


scripts = st.lists(operations, max_size=60)


def play(script: list[tuple[str, int]], bench: Bench) -> None:
    """Run a script, let everything end, and check that each accepted request ended exactly once."""
    outputs: list[EngineOutput] = []
    num_submitted = 0
    for operation, argument in script:
        name = str(argument)
        match operation:
            case "submit":
                # The client side never submits an id that is live.
                if name not in bench.scheduler.entries:
                    num_submitted += 1
                    deadline = bench.clock.now() + 6 if argument % 3 == 0 else None
                    outputs.append(
                        bench.submit(name, max_tokens=1 + argument, n=1 + argument % 2, deadline=deadline)
                    )
            case "abort":
                outputs += bench.engine.apply(Abort(name, RequestAborted("asked for")))
            case "pause":
                outputs += bench.engine.apply(Pause(name, bench.clock.now() + 5))
            case "resume":
                outputs += bench.engine.apply(Resume(name))
            case "poison":
                bench.model.poison.add(name)
            case "stick":
                bench.scheduler.is_stuck.add(name)
            case "fail":
                bench.model.fail_in["sample"] = RuntimeError("once")
                outputs += bench.engine.step()
                bench.model.fail_in.clear()
            case "step":
                outputs += bench.engine.step()
            case "advance":
                bench.clock.advance(float(argument))
    for _ in range(200):
        bench.clock.advance(10.0)
        outputs += bench.engine.step()
    assert bench.engine.seconds_to_next_step() is None
    assert bench.engine.stats.num_blocks_used == 0
    accepted = Counter(output.request_id for output in outputs if isinstance(output, AcceptedEvent))
    finished = Counter(output.request_id for output in outputs if isinstance(output, FinishedEvent))
    refused = sum(isinstance(output, SubmitRefused) for output in outputs)
    assert accepted == finished
    assert accepted.total() + refused == num_submitted
    live: set[str] = set()
    for output in outputs:
        if isinstance(output, AcceptedEvent):
            live.add(output.request_id)
        elif isinstance(output, Event):
            assert output.request_id in live
            if isinstance(output, FinishedEvent):
                live.remove(output.request_id)


@settings(max_examples=200, deadline=None)
@given(scripts)
def test_every_accepted_request_ends_exactly_once(script: list[tuple[str, int]]) -> None:
    play(script, make_bench(max_requests=4))


class AnswersTwice(ScriptedScheduler):
    def abort_request(self, request_id: str, error: PageturnerError) -> tuple[Event, ...]:
        events = super().abort_request(request_id, error)
        return events + events[-1:]


class AbortsInSilence(ScriptedScheduler):
    def abort_request(self, request_id: str, error: PageturnerError) -> tuple[Event, ...]:
        super().abort_request(request_id, error)
        return ()


class SpeaksOfTheDead(ScriptedScheduler):
    def expire(self, now: float) -> tuple[Event, ...]:
        events = super().expire(now)
        return events + tuple(TokenEvent(event.request_id, 0, (), "late") for event in events)


class SwallowsFailures(ScriptedScheduler):
    def fail_step(self, output: SchedulerOutput, error: Exception, now: float) -> tuple[Event, ...]:
        for scheduled in output.scheduled:
            self.entries.pop(scheduled.request_id)
        return ()


class NeverGivesUp(Engine):
    def _notice_standstill(self) -> tuple[Event, ...]:
        return ()


class WaitsForReadersForever(Engine):
    def _expire(self) -> tuple[Event, ...]:
        for pause in self._paused._pauses.values():
            pause.until = math.inf
        return super()._expire()


class DropsExpired(Engine):
    def _expire(self) -> tuple[Event, ...]:
        super()._expire()
        return ()


@pytest.mark.parametrize("planted", [AnswersTwice, AbortsInSilence, SpeaksOfTheDead, SwallowsFailures])
def test_planted_bugs_of_a_scheduler_are_found(planted: type[ScriptedScheduler]) -> None:
    def is_wrong(script: list[tuple[str, int]]) -> bool:
        return fails(script, make_bench(max_requests=4, scheduler_class=planted))

    find(scripts, is_wrong, settings=SEARCH, random=Random(0))


@pytest.mark.parametrize("planted", [NeverGivesUp, WaitsForReadersForever, DropsExpired])
def test_planted_bugs_of_an_engine_are_found(planted: type[Engine]) -> None:
    def is_wrong(script: list[tuple[str, int]]) -> bool:
        return fails(script, make_bench(max_requests=4, engine_class=planted))

    find(scripts, is_wrong, settings=SEARCH, random=Random(0))


def fails(script: list[tuple[str, int]], bench: Bench) -> bool:
    try:
        play(script, bench)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream_buffer_tokens", 0),
        ("slow_consumer_timeout_seconds", 0.0),
        ("stall_seconds", float("nan")),
        ("shutdown_seconds", 1e10),
        ("max_consecutive_failures", 0),
        ("inline_prompt_characters", -1),
    ],
)
def test_options_are_checked(name: str, value: float) -> None:
    values: dict[str, float] = {name: value}
    with pytest.raises(ConfigError) as caught:
        EngineOptions(**values)  # type: ignore[arg-type]  # the wrong value is the point
    assert caught.value.key == f"engine.{name}"
