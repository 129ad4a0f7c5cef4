"""The engine behind asyncio: a real thread, a scripted model that takes a permit for each step."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted import ScriptedModel, ScriptedScheduler, recording_logger, text_of, token_at
from support.tiny_tokenizers import byte_level_bpe

from pageturner.policies.interfaces import AXES
from pageturner.policies.views import Rates
from pageturner.service.core.clock import ManualClock
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.outputs import ChoiceFinishedEvent, FinishedEvent, TokenEvent
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.engine.api import (
    AbortOutcome,
    AcceptedEvent,
    ChatMessage,
    Condition,
    EngineClient,
    EngineHealth,
    GenerationRequest,
    ModelInfo,
    RequestStream,
    ServerInfo,
    StreamEvent,
)
from pageturner.service.engine.async_engine import AsyncEngine
from pageturner.service.engine.engine import Engine
from pageturner.service.engine.metrics import Metrics
from pageturner.service.engine.options import EngineOptions
from pageturner.service.engine.step_computation import Device, DirectSteps
from pageturner.service.engine.stream import BufferedStream
from pageturner.service.engine.thread_messages import Resume
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.errors import (
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    EngineDead,
    InvalidArgument,
    Loading,
    ModelNotFound,
    PageturnerError,
    QueueFull,
    RequestAborted,
    SlowConsumer,
    StepFailed,
)

MODEL = ModelInfo(
    name="tiny",
    source="here",
    architecture="Scripted",
    backend="scripted",
    dtype="float32",
    deterministic=True,
    vocab_size=500,
    max_model_len=64,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    num_parameters=0,
    eos_token_ids=(1,),
    has_chat_template=False,
)
SERVER = ServerInfo("1", 0.5, 0.0, 16, 8, 0, 1, 8, 64, "reference", Rates(), {})
OPTIONS = EngineOptions(stream_buffer_tokens=4, slow_consumer_timeout_seconds=5.0, stall_seconds=60.0)
PROMPT = (5, 6, 7)


@dataclass
class Bench:
    """An engine that serves, and everything below it within reach."""

    engine: AsyncEngine
    scheduler: ScriptedScheduler
    model: ScriptedModel
    clock: ManualClock
    log: list[MutableMapping[str, Any]]
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def in_lockstep(self) -> None:
        """From now on the loop sees what one step put out before the next step begins."""
        loop = asyncio.get_running_loop()
        self.model.on_forward = lambda _: asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()

    def step_beginnings(self) -> asyncio.Queue[None]:
        """Gets an item whenever a step begins to compute."""
        loop, beginnings = asyncio.get_running_loop(), asyncio.Queue[None]()
        self.model.on_forward = lambda _: loop.call_soon_threadsafe(beginnings.put_nowait, None)
        return beginnings

    def allow(self, num_steps: int) -> None:
        self.gate.release(num_steps)

    def open(self) -> None:
        """No step waits any more."""
        self.model.gate = None
        self.gate.release()

    async def submit(
        self, request_id: str = "", max_tokens: int = 3, n: int = 1, seed: int = 0
    ) -> RequestStream:
        params = SamplingParams(max_tokens=max_tokens, n=n, seed=seed)
        return await self.engine.submit(GenerationRequest(PROMPT, params, request_id))


@asynccontextmanager
async def serving(
    *,
    gated: bool = False,
    max_requests: int = 1000,
    options: EngineOptions = OPTIONS,
    has_tokenizer: bool = True,
    device: Device | None = None,
) -> AsyncIterator[Bench]:
    clock, scheduler, model = ManualClock(100.0), ScriptedScheduler(max_requests), ScriptedModel()
    logger, log = recording_logger()
    engine = Engine(
        scheduler,
        DirectSteps(model, model, model),
        clock=clock,
        options=options,
        metrics=Metrics(),
        logger=logger,
        device=device,
    )
    async_engine = AsyncEngine(
        engine,
        Tokenizer(byte_level_bpe()) if has_tokenizer else None,
        model=MODEL,
        server_info=SERVER,
        scheduler_options=SchedulerOptions(max_n=4),
        options=options,
        clock=clock,
        random=Random(0),
        logger=logger,
    )
    bench = Bench(async_engine, scheduler, model, clock, log)
    model.gate = bench.gate if gated else None
    await async_engine.start()
    try:
        yield bench
    finally:
        bench.open()
        await async_engine.aclose()
    if async_engine.health is not EngineHealth.DEAD:
        assert scheduler.entries == {}, "a request outlived its engine"


async def read_all(stream: RequestStream) -> list[StreamEvent]:
    return [event async for event in stream]


async def outcome_of(stream: RequestStream) -> PageturnerError | None:
    """Read to the end; the error that ended the stream, None if all went well."""
    last: StreamEvent | None = None
    try:
        async for event in stream:
            last = event
    except PageturnerError as error:
        return error
    assert isinstance(last, FinishedEvent)
    return None


def text_of_choice(events: list[StreamEvent], index: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, TokenEvent) and event.index == index)


def expected_text(seed: int, max_tokens: int, index: int = 0) -> str:
    return "".join(text_of(token_at(seed, index, len(PROMPT) + i)) for i in range(max_tokens))


async def test_one_request_from_start_to_end() -> None:
    async with serving() as bench:
        client: EngineClient = bench.engine
        stream = await client.submit(
            GenerationRequest(PROMPT, SamplingParams(max_tokens=5, n=2, seed=9), "mine")
        )
        events = await read_all(stream)
    assert events[0] == AcceptedEvent("mine", 9, 3, 5)
    assert [text_of_choice(events, index) for index in (0, 1)] == [expected_text(9, 5, i) for i in (0, 1)]
    assert sum(isinstance(event, ChoiceFinishedEvent) for event in events) == 2
    assert isinstance(events[-1], FinishedEvent)


async def test_64_streams_at_once_keep_their_own_order() -> None:
    async with serving() as bench:
        streams = await asyncio.gather(*(bench.submit(max_tokens=40, seed=seed) for seed in range(64)))
        read = await asyncio.gather(*map(read_all, streams))
    assert [text_of_choice(events) for events in read] == [expected_text(seed, 40) for seed in range(64)]


async def test_one_hand_off_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(gated=True) as bench:
        hand_offs = 0
        loop = asyncio.get_running_loop()
        call_soon_threadsafe = loop.call_soon_threadsafe

        def counted(callback: Callable[..., object], *args: Any, **options: Any) -> asyncio.Handle:
            nonlocal hand_offs
            hand_offs += 1
            return call_soon_threadsafe(callback, *args, **options)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        submitting = [asyncio.ensure_future(bench.submit(seed=seed)) for seed in range(16)]
        await asyncio.sleep(0)
        bench.open()
        streams = await asyncio.gather(*submitting)
        await asyncio.gather(*map(read_all, streams))
        assert 2 <= hand_offs <= bench.model.calls.count("forward") + 1


async def test_seeds_and_ids_left_open_are_drawn_from_the_injected_source() -> None:
    accepted = []
    for _ in range(2):
        async with serving() as bench:
            stream = await bench.engine.submit(GenerationRequest(PROMPT, SamplingParams(max_tokens=1)))
            accepted.append((await read_all(stream))[0])
    assert accepted[0] == accepted[1]
    assert isinstance(accepted[0], AcceptedEvent)
    assert accepted[0].seed > 0
    assert accepted[0].request_id


BAD_REQUESTS: list[tuple[GenerationRequest, str]] = [
    (GenerationRequest(""), "prompt.text"),
    (GenerationRequest(()), "prompt.token_ids"),
    (GenerationRequest("a\ud800"), "prompt"),
    (GenerationRequest((1, 500)), "prompt.token_ids[1]"),
    (GenerationRequest((-1,)), "prompt.token_ids[0]"),
    (GenerationRequest((1,) * 64), "prompt"),
    (GenerationRequest((ChatMessage("user", "hi"),)), "prompt.chat"),
    (GenerationRequest((1,), SamplingParams(temperature=float("nan"))), "temperature"),
    (GenerationRequest((1,), SamplingParams(top_p=1.5)), "top_p"),
    (GenerationRequest((1,), SamplingParams(n=5)), "n"),
    (GenerationRequest((1,), SamplingParams(stop=("",))), "stop[0]"),
    (GenerationRequest((1,), request_id="x" * 257), "request_id"),
    (GenerationRequest((1,), deadline_seconds=float("nan")), "deadline"),
]


@pytest.mark.parametrize(("bad", "field"), BAD_REQUESTS, ids=[field for _, field in BAD_REQUESTS])
async def test_bad_requests_are_refused_by_name(bad: GenerationRequest, field: str) -> None:
    async with serving() as bench:
        with pytest.raises(InvalidArgument) as caught:
            await bench.engine.submit(bad)
        assert caught.value.field == field
        assert bench.model.calls == []


async def test_a_bad_deadline_or_model_is_refused() -> None:
    async with serving() as bench:
        with pytest.raises(ModelNotFound):
            await bench.engine.submit(GenerationRequest(PROMPT, model="other"))
        with pytest.raises(DeadlineExceeded):
            await bench.engine.submit(GenerationRequest(PROMPT, deadline_seconds=0.0))


async def test_without_a_tokenizer_only_ids_are_taken() -> None:
    async with serving(has_tokenizer=False) as bench:
        for request in (GenerationRequest("hi"), GenerationRequest(PROMPT, SamplingParams(stop=("x",)))):
            with pytest.raises(InvalidArgument, match="no tokenizer"):
                await bench.engine.submit(request)
        assert await outcome_of(await bench.submit()) is None


@pytest.mark.parametrize("inline_prompt_characters", [0, 2048])
async def test_text_is_tokenized_in_line_or_beside(inline_prompt_characters: int) -> None:
    options = replace(OPTIONS, inline_prompt_characters=inline_prompt_characters)
    async with serving(options=options) as bench:
        token_ids = await bench.engine.tokenize("The quick brown fox")
        assert await bench.engine.detokenize(token_ids) == "The quick brown fox"
        stream = await bench.engine.submit(
            GenerationRequest("The quick brown fox", SamplingParams(max_tokens=1))
        )
        (accepted, *_) = await read_all(stream)
        assert isinstance(accepted, AcceptedEvent)
        assert accepted.num_prompt_tokens == len(token_ids)
        assert await bench.engine.detokenize(()) == ""
        with pytest.raises(InvalidArgument, match=r"token_ids\[0\]"):
            await bench.engine.detokenize((500,))


async def test_a_live_id_is_refused_and_free_again_at_its_end() -> None:
    async with serving(gated=True) as bench:
        bench.allow(1)
        stream = await bench.submit("mine", max_tokens=3)
        with pytest.raises(DuplicateRequest):
            await bench.submit("mine")
        bench.open()
        assert await outcome_of(stream) is None
        assert await outcome_of(await bench.submit("mine")) is None


async def test_a_full_queue_reaches_the_submitter() -> None:
    async with serving(gated=True, max_requests=1) as bench:
        first, second = (asyncio.ensure_future(bench.submit(name)) for name in ("first", "second"))
        await asyncio.sleep(0)
        bench.open()
        with pytest.raises(QueueFull) as caught:
            await second
        assert caught.value.retry_after_seconds == 1.0
        assert await outcome_of(await first) is None
        assert await bench.engine.abort("second") is AbortOutcome.NOT_FOUND


async def test_abort_before_acceptance() -> None:
    async with serving(gated=True) as bench:
        submitting = asyncio.ensure_future(bench.submit("a"))
        await asyncio.sleep(0)
        assert await bench.engine.abort("a") is AbortOutcome.ABORTED
        bench.open()
        assert isinstance(await outcome_of(await submitting), RequestAborted)


async def test_abort_while_running_and_again() -> None:
    async with serving(gated=True) as bench:
        bench.allow(1)
        stream = await bench.submit("a", max_tokens=1000)
        reading = asyncio.ensure_future(outcome_of(stream))
        assert await bench.engine.abort("a") is AbortOutcome.ABORTED
        assert await bench.engine.abort("a") is AbortOutcome.ABORTED
        bench.open()
        assert isinstance(await reading, RequestAborted)
        assert await bench.engine.abort("a") is AbortOutcome.ALREADY_FINISHED


async def test_aborting_unknown_or_finished_requests_is_not_found() -> None:
    async with serving() as bench:
        assert await bench.engine.abort("unknown") is AbortOutcome.NOT_FOUND
        assert await outcome_of(await bench.submit("a")) is None
        assert await bench.engine.abort("a") is AbortOutcome.ALREADY_FINISHED


async def test_finished_ids_are_remembered_up_to_a_bound() -> None:
    async with serving(options=replace(OPTIONS, num_remembered_requests=2)) as bench:
        for name in "abc":
            assert await outcome_of(await bench.submit(name)) is None
        outcomes = [await bench.engine.abort(name) for name in "abc"]
    finished = AbortOutcome.ALREADY_FINISHED
    assert outcomes == [AbortOutcome.NOT_FOUND, finished, finished]


async def test_a_submitter_that_is_cancelled_leaves_nothing() -> None:
    async with serving(gated=True) as bench:
        submitting = asyncio.ensure_future(bench.submit("a", max_tokens=1000))
        await asyncio.sleep(0)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        bench.open()
        await bench.engine.drain(grace_seconds=60.0)
        assert bench.scheduler.entries == {}


async def test_a_reader_that_leaves_ends_its_request_only() -> None:
    async with serving(gated=True) as bench:
        bench.allow(1)
        leaving, staying = await asyncio.gather(bench.submit("a", max_tokens=1000), bench.submit("b"))
        await anext(aiter(leaving))
        await leaving.aclose()
        await leaving.aclose()
        bench.open()
        assert await outcome_of(staying) is None
        await bench.engine.drain(grace_seconds=60.0)
        assert bench.scheduler.entries == {}
        assert not any(entry["event"] == "drain_aborts" for entry in bench.log)


async def test_many_cancellations_leave_nothing_behind() -> None:
    """Submit, read a little, and be cancelled at any await; the others read everything."""
    random = Random(3)
    async with serving() as bench:

        async def use(seed: int) -> str:
            stream = await bench.submit(f"r{seed}", max_tokens=20, seed=seed)
            try:
                return text_of_choice(await read_all(stream))
            finally:
                await stream.aclose()

        tasks = [asyncio.ensure_future(use(seed)) for seed in range(200)]
        doomed = set(random.sample(range(200), 150))
        for seed in random.sample(sorted(doomed), len(doomed)):
            for _ in range(random.randrange(4)):
                await asyncio.sleep(0)
            tasks[seed].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await bench.engine.drain(grace_seconds=60.0)
        assert bench.scheduler.entries == {}
    for seed, result in enumerate(results):
        if seed not in doomed:
            assert result == expected_text(seed, 20)
        else:
            assert isinstance(result, asyncio.CancelledError) or result == expected_text(seed, 20)


async def test_a_slow_reader_is_paused_and_resumed() -> None:
    async with serving() as bench:
        bench.in_lockstep()
        slow = await bench.submit("slow", max_tokens=40)
        # Another request keeps the loop at work, so that the pause is seen to hold.
        assert await outcome_of(await bench.submit("other", max_tokens=60, seed=1)) is None
        entry = bench.scheduler.entries["slow"]
        assert entry.is_paused
        assert entry.num_outputs[0] < 40
        events = await read_all(slow)
        assert text_of_choice(events) == expected_text(0, 40)


async def test_a_reader_that_sleeps_too_long_is_cancelled() -> None:
    async with serving() as bench:
        bench.in_lockstep()
        slow = await bench.submit("slow", max_tokens=1000)
        assert await outcome_of(await bench.submit("other", max_tokens=60)) is None
        for _ in range(2):  # its time, and the last of it
            bench.clock.advance(OPTIONS.slow_consumer_timeout_seconds + 1)
            assert await outcome_of(await bench.submit("another", max_tokens=60)) is None
        assert isinstance(await outcome_of(slow), SlowConsumer)


async def test_a_deadline_reaches_the_scheduler() -> None:
    async with serving(gated=True) as bench:
        bench.allow(1)
        request = GenerationRequest(PROMPT, SamplingParams(max_tokens=1000), deadline_seconds=3.0)
        stream = await bench.engine.submit(request)
        bench.clock.advance(3.0)
        bench.open()
        assert isinstance(await outcome_of(stream), DeadlineExceeded)


async def test_a_dying_engine_ends_every_stream() -> None:
    async with serving(gated=True) as bench:
        watching = asyncio.ensure_future(bench.engine.wait_for_health_change(EngineHealth.SERVING))
        bench.allow(1)
        streams = await asyncio.gather(*(bench.submit(max_tokens=100) for _ in range(8)))
        reading = [asyncio.ensure_future(outcome_of(stream)) for stream in streams]
        submitting = asyncio.ensure_future(bench.submit("late"))
        await asyncio.sleep(0)
        bench.scheduler.fault = AssertionError("our bug")
        bench.open()
        assert await watching is EngineHealth.DEAD
        for outcome in reading:
            assert isinstance(await outcome, EngineDead)
        with pytest.raises(EngineDead, match="our bug"):
            await submitting
        with pytest.raises(EngineDead):
            await bench.submit()
        assert await bench.engine.abort("late") is AbortOutcome.NOT_FOUND
        await asyncio.gather(*(stream.aclose() for stream in streams))
        assert [entry["event"] for entry in bench.log].count("engine_dead") == 1


async def test_a_failing_model_kills_the_engine_within_its_bound() -> None:
    async with serving(gated=True, options=replace(OPTIONS, max_consecutive_failures=2)) as bench:
        bench.allow(2)
        streams = await asyncio.gather(*(bench.submit(max_tokens=1000) for _ in range(8)))
        bench.model.fail_in["forward"] = RuntimeError("broken")
        bench.open()
        errors = [type(await outcome_of(stream)) for stream in streams]
        assert Counter(errors) == {StepFailed: 1, EngineDead: 7}
        assert bench.engine.health is EngineHealth.DEAD


class ThreadOfDevice:
    """Remembers who adopted it."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def adopt_thread(self) -> None:
        self.threads.append(threading.current_thread().name)

    def synchronize(self) -> None: ...


async def test_the_engines_thread_adopts_the_device_once_before_it_computes() -> None:
    """What a device's current number is, and its current stream, each thread has of its own."""
    device = ThreadOfDevice()
    async with serving(device=device) as bench:
        stream = await bench.submit(max_tokens=4)
        assert device.threads == ["pageturner-engine"]
        assert await outcome_of(stream) is None
    assert device.threads == ["pageturner-engine"]


async def test_a_drain_lets_the_running_finish() -> None:
    async with serving(gated=True) as bench:
        bench.allow(1)
        stream = await bench.submit(max_tokens=4)
        draining = asyncio.ensure_future(bench.engine.drain(grace_seconds=60.0))
        assert await bench.engine.wait_for_health_change(EngineHealth.SERVING) is EngineHealth.DRAINING
        with pytest.raises(Draining):
            await bench.submit()
        bench.open()
        assert await outcome_of(stream) is None
        await draining


async def test_a_drain_without_grace_aborts_the_rest() -> None:
    async with serving(gated=True) as bench:
        bench.allow(1)
        stream = await bench.submit(max_tokens=1000)
        draining = asyncio.ensure_future(bench.engine.drain(grace_seconds=0.0))
        await bench.engine.wait_for_health_change(EngineHealth.SERVING)
        bench.open()
        await draining
        error = await outcome_of(stream)
        assert isinstance(error, Draining)
        assert "shutting down" in str(error)


async def test_closing_twice_and_at_once() -> None:
    async with serving() as bench:
        stream = await bench.submit(max_tokens=1000)
        await asyncio.gather(bench.engine.aclose(), bench.engine.aclose())
        await bench.engine.aclose()
        assert isinstance(await outcome_of(stream), Draining)
        with pytest.raises(Draining):
            await bench.submit()


async def test_a_close_does_not_wait_for_a_step_that_hangs() -> None:
    async with serving(gated=True, options=replace(OPTIONS, shutdown_seconds=0.01)) as bench:
        bench.allow(1)
        beginnings = bench.step_beginnings()
        stream = await bench.submit(max_tokens=1000)
        for _ in range(2):
            await beginnings.get()
        await bench.engine.aclose()
        assert bench.engine.health is EngineHealth.DEAD
        assert isinstance(await outcome_of(stream), EngineDead)


async def test_before_its_start_the_engine_refuses() -> None:
    async with serving() as bench:
        unstarted = AsyncEngine(
            bench.engine._engine,
            None,
            model=MODEL,
            server_info=SERVER,
            scheduler_options=SchedulerOptions(max_n=1),
            options=OPTIONS,
            clock=bench.clock,
            random=Random(0),
            logger=recording_logger()[0],
        )
        assert unstarted.health is EngineHealth.STARTING
        with pytest.raises(Loading, match="starting"):
            await unstarted.submit(GenerationRequest(PROMPT))
        await unstarted.aclose()


async def test_a_step_that_hangs_is_reported_and_its_return_too() -> None:
    async with serving(gated=True) as bench:
        beginnings = bench.step_beginnings()
        submitting = asyncio.ensure_future(bench.submit(max_tokens=2))
        await beginnings.get()
        bench.engine._watchdog.check()
        seen = [bench.engine.health]
        bench.clock.advance(OPTIONS.stall_seconds + 1)
        bench.engine._watchdog.check()
        bench.engine._watchdog.check()
        seen.append(bench.engine.health)
        assert [entry["event"] for entry in bench.log].count("engine_stalled") == 1
        bench.open()
        assert await outcome_of(await submitting) is None
        bench.engine._watchdog.check()
        seen.append(bench.engine.health)
        assert seen == [EngineHealth.SERVING, EngineHealth.STALLED, EngineHealth.SERVING]
        assert bench.engine._engine.metrics.snapshot().counters["engine_stalls_total"] == 1


async def test_the_condition_tells_why_a_step_that_hangs_takes_no_work() -> None:
    async with serving(gated=True) as bench:
        beginnings = bench.step_beginnings()
        submitting = asyncio.ensure_future(bench.submit(max_tokens=2))
        await beginnings.get()
        assert bench.engine.condition == Condition(EngineHealth.SERVING, "", 1, 0.0)
        bench.clock.advance(OPTIONS.stall_seconds + 1)
        bench.engine._watchdog.check()
        bench.clock.advance(4)
        now = bench.engine.condition
        assert now == Condition(EngineHealth.STALLED, "the step under way has taken 65 s", 1, 65.0)
        assert (now.is_ready, now.is_alive) == (False, True)
        bench.open()
        assert await outcome_of(await submitting) is None


async def test_requests_that_no_step_takes_up_are_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost wake-up: the thread sleeps, though a request waits for its second step."""
    loop, asleep = asyncio.get_running_loop(), asyncio.Event()

    def for_ever() -> None:
        loop.call_soon_threadsafe(asleep.set)

    async with serving() as bench:
        with monkeypatch.context() as patch:
            patch.setattr(bench.engine._engine, "seconds_to_next_step", for_ever)
            stream = await bench.submit(max_tokens=2)
            await asleep.wait()
            bench.engine._watchdog.check()
            bench.clock.advance(OPTIONS.stall_seconds + 1)
            bench.engine._watchdog.check()
            now = bench.engine.condition
        assert now.health is EngineHealth.STALLED
        assert now.reason == "no step has begun for 61 s, though requests wait for one"
        bench.engine._send(Resume("nobody"))  # what wakes it
        assert await outcome_of(stream) is None
        bench.engine._watchdog.check()
        assert bench.engine.condition.is_ready


async def test_a_request_whose_reader_lags_is_no_work_that_waits() -> None:
    options = replace(OPTIONS, slow_consumer_timeout_seconds=1000.0)
    async with serving(gated=True, options=options) as bench:
        submitting = asyncio.ensure_future(bench.submit(max_tokens=20))
        bench.allow(1)
        stream = await submitting
        assert isinstance(stream, BufferedStream)
        # A loop that is busy has tokens wait for it: no step may run ahead of what the reader is given.
        for num_tokens in range(1, OPTIONS.stream_buffer_tokens + 1):
            while stream.num_buffered_tokens < num_tokens:  # noqa: ASYNC110  # no event
                await asyncio.sleep(0)
            bench.allow(1)
        thread = bench.engine._thread
        assert thread is not None
        while bench.engine._live.has_work() or thread.busy_since is not None:  # noqa: ASYNC110  # no event
            await asyncio.sleep(0)
        bench.engine._watchdog.check()
        bench.clock.advance(OPTIONS.stall_seconds + 1)
        bench.engine._watchdog.check()
        assert bench.engine.condition == Condition(EngineHealth.SERVING, "", 1, 0.0)
        await stream.aclose()


async def test_an_engine_that_hangs_for_too_long_is_given_up() -> None:
    options = replace(OPTIONS, dead_after_seconds=120.0)
    async with serving(gated=True, options=options) as bench:
        beginnings = bench.step_beginnings()
        submitting = asyncio.ensure_future(bench.submit(max_tokens=2))
        await beginnings.get()
        bench.clock.advance(119)
        bench.engine._watchdog.check()
        assert bench.engine.condition.is_alive
        bench.clock.advance(2)
        bench.engine._watchdog.check()
        now = bench.engine.condition
        assert (now.is_ready, now.is_alive) == (False, False)
        assert now.reason == "the step under way has taken 121 s, and engine.dead_after_seconds is 120"
        assert isinstance(await outcome_of(await submitting), EngineDead)


async def test_the_engine_logs_no_prompt() -> None:
    async with serving(options=OPTIONS) as bench:
        stream = await bench.engine.submit(
            GenerationRequest("The secret fox", SamplingParams(max_tokens=1), request_id="mine")
        )
        await read_all(stream)
    assert "secret" not in str(bench.log)
    (entry,) = [entry for entry in bench.log if entry["event"] == "finished"]
    assert entry["request_id"] == "mine"
    assert entry["num_output_tokens"] == 1


async def test_what_runs_here() -> None:
    async with serving() as bench:
        assert bench.engine.models() == (MODEL,)
        assert [info.axis for info in bench.engine.policies().axes] == list(AXES)
        bench.clock.advance(2.5)
        assert bench.engine.server_info() == replace(SERVER, uptime_seconds=2.5)
        assert await outcome_of(await bench.submit()) is None
        assert bench.engine.load().num_blocks_used == 0
        assert bench.engine.load().num_steps_total > 0
        assert bench.engine._engine.metrics.snapshot().requests_finished_total == {"ok": 1}


actions = st.sampled_from(["submit", "read", "leave", "abort", "cancel", "yield", "allow", "poison"])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(actions, st.integers(0, 5)), max_size=30))
def test_every_stream_ends_exactly_once_under_any_sequence_of_calls(script: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        async with serving(gated=True, max_requests=4) as bench:
            streams: dict[str, RequestStream] = {}
            submitting: dict[str, asyncio.Task[RequestStream]] = {}
            reading: list[asyncio.Task[PageturnerError | None]] = []
            number = itertools.count()
            for action, argument in script:
                name = str(argument)
                for key, task in list(submitting.items()):
                    if task.done() and not task.cancelled() and task.exception() is None:
                        streams[key] = task.result()
                match action:
                    case "submit":
                        task = asyncio.ensure_future(bench.submit(name, max_tokens=1 + 5 * argument))
                        submitting[f"{name}/{next(number)}"] = task
                    case "cancel" if submitting:
                        list(submitting.values())[argument % len(submitting)].cancel()
                    case "read" if streams:
                        key = list(streams)[argument % len(streams)]
                        reading.append(asyncio.ensure_future(outcome_of(streams.pop(key))))
                        submitting.pop(key)
                    case "leave" if streams:
                        key = list(streams)[argument % len(streams)]
                        await streams.pop(key).aclose()
                        submitting.pop(key)
                    case "abort":
                        await bench.engine.abort(name)
                    case "poison":
                        bench.model.poison.add(name)
                    case "allow":
                        bench.allow(1 + argument)
                    case _:
                        await asyncio.sleep(0)
            bench.open()
            for result in await asyncio.gather(*submitting.values(), return_exceptions=True):
                if isinstance(result, BaseException):
                    assert isinstance(result, PageturnerError | asyncio.CancelledError)
                else:
                    reading.append(asyncio.ensure_future(outcome_of(result)))
            await asyncio.gather(*reading)
            await bench.engine.drain(grace_seconds=60.0)
            assert bench.scheduler.entries == {}
            assert not any(entry["event"] in ("drain_aborts", "engine_dead") for entry in bench.log)

    asyncio.run(scenario())
