"""Looks at the engine: shared, seldom, never in the way, and answered while a step hangs."""

from __future__ import annotations

import asyncio

from support.real_service import real_service

from pageturner.service.core.clock import ManualClock
from pageturner.service.core.inspection import BlockUse, RequestState, SchedulerInspection
from pageturner.service.engine.inspections import FRESH_SECONDS, Inspections
from pageturner.service.engine.thread_messages import Inspect, Inspected

FULL = SchedulerInspection(num_blocks=4, tables=((0, (0, 1, 2, 3)),))


class Asked:
    """An engine that answers when it is told to, and counts what it was asked."""

    def __init__(self, patience_seconds: float = 60.0) -> None:
        self.clock = ManualClock(100.0)
        self.commands: list[Inspect] = []
        self.looks = Inspections(
            self.clock, self.commands.append, num_blocks=4, patience_seconds=patience_seconds
        )

    def answer(self) -> None:
        self.looks.deliver(Inspected(FULL, self.clock.now()))


async def test_however_many_look_the_engine_is_asked_once() -> None:
    asked = Asked()
    looks = [asyncio.ensure_future(asked.looks.look()) for _ in range(50)]
    await asyncio.sleep(0)
    asked.answer()
    assert {inspection.scheduler for inspection in await asyncio.gather(*looks)} == {FULL}
    asked.clock.advance(FRESH_SECONDS)
    assert (await asked.looks.look()).age_seconds == FRESH_SECONDS, "it is fresh enough"
    assert len(asked.commands) == 1
    asked.clock.advance(0.01)
    look = asyncio.ensure_future(asked.looks.look())
    await asyncio.sleep(0)
    assert len(asked.commands) == 2
    asked.answer()
    assert (await look).age_seconds == 0.0


async def test_a_look_does_not_wait_for_a_step_that_hangs() -> None:
    asked = Asked(patience_seconds=0.0)
    nothing = (await asked.looks.look()).scheduler
    assert set(nothing.block_map().uses) == {BlockUse.FREE}, "before the first answer"
    asked.answer()
    asked.clock.advance(40.0)
    for _ in range(3):
        told = await asked.looks.look()
        assert (told.scheduler, told.age_seconds) == (FULL, 40.0)
    assert len(asked.commands) == 2, "one look is under way, and the others wait for it"
    asked.looks.end()
    assert not (await asked.looks.look()).scheduler.requests, "a dead engine has no request"
    assert len(asked.commands) == 2


async def test_a_look_at_an_idle_engine_makes_no_step() -> None:
    async with real_service(num_blocks=6) as service:
        schedules = 0
        engine = service.engine._engine
        plan = engine._schedule

        def counted(now: float) -> object:
            nonlocal schedules
            schedules += 1
            return plan(now)

        engine._schedule = counted  # type: ignore[assignment] # a counter around it
        seen = await service.engine.inspect()
        assert (seen.scheduler.num_blocks, seen.scheduler.requests, schedules) == (6, (), 0)
        assert (await service.client.generate("x", max_tokens=1)).usage.num_output_tokens
        assert schedules > 0


async def test_what_waits_and_what_runs_is_seen_between_two_steps() -> None:
    async with real_service(max_num_seqs=1) as service:
        service.hold_steps()
        calls = []
        for name in "ab":
            call = service.client.generate("x", request_id=name, max_tokens=9, tenant="t")
            calls.append(asyncio.create_task(call))
            await service.until(lambda: service.num_live == len(calls))
        looking = asyncio.create_task(service.engine.inspect())
        await asyncio.sleep(0)  # it has asked
        await service.run_steps(2)
        seen = (await looking).scheduler.requests
        assert [(r.request_id, r.state, r.queue_position) for r in seen] == [
            ("a", RequestState.RUNNING, 0),
            ("b", RequestState.WAITING, 1),
        ]
        service.release_steps()
        await asyncio.gather(*calls)
