"""An answer outlives its replicas: wherever they die, whatever they refuse, its client is told it once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.resumed_streams import SPOKEN, SpokenService, completion, request_of, taken
from support.scripted_replicas import Break, ScriptedReplicas

from pageturner.service.client.partial_answer import PartialAnswer
from pageturner.service.client.values import Completion
from pageturner.service.core.clock import ManualClock
from pageturner.service.engine.api import StreamEvent
from pageturner.service.engine.fingerprint import Fingerprint
from pageturner.service.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    InvalidArgument,
    NotResumable,
    PageturnerError,
    QueueFull,
    TenantLimitReached,
)
from pageturner.service.scale import answers
from pageturner.service.scale.answers import MAX_LOSSES, Answers
from pageturner.service.scale.calls import Call, ReplicaLost, RouteHint
from pageturner.v1 import generation_pb2 as pb

prompts = st.lists(st.sampled_from(SPOKEN[:-1]), min_size=1, max_size=8)
breaks = st.lists(st.builds(Break, st.integers(0, 12), is_early_end=st.booleans()), max_size=5)
SAMPLING: dict[str, Any] = {"max_tokens": 9, "min_tokens": 5, "n": 2, "stop": ["b"], "logprobs": 1}


async def waited(seconds: float) -> None:
    """For `sleep`."""


def answers_of(replicas: ScriptedReplicas, clock: ManualClock | None = None) -> Answers:
    return Answers(replicas, clock or ManualClock(0.0), waited)


async def events_of(
    replicas: ScriptedReplicas, request: pb.GenerateStreamRequest, call: Call | None = None
) -> list[StreamEvent]:
    stream = answers_of(replicas).stream(request, call or Call(), RouteHint())
    return [event async for event in stream]


def compared(answer: Completion) -> Completion:
    """What does not hang on the replicas that gave it."""
    usage = replace(answer.usage, num_cached_prompt_tokens=0, num_resumed_tokens=0)
    choices = tuple(replace(choice, cumulative_logprob=None) for choice in answer.choices)
    return replace(answer, usage=usage, choices=choices)


def whole(request: pb.GenerateStreamRequest) -> Completion:
    (messages,) = SpokenService().streams(request)
    return compared(completion(taken(PartialAnswer(request), messages)))


def check_breaks(prompt: list[int], seed: int, broken: list[Break], cut: int) -> None:
    """The same answer by replicas that die; and by a client that lost its ingress behind `cut` messages, and
    goes on at another."""
    request = request_of("r", prompt, seed=seed, **SAMPLING)
    replicas = ScriptedReplicas(broken)
    found = asyncio.run(events_of(replicas, request))
    assert compared(completion(found)) == whole(request)
    assert not replicas.num_open, "a stream was left open"

    client = PartialAnswer(request)
    (messages,) = SpokenService().streams(request)
    events = taken(client, messages[: cut % len(messages)])
    rest = asyncio.run(events_of(ScriptedReplicas(broken), client.next_request()))
    from pageturner.service.rpc import convert

    events += taken(client, map(convert.from_event, rest))
    assert compared(completion(events)) == whole(request), "behind an answer that its client goes on with"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(prompts, st.integers(0, 1 << 63), breaks, st.integers(0, 99))
def test_an_answer_is_told_once_and_whole_wherever_its_replicas_die(
    prompt: list[int], seed: int, broken: list[Break], cut: int
) -> None:
    check_breaks(prompt, seed, broken, cut)


def check_seeds(count: int) -> None:
    for seed in range(count):
        check_breaks([66, 67, 222], seed, [Break(2), Break(0), Break(3, is_early_end=True), Break(1)], seed)


def an_early_end_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers._Part, "is_finished", property(lambda _: True, lambda _, value: None))


def the_request_is_sent_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartialAnswer, "next_request", lambda self: self._request)


def what_a_client_had_before_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartialAnswer, "_known", lambda _: [])


@pytest.mark.parametrize(
    "plant", [an_early_end_is_the_end, the_request_is_sent_anew, what_a_client_had_before_is_forgotten]
)
def test_a_bug_in_going_on_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, PageturnerError, IndexError)):
        check_seeds(6)


def test_the_cases_of_planted_bugs_pass_without_them() -> None:
    check_seeds(6)


REQUEST = request_of("r", [66, 67], max_tokens=4, seed=1)


async def test_a_full_replica_sends_the_request_on_and_all_full_ones_refuse_with_the_shortest_wait() -> None:
    full = [Break(error=QueueFull("full", seconds)) for seconds in (9.0, 4.0, 7.0, 5.0)]
    replicas = ScriptedReplicas(full[:2])
    assert compared(completion(await events_of(replicas, REQUEST))) == whole(REQUEST)
    assert [sorted(hint.avoid) for hint in replicas.hints] == [[], ["a"], ["a", "b"]]

    replicas = ScriptedReplicas(full)
    with pytest.raises(QueueFull) as caught:
        await events_of(replicas, REQUEST)
    assert caught.value.retry_after_seconds == 4.0
    assert len(replicas.hints) == 4


async def test_an_answer_that_has_begun_waits_for_full_replicas() -> None:
    full = [Break(error=QueueFull("full", 9.0))] * 6
    replicas = ScriptedReplicas([Break(3), *full])
    assert compared(completion(await events_of(replicas, REQUEST))) == whole(REQUEST)
    assert len(replicas.hints) == 8

    replicas = ScriptedReplicas([Break(3), *full * 99])
    with pytest.raises(QueueFull):
        await events_of(replicas, REQUEST)


def test_full_replicas_are_asked_in_rounds_with_a_wait_behind_each() -> None:
    tries = answers._Tries(RouteHint())
    waits = [
        tries.after(QueueFull("full", 1.5), replica, can_go_on=True, has_begun=True) for replica in "abababab"
    ]
    assert waits == [0.0, 0.0, 1.5, 0.0, 0.0, 1.5, 0.0, 0.0]
    assert tries.hint.avoid == {"a", "b"}


async def test_a_replica_that_dies_is_avoided_and_one_that_kills_every_replica_is_given_up() -> None:
    replicas = ScriptedReplicas([Break(1), Break(2)])
    await events_of(replicas, REQUEST)
    assert [sorted(hint.avoid) for hint in replicas.hints] == [[], ["a"], ["a", "b"]]

    replicas = ScriptedReplicas([Break()] * 99)
    with pytest.raises(ReplicaLost):
        await events_of(replicas, REQUEST)
    assert len(replicas.hints) == MAX_LOSSES


@pytest.mark.parametrize(
    "error", [InvalidArgument("sampling.top_p", "x"), TenantLimitReached("max_concurrent_requests", "x", 1.0)]
)
async def test_an_error_of_the_request_itself_goes_to_no_other_replica(error: PageturnerError) -> None:
    replicas = ScriptedReplicas([Break(error=error)])
    with pytest.raises(type(error)) as caught:
        await events_of(replicas, REQUEST)
    assert str(caught.value) == str(error)
    assert len(replicas.hints) == 1


async def test_an_answer_that_promises_no_equal_tokens_ends_with_its_replica() -> None:
    inexact = Fingerprint.of_parts({"weights": "w"}, is_exact=False)
    replicas = ScriptedReplicas([Break(3)], make=lambda: SpokenService(fingerprint=inexact))
    with pytest.raises(ReplicaLost):
        await events_of(replicas, REQUEST)


async def test_replicas_of_other_weights_are_passed_over() -> None:
    made = iter(
        [SpokenService(), SpokenService(fingerprint=Fingerprint.of_parts({"weights": "v"}, is_exact=True))]
    )
    replicas = ScriptedReplicas([Break(3)], make=lambda: next(made, None) or SpokenService())
    assert compared(completion(await events_of(replicas, REQUEST))) == whole(REQUEST)
    assert [sorted(hint.avoid) for hint in replicas.hints] == [[], ["a"], ["a", "b"]]


async def test_an_id_that_a_lost_replica_still_has_is_ended_there_and_anothers_is_not() -> None:
    replicas = ScriptedReplicas([Break(2), Break(error=DuplicateRequest("r"))])
    assert compared(completion(await events_of(replicas, REQUEST))) == whole(REQUEST)
    assert replicas.aborted == ["r"]

    replicas = ScriptedReplicas([Break(error=DuplicateRequest("r"))])
    with pytest.raises(DuplicateRequest):
        await events_of(replicas, REQUEST)
    assert not replicas.aborted


async def test_a_request_whose_deadline_has_passed_is_sent_nowhere() -> None:
    clock = ManualClock(0.0)
    replicas = ScriptedReplicas([Break(1)])

    async def pass_time(seconds: float) -> None:
        clock.advance(5.0)

    stream = Answers(replicas, clock, pass_time).stream(REQUEST, Call(deadline_seconds=4.0), RouteHint())
    with pytest.raises(DeadlineExceeded):
        async for _ in stream:
            pass
    assert len(replicas.hints) == 1


async def test_a_client_that_leaves_ends_the_replicas_stream() -> None:
    replicas = ScriptedReplicas()
    stream = answers_of(replicas).stream(REQUEST, Call(), RouteHint())
    await anext(stream)
    assert replicas.num_open == 1
    await stream.aclose()
    assert replicas.num_open == 0


async def test_a_unary_call_goes_to_the_next_replica_and_ends_with_what_the_request_did_wrong() -> None:
    replicas = ScriptedReplicas([Break(), Break(error=QueueFull("full", 1.0))])
    assert await answers_of(replicas).ask("Score", b"request", Call(), RouteHint()) == b"request"
    assert sorted(replicas.hints[-1].avoid) == ["a"], "of the one that was lost no name is known"

    replicas = ScriptedReplicas([Break(error=NotResumable("other weights", "weights"))] * 2)
    with pytest.raises(NotResumable):
        await answers_of(ScriptedReplicas([Break(error=NotResumable("x", "y"))] * 9)).ask(
            "Score", b"", Call(), RouteHint()
        )
