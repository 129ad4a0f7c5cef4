"""The engine behind asyncio: a request from its start to its end, whoever asks and whoever leaves."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine_bench import (
    MODEL,
    OPTIONS,
    PROMPT,
    SERVER,
    expected_text,
    outcome_of,
    read_all,
    serving,
    text_of_choice,
)

from pageturner.policies.interfaces import AXES
from pageturner.service.core.outputs import ChoiceFinishedEvent, FinishedEvent
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.engine.api import (
    AbortOutcome,
    AcceptedEvent,
    ChatMessage,
    EngineClient,
    GenerationRequest,
    RequestStream,
)
from pageturner.service.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    InvalidArgument,
    ModelNotFound,
    PageturnerError,
    QueueFull,
    RequestAborted,
    SlowConsumer,
)


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
