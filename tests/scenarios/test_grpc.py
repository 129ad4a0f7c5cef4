"""The wire over the real engine: what the RPC tests with their scripted engine cannot show.

Lines of this chapter that those tests hold already are named in coverage.py. Each test says which guard it
leans on: without that guard it fails.
"""

from __future__ import annotations

import asyncio
import gc
from contextlib import aclosing

import psutil  # type: ignore[import-untyped]  # has no types
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.fake_model import Stop, expected_tokens
from support.patience import PATIENCE_SECONDS
from support.real_service import ENGINE_OPTIONS, TOKENIZER, RealService, real_service

from pageturner.service.client import AcceptedEvent, ChoiceFinishedEvent, Completion, StreamEvent, TokenEvent
from pageturner.service.core.outputs import FinishReason
from pageturner.service.engine.options import EngineOptions
from pageturner.service.errors import PageturnerError, QueueFull, RequestAborted

CALLS = ("Generate", "GenerateStream")


async def call(
    service: RealService, kind: str, *, request_id: str = "", n: int = 1, max_tokens: int = 40
) -> None:
    if kind == "Generate":
        await service.client.generate((1,) * 6, request_id=request_id, n=n, max_tokens=max_tokens)
    else:
        stream = service.client.stream((1,) * 6, request_id=request_id, n=n, max_tokens=max_tokens)
        _ = [item async for item in stream]


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("n", [1, 3])
async def test_vllm_54947_14326_after_a_cancel_the_blocks_are_back_within_a_step(kind: str, n: int) -> None:
    """The step under way ends, and then nothing more is computed for the request or any of its choices.

    Leans on the handler's finally, and on the abort being obeyed before the next step.
    """
    async with real_service(num_blocks=48) as service:
        service.hold_steps()
        task = asyncio.create_task(call(service, kind, n=n))
        await service.run_steps(3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await service.until(lambda: service.num_handled("CANCELLED") == 1)
        service.allow_steps(1)
        await service.until_idle()
        assert service.model.num_forwards <= 4, "no step after the one under way"
        service.release_steps()
        await call(service, kind, max_tokens=2)


@pytest.mark.parametrize("kind", CALLS)
async def test_sglang_36475_an_abort_at_any_phase_leaves_other_requests_unchanged(kind: str) -> None:
    """By id, after each number of steps, in a pool far too small; a neighbour's tokens stay its own.

    Leans on aborts being commands between steps, and on late results being dropped.
    """
    async with real_service(num_blocks=12, num_host_blocks=6) as service:
        for phase in range(12):
            service.hold_steps()
            doomed = asyncio.create_task(call(service, kind, request_id=f"doomed{phase}", n=2, max_tokens=15))
            neighbour = asyncio.create_task(service.client.generate((2,) * 5, max_tokens=20, seed=phase))
            await service.until(lambda: service.num_live == 2)
            await service.run_steps(phase)
            await service.client.abort(f"doomed{phase}")
            service.release_steps()
            answer = await neighbour
            tokens = [token.token_id for token in answer.choices[0].tokens]
            assert tokens == expected_tokens((2,) * 5, phase, 0, Stop(20))
            with pytest.raises(RequestAborted):
                await doomed
        await service.until_idle()


async def test_grpc_43360_34843_resident_memory_does_not_grow_with_cancelled_streams() -> None:
    """A soak: streams that are left in the middle, in three equal parts; the last part adds nothing.

    Leans on nothing outliving its call. A stream that is kept holds 130 kB of its stop strings.
    """
    prompt = (1,) * 60
    process = psutil.Process()
    async with real_service(num_blocks=64) as service:

        async def leave(number: int) -> None:
            stop = [f"{letter}{number}" * 200 for letter in "abcdefghijklmn"]
            stream = service.client.stream(prompt, request_id=f"r{number}", max_tokens=4, stop=stop)
            async with aclosing(stream) as items:
                assert isinstance(await anext(items), AcceptedEvent)

        resident = []
        for part in range(3):
            for first in range(0, 100, 20):
                await asyncio.gather(*(leave(1000 * part + first + i) for i in range(20)))
            await service.until_idle()
            gc.collect()
            resident.append(process.memory_info().rss)
        assert resident[2] - resident[1] < 8 << 20, resident


@pytest.mark.slow
@pytest.mark.fault("S")
async def test_resident_memory_does_not_grow_with_long_texts_and_refusals() -> None:
    """A soak in four equal parts: texts read in threads, streams left, prompts refused; the last adds none.

    Leans on bounded caches: of words in `tokenizers`, of cached blocks, of finished ids.
    """
    process = psutil.Process()
    async with real_service(
        num_blocks=64, block_size=16, max_model_len=900, max_num_batched_tokens=512
    ) as service:

        async def churn(number: int) -> None:
            text = " ".join(f"word{(number * 7919 + i) % 100_003}" for i in range(300))
            await service.client.tokenize(text)
            with pytest.raises(PageturnerError):
                await service.client.generate(text * 40)
            with pytest.raises(PageturnerError):
                await service.client.generate((1,) * 100_000)
            stream = service.client.stream(text[:600], request_id=f"r{number}", max_tokens=4)
            async with aclosing(stream) as items:
                assert isinstance(await anext(items), AcceptedEvent)

        resident = []
        for part in range(4):
            for first in range(0, 100, 10):
                await asyncio.gather(*(churn(1000 * part + first + i) for i in range(10)))
            await service.until_idle()
            gc.collect()
            resident.append(process.memory_info().rss)
        assert resident[3] - resident[2] < 8 << 20, resident


@pytest.mark.parametrize(
    ("max_waiting", "max_queued_tokens", "num_refused"), [(3, 99, 2), (99, 12, 2), (99, 1, 4), (99, 99, 0)]
)
async def test_grpc_41531_the_bounds_are_our_own(
    max_waiting: int, max_queued_tokens: int, num_refused: int
) -> None:
    """On requests that wait and on their tokens: over either, a refusal at once, while probes are answered.

    Leans on max_waiting and max_queued_tokens; no bound of gRPC's server is set.
    """
    async with real_service(
        max_num_seqs=1, max_waiting=max_waiting, max_queued_tokens=max_queued_tokens
    ) as service:
        service.hold_steps()
        running = asyncio.create_task(service.client.generate((1,) * 4, max_tokens=8))
        await service.run_steps(1)
        tasks = [asyncio.create_task(service.client.generate((2,) * 4, max_tokens=1)) for _ in range(5)]
        await service.until(lambda: service.num_live == 6 - num_refused)
        await service.until(lambda: service.num_handled("RESOURCE_EXHAUSTED") == num_refused)
        health = health_pb2_grpc.HealthStub(service.channel)  # type: ignore[no-untyped-call] # has no types
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        service.release_steps()
        answers = await asyncio.gather(running, *tasks, return_exceptions=True)
        refusals = [answer for answer in answers if not isinstance(answer, Completion)]
        assert len(refusals) == num_refused
        for error in refusals:
            assert isinstance(error, QueueFull)
            assert error.retry_after_seconds > 0
        await service.until_idle()


async def test_vllm_1629_the_engine_is_off_the_loop() -> None:
    """A step that does not end: health, load and refusals are answered all the same.

    Leans on the engine's thread.
    """
    async with real_service() as service:
        service.hold_steps()
        hanging = asyncio.create_task(service.client.generate((1,) * 4, max_tokens=2))
        health = health_pb2_grpc.HealthStub(service.channel)  # type: ignore[no-untyped-call] # has no types
        await service.until(lambda: service.num_live == 1)
        for _ in range(20):
            await health.Check(health_pb2.HealthCheckRequest())
            await service.client.load()
            assert await service.client.tokenize("the quick")
        assert service.model.num_forwards == 0
        service.release_steps()
        await hanging


async def read(service: RealService, **options: object) -> list[StreamEvent]:
    stream = service.client.stream((1,), **options)  # type: ignore[arg-type]  # options of the client by name
    return [item async for item in stream]


def text_of(items: list[StreamEvent]) -> str:
    return "".join(item.text for item in items if isinstance(item, TokenEvent))


TEXTS = ["日本語のテキスト", "👩‍👩‍👧‍👦🏳️‍🌈 😀👍🏽", "naïve café — Ångström", "plain words"]


@pytest.mark.parametrize("text", TEXTS)
async def test_exo_1691_a_character_over_several_tokens_is_never_shown_in_part(text: str) -> None:
    """No U+FFFD in any delta; joined they are the whole decode, and so is the unary answer.

    Leans on the incremental decoder holding back what is not yet a character.
    """
    async with real_service() as service:
        service.model.script = TOKENIZER.encode(text)
        count = len(service.model.script)
        items = await read(service, max_tokens=count, ignore_eos=True)
        deltas = [item.text for item in items if isinstance(item, TokenEvent)]
        assert not any("\ufffd" in delta for delta in deltas)
        assert text_of(items) == TOKENIZER.decode(service.model.script) == text
        assert (await service.client.generate((1,), max_tokens=count, ignore_eos=True)).text == text


STOPS = [("quick brown", "The "), (" fox", "The quick brown"), ("T", ""), ("xyz", None), ("lazy dogs", None)]


@pytest.mark.parametrize(("stop", "before"), STOPS)
async def test_text_generation_inference_1254_smg_2203_stops_over_chunks(
    stop: str, before: str | None
) -> None:
    """A stop over several chunks shows nothing of itself; what cannot become one is not withheld.

    Leans on StopMatcher holding back the longest end that is a proper prefix of a stop, and no more.
    """
    sentence = "The quick brown fox jumps over the lazy dog"
    async with real_service() as service:
        service.model.script = TOKENIZER.encode(sentence)
        service.hold_steps()
        count = len(service.model.script)
        task = asyncio.create_task(read(service, max_tokens=count, stop=[stop], ignore_eos=True))
        service.release_steps()
        items = await task
        assert text_of(items) == (sentence if before is None else before)
        (end,) = [item for item in items if isinstance(item, ChoiceFinishedEvent)]
        assert end.reason is (FinishReason.LENGTH if before is None else FinishReason.STOP)
        assert end.matched == (None if before is None else stop)


def longest_start_of(stop: str, text: str) -> int:
    """Characters at the end of `text` that may yet become `stop`."""
    return next(n for n in range(len(stop) - 1, -1, -1) if text.endswith(stop[:n]))


@pytest.mark.parametrize("first", ["z", "e", "q", " ", "quick", "The quick brow"])
async def test_smg_2203_nothing_is_delayed_that_cannot_become_a_stop(first: str) -> None:
    """A stop of fifty characters, of which `first` occurs: at every step all is shown that is certain.

    Leans on the held-back end being found, not a window of fixed length.
    """
    stop = first + "z" * 50
    async with real_service() as service:
        script = service.model.script = TOKENIZER.encode("The quick brown fox")
        service.hold_steps()
        stream = service.client.stream((1,), max_tokens=len(script), stop=[stop], ignore_eos=True)
        async with aclosing(stream) as items:
            service.allow_steps(1)
            assert isinstance(await anext(items), AcceptedEvent)
            shown = ""
            for count in range(1, len(script)):
                item = await anext(items)
                assert isinstance(item, TokenEvent)
                shown += item.text
                whole = TOKENIZER.decode(script[:count])
                assert shown == whole[: len(whole) - longest_start_of(stop, whole)]
                service.allow_steps(1)
            service.release_steps()
            shown += text_of([item async for item in items])
            assert shown == "The quick brown fox"


async def test_sglang_11387_health_follows_the_engines_heartbeat() -> None:
    """The step hangs: NOT_SERVING, and SERVING again when it returns; a process that answers is not enough.

    Leans on Watchdog.check.
    """
    options = EngineOptions(stall_seconds=0.001, max_empty_schedules=ENGINE_OPTIONS.max_empty_schedules)
    async with real_service(engine_options=options) as service:
        health = health_pb2_grpc.HealthStub(service.channel)  # type: ignore[no-untyped-call] # has no types

        async def until(status: int) -> None:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    service.engine._watchdog.check()
                    if (await health.Check(health_pb2.HealthCheckRequest())).status == status:
                        return

        await until(health_pb2.HealthCheckResponse.SERVING)
        service.hold_steps()
        hanging = asyncio.create_task(service.client.generate((1,) * 4, max_tokens=1))
        await until(health_pb2.HealthCheckResponse.NOT_SERVING)
        service.release_steps()
        await hanging
        await until(health_pb2.HealthCheckResponse.SERVING)


async def test_lmcache_4185_late_events_for_an_aborted_id_are_dropped() -> None:
    """Aborted twice while its step is under way, and once more when it is gone.

    Leans on abort_request, pause and resume taking unknown ids, and on results being matched by sequence.
    """
    async with real_service() as service:
        service.hold_steps()
        task = asyncio.create_task(call(service, "Generate", request_id="a"))
        await service.run_steps(2)
        await service.client.abort("a", "a", "never there")
        service.release_steps()
        with pytest.raises(RequestAborted):
            await task
        await service.client.abort("a")
        await service.until_idle()
        await call(service, "Generate", request_id="a", max_tokens=2)
