"""How an ingress reads prompts, while replicas come, fail to come, or are of the version before."""

from __future__ import annotations

import asyncio

import pytest
from support.fake_engine import FakeEngine

from pageturner.service.core.clock import ManualClock
from pageturner.service.errors import NoReplica
from pageturner.service.scale.prompts import ASK_AGAIN_SECONDS, PromptRoutings, Reading

MODEL = FakeEngine().models()[0]


class Replicas:
    """What they say of themselves, or how they fail; each question waits until it is let."""

    def __init__(self, version: str = "new") -> None:
        self.version = version
        self.error: Exception | None = None
        self.num_asked = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def ask(self) -> tuple[Reading, bytes]:
        self.num_asked += 1
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return Reading(MODEL, None, 4, shares_prefixes=False, version=self.version), b"key"


async def test_what_a_replica_of_this_version_says_is_asked_for_once() -> None:
    replicas, clock = Replicas(), ManualClock()
    routings = PromptRoutings("new", replicas.ask, clock)
    first = await routings.current()
    clock.advance(1000.0)
    assert await routings.current() is first
    assert replicas.num_asked == 1


async def test_replicas_of_the_version_before_are_heeded_until_one_of_this_version_answers() -> None:
    replicas, clock = Replicas("old"), ManualClock()
    routings = PromptRoutings("new", replicas.ask, clock)
    old = await routings.current()
    assert await routings.current() is old
    assert replicas.num_asked == 1, "not at each request"
    replicas.version = "new"
    clock.advance(ASK_AGAIN_SECONDS)
    assert await routings.current() is old, "no request waits for it"
    for _ in range(1000):
        found = await routings.current()
        if found is not old:
            break
        await asyncio.sleep(0.001)
    assert found is not old
    clock.advance(1000.0)
    assert await routings.current() is found
    assert replicas.num_asked == 2


async def test_while_none_of_this_version_answers_that_of_the_version_before_stays() -> None:
    replicas, clock = Replicas("old"), ManualClock()
    routings = PromptRoutings("new", replicas.ask, clock)
    old = await routings.current()
    replicas.error = NoReplica("none is there")
    for number in range(3):
        clock.advance(ASK_AGAIN_SECONDS)
        assert await routings.current() is old
        await asyncio.sleep(0.001)
        assert replicas.num_asked == number + 2


async def test_requests_that_wait_for_a_replica_share_one_wait_and_its_failure() -> None:
    replicas, clock = Replicas(), ManualClock()
    replicas.may_answer.clear()
    routings = PromptRoutings("new", replicas.ask, clock)
    leaver, *others = [asyncio.create_task(routings.current()) for _ in range(4)]
    await asyncio.sleep(0)
    leaver.cancel()
    replicas.error = NoReplica("none came")
    replicas.may_answer.set()
    for each in others:
        with pytest.raises(NoReplica):
            await each
    assert replicas.num_asked == 1
    replicas.error = None
    await routings.current()
    assert replicas.num_asked == 2
