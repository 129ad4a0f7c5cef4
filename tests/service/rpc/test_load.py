"""GetLoad shows the moment, and what it shows is asked before a prompt is read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.fake_engine import FakeEngine
from support.real_service import RealService, real_service
from support.serving import serving

from pageturner.service.engine.api import (
    AcceptedEvent,
    ChatMessage,
    EngineHealth,
    GenerationRequest,
    Prompt,
    RecentLoad,
)
from pageturner.service.engine.prompt_limits import InputLimits, PromptLimits
from pageturner.service.errors import DeadlineTooClose, InvalidArgument, QueueFull
from pageturner.service.rpc import from_wire
from pageturner.service.rpc.options import ServerOptions
from pageturner.service.rpc.status import UnknownStatus
from pageturner.v1 import admin_pb2
from pageturner.v1.admin_pb2_grpc import AdminServiceStub


async def _counts(service: RealService) -> tuple[int, int]:
    load = await service.client.load()
    return load.num_waiting, load.num_running


async def test_load_tells_what_the_process_takes() -> None:
    async with real_service() as service:
        stub = AdminServiceStub(service.channel)
        told = await stub.GetLoad(admin_pb2.GetLoadRequest())
        watched = [await anext(aiter(stub.WatchLoad(admin_pb2.WatchLoadRequest())))]
    for process in (told.process, watched[0].process):
        assert process.cpu_seconds_total > 0
        assert process.resident_bytes > 1 << 20


async def test_load_tells_a_balancer_how_busy_the_server_is_and_whether_it_takes_work() -> None:
    async with real_service() as service:
        stub = AdminServiceStub(service.channel)
        service.hold_steps()
        call = _generate(service, "a", max_tokens=2)
        await service.until(lambda: service.num_live == 1)
        load = (await stub.GetLoad(admin_pb2.GetLoadRequest())).load
        assert (load.is_ready, load.is_draining, load.not_ready_reason) == (True, False, "")
        assert (load.num_live, load.max_running_sequences) == (1, 8)
        assert load.kv_cache_usage == load.num_blocks_used / 16 > 0
        service.engine._health.become(EngineHealth.STALLED)
        load = (await stub.GetLoad(admin_pb2.GetLoadRequest())).load
        assert not load.is_ready
        assert load.not_ready_reason.startswith("the step under way has taken")
        service.engine._health.become(EngineHealth.SERVING)
        service.release_steps()
        await call


async def test_load_tells_what_came_and_went_of_late() -> None:
    engine = FakeEngine()
    engine.recent = RecentLoad(100.0, 50.0, 3.0, 0.5)
    async with serving(engine) as served:
        load = (await AdminServiceStub(served.channel).GetLoad(admin_pb2.GetLoadRequest())).load
    assert (load.generation_tokens_per_second, load.prompt_tokens_per_second) == (100.0, 50.0)
    assert (load.requests_per_second, load.faults_per_second) == (3.0, 0.5)


def _generate(service: RealService, request_id: str, **options: Any) -> asyncio.Task[Any]:
    call = service.client.generate("x", request_id=request_id, **options)
    return asyncio.create_task(call)


@pytest.mark.fault("C")
async def test_load_counts_a_request_from_its_acceptance_on_and_not_after_its_end() -> None:
    async with real_service(max_num_seqs=2) as service:
        service.hold_steps()
        streams = [service.client.stream("x", request_id=name, max_tokens=2) for name in "abc"]
        assert isinstance(await anext(streams[0]), AcceptedEvent), "before the step that computes it"
        assert await _counts(service) == (0, 1)
        others = [asyncio.create_task(anext(stream)) for stream in streams[1:]]
        await service.until(lambda: service.num_live == 3)
        assert await _counts(service) == (2, 1), "on their way to the scheduler, they wait"
        await service.run_steps(1)
        assert {type(event) for event in await asyncio.gather(*others)} == {AcceptedEvent}
        assert await _counts(service) == (1, 2)
        service.release_steps()
        for stream in streams:
            _ = [item async for item in stream]
        assert await _counts(service) == (0, 0)


@pytest.mark.fault("C")
async def test_load_tells_prompt_tokens_that_wait_for_the_step_under_way() -> None:
    async with real_service() as service:
        service.hold_steps()
        first = _generate(service, "a", max_tokens=1)
        await service.until(lambda: service.num_live == 1)
        await service.client.load()
        second = asyncio.create_task(service.client.generate((1, 2, 3, 4), max_tokens=1))
        await service.until(lambda: service.num_live == 2)
        load = await service.client.load()
        assert load.num_queued_prompt_tokens == 4
        service.release_steps()
        await asyncio.gather(first, second)


@pytest.mark.fault("F", "Q")
async def test_a_full_queue_refuses_before_the_prompt_is_read_and_without_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with real_service(max_num_seqs=1, max_waiting=1) as service:
        service.hold_steps()
        running = _generate(service, "a", max_tokens=1)
        await service.until(lambda: service.engine.load().num_running == 1)
        waiting = _generate(service, "b", max_tokens=1)
        await service.until(lambda: service.num_live == 2)

        async def read(prompt: object) -> tuple[int, ...]:
            raise AssertionError("the prompt was read")

        with monkeypatch.context() as patch:
            patch.setattr(service.engine._prompts, "encode", read)
            with pytest.raises(QueueFull, match="1 requests are waiting already"):
                await service.client.generate("x")
        service.release_steps()
        await asyncio.gather(running, waiting)


@pytest.mark.fault("F")
async def test_queued_tokens_are_counted_before_the_prompt_is_read() -> None:
    async with real_service(max_num_seqs=1, max_queued_tokens=10) as service:
        service.hold_steps()
        running = _generate(service, "a", max_tokens=1)
        await service.until(lambda: service.engine.load().num_running == 1)
        waiting = asyncio.create_task(service.client.generate((1,) * 8, max_tokens=1))
        await service.until(lambda: service.num_live == 2)
        with pytest.raises(QueueFull, match="11 prompt tokens would be waiting"):
            await service.client.generate((1,) * 3)
        service.release_steps()
        await asyncio.gather(running, waiting)


async def test_a_deadline_that_the_queue_leaves_no_time_for_is_refused_without_a_step() -> None:
    async with real_service(max_num_seqs=1) as service:
        service.hold_steps()
        running = _generate(service, "a", max_tokens=3)
        await service.until(lambda: service.engine.load().num_running == 1)
        waiting = asyncio.create_task(service.client.generate((1,) * 40, max_tokens=2))
        await service.until(lambda: service.num_live == 2)
        await service.run_steps(1)
        await service.until(lambda: service.engine.load().outlook.is_full)
        load = await service.client.load()
        assert load.queue_seconds == service.engine.load().queue_seconds > 0.05
        assert load.drain_tokens_per_second > 0
        with pytest.raises(DeadlineTooClose) as caught:
            await service.engine.submit(GenerationRequest((1,), deadline_seconds=0.05))
        assert caught.value.retry_after_seconds > 0
        assert service.metrics.snapshot().requests_refused_total == {"deadline_too_close": 1}
        service.release_steps()
        await asyncio.gather(running, waiting)


TIGHT = PromptLimits(max_tokens=8, max_characters=30, max_messages=4)


@pytest.mark.fault("O")
@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("x" * 31, "prompt.text"),
        ((1,) * 9, "prompt.token_ids.ids"),
        ((ChatMessage("user", "x"),) * 5, "prompt.chat.messages"),
    ],
    ids=["text", "ids", "turns"],
)
async def test_a_prompt_over_the_limits_is_refused_before_the_engine_sees_it(
    prompt: Prompt, field: str
) -> None:
    engine = FakeEngine()
    engine.input_limits = InputLimits(TIGHT, TIGHT)
    async with serving(engine) as served:
        for call in (served.client.generate(prompt), served.client.tokenize(prompt)):
            with pytest.raises(InvalidArgument) as caught:
                await call
            assert caught.value.field == field
        with pytest.raises(InvalidArgument, match="token_ids: 9 tokens"):
            await served.client.detokenize((1,) * 9)
    assert engine.requests == []


class Counted(tuple[int, ...]):
    """Ids that refuse to be walked."""

    def __iter__(self) -> Any:
        raise AssertionError("copied before its length was asked")


@pytest.mark.fault("O")
def test_ids_and_turns_are_counted_before_they_are_copied() -> None:
    class Message:
        def __init__(self, form: str) -> None:
            self.form = form
            self.token_ids = self.chat = self
            self.ids = self.messages = Counted((1,) * 9)

        def WhichOneof(self, name: str) -> str:  # noqa: N802  # protobuf's name
            return self.form

    for form in ("token_ids", "chat"):
        message: Any = Message(form)
        with pytest.raises(InvalidArgument, match=f"prompt.{form}"):
            from_wire.to_prompt(message, TIGHT)


@pytest.mark.fault("O")
async def test_a_message_too_large_to_be_parsed_in_passing_is_refused_unparsed() -> None:
    """500,000 axes, 2.5 million empty turns, texts of 15 MB: gRPC drops the bytes."""
    assert ServerOptions().max_request_bytes == 2 << 20
    engine = FakeEngine()
    async with serving(engine) as served:
        with pytest.raises(UnknownStatus, match=str(2 << 20)) as caught:
            await served.client.generate("x" * (2 << 20))
        assert caught.value.code == "RESOURCE_EXHAUSTED"
    assert engine.requests == []
