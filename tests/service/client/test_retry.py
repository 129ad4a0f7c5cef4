"""When and where a call is tried again, on an injected clock."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from support.fake_engine import DRAWN_SEED, FakeEngine, Script, Step, accepted, echo, finished
from support.fake_server import delta, serve
from support.serving import serving

from pageturner.service.client import (
    NEVER,
    AcceptedEvent,
    Client,
    FinishedEvent,
    Retried,
    Retry,
    SyncClient,
    TokenEvent,
)
from pageturner.service.client.retry import Attempts
from pageturner.service.core.clock import ManualClock
from pageturner.service.core.outputs import ChoiceFinishedEvent, FinishReason, SampledToken
from pageturner.service.engine.api import AbortOutcome, EngineHealth, GenerationRequest
from pageturner.service.errors import (
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    EngineDead,
    InvalidArgument,
    Loading,
    NotResumable,
    PageturnerError,
    QueueFull,
    RequestAborted,
    SlowConsumer,
    StepFailed,
)
from pageturner.service.rpc.status import UnknownStatus
from pageturner.v1 import generation_pb2

AWAY = UnknownStatus("UNAVAILABLE", "connection refused")


def attempts(num_servers: int, left: float | None = None, **retry: Any) -> Attempts:
    return Attempts(Retry(**retry), 0, num_servers, lambda: 1.0, lambda: left)


def test_servers_are_asked_in_turn_and_waited_for_after_each_round() -> None:
    tries = attempts(3, max_attempts=8, first_wait_seconds=0.1, longest_wait_seconds=0.15)
    waits = [(tries.after(AWAY), tries.server) for _ in range(7)]
    assert waits == [(0.0, 1), (0.0, 2), (0.1, 0), (0.0, 1), (0.0, 2), (0.15, 0), (0.0, 1)]
    assert tries.after(AWAY) is None


def test_waits_differ_from_client_to_client_and_start_small_again_after_a_word() -> None:
    def first_waits(draw: float) -> list[float | None]:
        tries = Attempts(Retry(first_wait_seconds=1.0), 0, 1, lambda: draw)
        waits = [tries.after(AWAY), tries.after(AWAY)]
        tries.succeed()
        return [*waits, tries.after(AWAY)]

    assert first_waits(0.0) == [0.5, 1.0, 0.5]
    assert first_waits(0.5) == [0.75, 1.5, 0.75]


def test_waits_stay_at_the_longest_however_often_a_call_is_tried() -> None:
    tries = attempts(1, max_attempts=3000, first_wait_seconds=0.1, longest_wait_seconds=3.0)
    waits = [tries.after(AWAY) for _ in range(2999)]  # 2.0**1024 is no float
    assert set(waits[5:]) == {3.0}


def test_no_wait_at_all_may_be_wanted() -> None:
    tries = attempts(1, first_wait_seconds=0.0, longest_wait_seconds=0.0)
    assert [tries.after(AWAY) for _ in range(3)] == [0.0] * 3


@pytest.mark.parametrize("error", [AWAY, Loading("x"), Draining("x"), EngineDead("x"), QueueFull("x", 0.0)])
def test_what_may_pass_is_tried_again(error: PageturnerError) -> None:
    assert attempts(1).after(error) is not None
    assert attempts(1, max_attempts=1).after(error) is None


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("n", "0"),
        RequestAborted("x"),
        SlowConsumer("x"),
        StepFailed("x"),
        DeadlineExceeded("x"),
        DuplicateRequest("r"),
        UnknownStatus("CANCELLED", "the client was closed"),
        UnknownStatus("INTERNAL", "a bug"),
    ],
)
def test_what_will_not_pass_is_not_tried_again(error: PageturnerError) -> None:
    assert attempts(2).after(error) is None


@pytest.mark.parametrize(
    "text",
    [
        "UNKNOWN: Stream removed",
        "INTERNAL: Received RST_STREAM with code 2",
        "INTERNAL: The actor died unexpectedly before finishing this task.\n\tclass_name: ServeReplica",
        "CANCELLED: CANCELLED",
    ],
)
def test_a_lost_connection_is_known_by_whichever_name_it_has(text: str) -> None:
    code, _, details = text.partition(": ")
    assert attempts(1).after(UnknownStatus(code, details)) is not None


def test_the_soonest_that_a_server_of_the_round_names_is_waited_for() -> None:
    tries = attempts(2, first_wait_seconds=0.1)
    assert tries.after(QueueFull("full", 8.0)) == 0.0
    assert tries.after(QueueFull("full", 4.0)) == 5.0, "4 s, and up to a quarter more"
    assert tries.after(QueueFull("full", 8.0)) == 0.0
    assert tries.after(AWAY) == 0.2, "the other one may be back before"


def test_a_wait_that_outlasts_the_call_or_the_bound_is_not_begun() -> None:
    assert attempts(1, left=3.0).after(QueueFull("full", 4.0)) is None
    assert attempts(1, left=6.0).after(QueueFull("full", 4.0)) == 5.0
    assert attempts(1, longest_hint_seconds=3.0).after(QueueFull("full", 4.0)) is None


def test_a_server_where_other_things_hold_is_passed_over() -> None:
    tries = attempts(3)
    other = NotResumable("other kernels", "kernels")
    assert (tries.after(other), tries.server) == (0.0, 1)
    assert (tries.after(AWAY), tries.server) == (0.1, 2)
    assert (tries.after(AWAY), tries.server) == (0.0, 1), "0 is not asked again"
    assert tries.after(other) is not None
    assert tries.after(other) is None, "no server is left"


def test_an_id_in_use_is_waited_for_where_this_call_was_broken_off_before() -> None:
    tries = attempts(1)
    assert tries.after(AWAY) is not None
    assert tries.after(DuplicateRequest("r")) is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_attempts", 0), ("first_wait_seconds", -1.0), ("longest_wait_seconds", float("nan"))],
)
def test_bounds_that_make_no_sense_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Retry(**{field: value})
    assert caught.value.field == f"retry.{field}"


def test_what_a_retry_is_told_with_survives_pickling() -> None:
    told = Retried(NotResumable("other kernels", "kernels"), "a:1", 0.5, "r", is_resumed=True)
    again = pickle.loads(pickle.dumps(told))
    assert (again.target, again.error.differing, str(again.error)) == ("a:1", "kernels", "other kernels")


# --- against servers ----------------------------------------------------------------------------------


class Waits:
    """A sleep that moves a clock, and takes no time."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.told: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.told.append(seconds)
        self.clock.advance(seconds)

    async def asleep(self, seconds: float) -> None:
        self(seconds)


def refusing(*errors: Exception, then: Script = echo) -> Script:
    """Each of the first requests ends with an error in place of an answer."""
    left = list(errors)

    def script(request: GenerationRequest, ids: tuple[int, ...]) -> Any:
        return [left.pop(0)] if left else then(request, ids)

    return script


async def test_a_full_queue_is_waited_for_as_long_as_it_says() -> None:
    waits = Waits(ManualClock(0.0))
    engine = FakeEngine(refusing(QueueFull("full", 2.0), QueueFull("full", 1.0)))
    async with serving(engine) as served:
        client = Client(f"127.0.0.1:{served.port}", clock=waits.clock, sleep=waits.asleep, random=lambda: 0.0)
        async with client:
            assert (await client.generate("ab", max_tokens=2)).text == "ab"
            assert waits.told == [2.0, 1.0]
            engine.script = refusing(QueueFull("full", 9.0))
            with pytest.raises(QueueFull):
                await client.generate("ab", max_tokens=2, timeout_seconds=5.0)
            assert waits.told == [2.0, 1.0]


async def test_the_sync_client_waits_alike() -> None:
    waits = Waits(ManualClock(0.0))
    engine = FakeEngine(refusing(QueueFull("full", 2.0), Draining("going")))
    async with serving(engine) as served:
        client = SyncClient(f"127.0.0.1:{served.port}", clock=waits.clock, sleep=waits, random=lambda: 0.0)
        with client:
            answer = await asyncio.to_thread(client.generate, "ab", max_tokens=2)
    assert answer.text == "ab"
    assert waits.told == [2.0, 0.1]


async def test_calls_go_to_the_first_server_that_works_and_stay_with_it() -> None:
    waits = Waits(ManualClock(0.0))
    first, second = FakeEngine(), FakeEngine()
    first.set_health(EngineHealth.DRAINING)
    async with serving(first) as one, serving(second) as two:
        targets = ["127.0.0.1:1", f"127.0.0.1:{one.port}", f"127.0.0.1:{two.port}"]
        told: list[Retried] = []
        async with Client(targets, clock=waits.clock, sleep=waits.asleep, on_retry=told.append) as client:
            await client.generate("ab", max_tokens=1)
            assert waits.told == [0.0, 0.0]
            assert [retried.target for retried in told] == targets[1:]
            assert [type(retried.error) for retried in told] == [UnknownStatus, Draining]
            await client.generate("ab", max_tokens=1)
            assert len(told) == 2
            await client.wait_until_serving(5.0)
    assert len(second.requests) == 2


async def test_an_abort_reaches_every_server_and_says_what_the_one_that_had_it_says() -> None:
    first, second = FakeEngine(), FakeEngine()
    second.ended.add("r")
    async with serving(first) as one, serving(second) as two:
        targets = ["127.0.0.1:1", f"127.0.0.1:{one.port}", f"127.0.0.1:{two.port}"]
        async with Client(targets) as client:
            outcomes = await client.abort("r", "x")
        with SyncClient(targets) as sync_client:
            assert await asyncio.to_thread(sync_client.abort, "r", "x") == outcomes
    assert outcomes == {"r": AbortOutcome.ALREADY_FINISHED, "x": AbortOutcome.NOT_FOUND}


# --- answers that break off -------------------------------------------------------------------------


FINGERPRINT = "weights=w;prompt=p"


def resumable(*after: Exception, is_exact: bool = True) -> Script:
    """Five tokens; to who resumes, those that are missing. after: what ends the first requests, each behind
    two tokens."""
    endings = list(after)

    def script(request: GenerationRequest, ids: tuple[int, ...]) -> Any:
        known = 0 if request.resume is None else len(request.resume.choices[0].token_ids)
        start = AcceptedEvent(request.request_id, DRAWN_SEED, len(ids), 5, FINGERPRINT, is_exact)
        steps: list[Step] = [start]
        error = endings.pop(0) if endings else None
        for position in range(known, 5 if error is None else min(5, known + 2)):
            steps.append(one_token(request, position))
        if error is not None:
            return [*steps, error]
        ended = ChoiceFinishedEvent(request.request_id, 0, FinishReason.LENGTH)
        return [*steps, ended, finished(request, len(ids), 5)]

    return script


def one_token(request: GenerationRequest, position: int) -> TokenEvent:
    character = "abcde"[position]
    return TokenEvent(request.request_id, 0, (SampledToken(ord(character)),), character)


def text_of(events: list[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, TokenEvent))


async def read(client: Client, **options: Any) -> list[Any]:
    return [event async for event in client.stream("x", max_tokens=5, **options)]


async def test_an_answer_goes_on_where_it_broke_off() -> None:
    waits = Waits(ManualClock(0.0))
    first, second = FakeEngine(resumable(Draining("going"))), FakeEngine(resumable(EngineDead("dead")))
    async with serving(first) as one, serving(second) as two:
        targets = [f"127.0.0.1:{one.port}", f"127.0.0.1:{two.port}"]
        told: list[Retried] = []
        async with Client(targets, clock=waits.clock, sleep=waits.asleep, on_retry=told.append) as client:
            stream = client.stream("x", max_tokens=5)
            events = [event async for event in stream]
    assert text_of(events) == "abcde"
    assert [type(event) for event in events].count(AcceptedEvent) == 1
    assert isinstance(events[-1], FinishedEvent)
    assert len({event.request_id for event in events}) == 1
    assert (stream.num_resumes, stream.request_id) == (2, events[0].request_id)
    assert [(retried.is_resumed, retried.request_id) for retried in told] == [(True, stream.request_id)] * 2
    resume = second.requests[0].resume
    assert resume is not None
    assert (resume.seed, resume.fingerprint, resume.max_tokens) == (DRAWN_SEED, FINGERPRINT, 5)
    assert (resume.choices[0].token_ids, resume.choices[0].num_characters) == ((97, 98), 2)
    again = first.requests[1].resume
    assert again is not None
    assert again.choices[0].token_ids == (97, 98, 99, 100)


async def test_the_sync_client_goes_on_alike() -> None:
    engine = FakeEngine(resumable(Draining("going"), EngineDead("dead")))
    waits = Waits(ManualClock(0.0))
    async with serving(engine) as served:

        def read_all() -> tuple[list[Any], int]:
            client = SyncClient(f"127.0.0.1:{served.port}", clock=waits.clock, sleep=waits)
            with client, client.stream("x", max_tokens=5) as events:
                return list(events), events.num_resumes

        events, num_resumes = await asyncio.to_thread(read_all)
    assert (text_of(events), num_resumes) == ("abcde", 2)


@pytest.mark.parametrize(
    ("retry", "is_exact", "text"),
    [
        (Retry(), False, None),
        (Retry(allow_inexact=True), False, "abcde"),
        (Retry(resumes=False), True, None),
        (NEVER, True, None),
    ],
)
async def test_an_answer_goes_on_only_where_it_may(retry: Retry, is_exact: bool, text: str | None) -> None:
    engine = FakeEngine(resumable(Draining("going"), is_exact=is_exact))
    async with serving(engine) as served, Client(f"127.0.0.1:{served.port}", retry=retry) as client:
        if text is None:
            with pytest.raises(Draining):
                await read(client)
            assert len(engine.requests) == 1
        else:
            assert text_of(await read(client)) == text
            assert engine.requests[1].resume is not None
            assert engine.requests[1].resume.allow_inexact


async def test_a_server_of_before_that_names_no_fingerprint_is_not_asked_to_go_on() -> None:
    def script(request: GenerationRequest, ids: tuple[int, ...]) -> Any:
        return [accepted(request, ids), Draining("going")]

    engine = FakeEngine(script)
    async with serving(engine) as served, Client(f"127.0.0.1:{served.port}") as client:
        with pytest.raises(Draining):
            await read(client)
    assert len(engine.requests) == 1


async def test_the_request_that_a_server_still_holds_is_ended_there_first() -> None:
    """A half-open connection: the client has lost the server, the server not the client."""
    waits = Waits(ManualClock(0.0))
    plays = [resumable(Draining("going")), refusing(DuplicateRequest("mine")), resumable()]
    engine = FakeEngine(lambda request, ids: plays.pop(0)(request, ids))
    async with serving(engine) as served:
        target = f"127.0.0.1:{served.port}"
        async with Client(target, clock=waits.clock, sleep=waits.asleep) as client:
            assert text_of(await read(client, request_id="mine")) == "abcde"
    assert engine.aborts == ["mine"]
    assert [request.request_id for request in engine.requests] == ["mine"] * 3


async def test_an_id_that_another_request_has_is_an_error_and_ends_nothing() -> None:
    engine = FakeEngine(refusing(DuplicateRequest("theirs")))
    async with serving(engine) as served, Client(f"127.0.0.1:{served.port}") as client:
        with pytest.raises(DuplicateRequest):
            await read(client, request_id="theirs")
    assert engine.aborts == []


async def test_a_server_that_never_gets_further_ends_the_answer_with_its_error() -> None:
    waits = Waits(ManualClock(0.0))

    def stuck(request: GenerationRequest, ids: tuple[int, ...]) -> Any:
        return [AcceptedEvent(request.request_id, 1, 1, 5, FINGERPRINT, True), EngineDead("dead")]

    engine = FakeEngine(stuck)
    async with serving(engine) as served:
        target = f"127.0.0.1:{served.port}"
        retry = Retry(max_attempts=3)
        async with Client(target, retry=retry, clock=waits.clock, sleep=waits.asleep) as client:
            with pytest.raises(EngineDead):
                await read(client)
    assert (len(engine.requests), len(waits.told)) == (3, 2)


async def test_the_time_limit_is_of_the_whole_answer() -> None:
    waits = Waits(ManualClock(0.0))
    engine = FakeEngine(resumable(Draining("going"), Draining("going")))
    async with serving(engine) as served:
        target, retry = f"127.0.0.1:{served.port}", Retry(first_wait_seconds=4.0, longest_wait_seconds=4.0)
        client = Client(target, retry=retry, clock=waits.clock, sleep=waits.asleep, random=lambda: 1.0)
        async with client:
            with pytest.raises(Draining):
                await read(client, timeout_seconds=6.0)
    first, second = [request.deadline_seconds or 0.0 for request in engine.requests]
    assert first - second > 3.9, "4 s were waited"


def lost_in_the_middle(
    lost: Callable[[], bool],
) -> Callable[
    [generation_pb2.GenerateStreamRequest, grpc.ServicerContext],
    Iterator[generation_pb2.GenerateStreamResponse],
]:
    def play(
        request: generation_pb2.GenerateStreamRequest, context: grpc.ServicerContext
    ) -> Iterator[generation_pb2.GenerateStreamResponse]:
        start = generation_pb2.Accepted(seed=1, max_tokens=3, fingerprint=FINGERPRINT, exact=True)
        yield generation_pb2.GenerateStreamResponse(request_id="r", accepted=start)
        known = len(request.resume.choices[0].token_ids) if request.HasField("resume") else 0
        for token_id in range(known, 3):
            yield delta(token_id)
            if lost():
                context.abort(grpc.StatusCode.UNKNOWN, "Stream removed")
        yield generation_pb2.GenerateStreamResponse(finished=generation_pb2.Finished())

    return play


def test_a_stream_that_is_left_by_its_block_sends_nothing_more() -> None:
    losses = iter([True, False, False])
    with (
        serve(lost_in_the_middle(lambda: next(losses, False))) as server,
        SyncClient(server.address, sleep=lambda seconds: None) as client,
    ):
        with client.stream("x", max_tokens=3) as events:
            tokens = [
                token.token_id for event in events if isinstance(event, TokenEvent) for token in event.tokens
            ]
        assert tokens == [0, 1, 2]
        with client.stream("x", max_tokens=3) as events:
            next(events)
        assert list(events) == []
    assert len(server.requests) == 3
