"""Notices that the engine makes no progress: a step that does not end, or work that no step takes up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from pageturner.service.core.clock import Clock
from pageturner.service.engine.api import Condition, EngineHealth
from pageturner.service.engine.engine import Engine
from pageturner.service.engine.health import Health
from pageturner.service.engine.live_requests import LiveRequests
from pageturner.service.engine.options import EngineOptions
from pageturner.service.engine.step_thread import StepThread

_MOVING = (EngineHealth.SERVING, EngineHealth.STALLED, EngineHealth.DRAINING)


@dataclass(frozen=True, slots=True)
class Progress:
    """The engine thread as the event loop sees it, times on the engine's clock.

    busy_since: when the step under way began; None between steps. last_progress: when a step last ended.
    has_work: some request waits for nothing but the engine (its reader does not lag).
    """

    busy_since: float | None
    last_progress: float
    has_work: bool


class ProgressTimer:
    """Told of the engine's progress now and then, says for how long there was none.

    Work may wait without a step for a good reason: it has just come. So time without a step counts from when
    work was first seen beside the same last step.
    """

    def __init__(self, now: float) -> None:
        self._work_since = now
        self._had_work = False

    def note(self, progress: Progress, now: float) -> float:
        """Seconds without progress; 0 where there is nothing to be done."""
        if progress.has_work and not self._had_work:
            self._work_since = now
        self._had_work = progress.has_work
        if progress.busy_since is not None:
            return max(0.0, now - progress.busy_since)
        if not progress.has_work:
            return 0.0
        return max(0.0, now - max(progress.last_progress, self._work_since))


class Watchdog:
    """Has health say STALLED while nothing goes forward, and gives the engine up after dead_after_seconds.

    Lives on the event loop. give_up: called with the fault, and with the reason for operators.
    """

    def __init__(
        self,
        engine: Engine,
        live: LiveRequests,
        health: Health,
        options: EngineOptions,
        clock: Clock,
        logger: FilteringBoundLogger,
        give_up: Callable[[BaseException, str], None],
    ) -> None:
        self._engine = engine
        self._live = live
        self._health = health
        self._options = options
        self._clock = clock
        self._logger = logger
        self._give_up = give_up
        self._timer = ProgressTimer(clock.now())
        self._thread: StepThread | None = None
        self._watching: asyncio.Task[None] | None = None

    def watch(self, thread: StepThread) -> None:
        """Look at this thread from now on, four times in stall_seconds."""
        self._thread = thread
        self._watching = asyncio.create_task(self._watch())

    def cancel(self) -> None:
        """Look no more."""
        if self._watching is not None:
            self._watching.cancel()

    def condition(self) -> Condition:
        """Health with its reason, of this moment."""
        health, reason, seconds = self._health.value, self._health.reason, 0.0
        if health in _MOVING:
            seconds, stall = self._look()
            reason = stall if health is EngineHealth.STALLED else reason
        return Condition(health, reason, len(self._live), seconds)

    def check(self) -> None:
        """Report that nothing has gone forward for stall_seconds, and that something does again."""
        seconds, reason = self._look()
        is_stalled = seconds > self._options.stall_seconds
        dead_after = self._options.dead_after_seconds
        if is_stalled and self._health.value is EngineHealth.SERVING:
            asking = self._engine.policies.asking
            self._logger.error(
                "engine_stalled",
                seconds=seconds,
                num_requests=len(self._live),
                reason=reason,
                policy=None if asking is None else f"{asking.axis} policy {asking.policy} has not answered",
            )
            self._engine.metrics.stalled()
            self._health.become(EngineHealth.STALLED, reason)
        elif not is_stalled and self._health.value is EngineHealth.STALLED:
            self._logger.warning("engine_resumed")
            self._health.become(EngineHealth.SERVING)
        if dead_after is not None and seconds > dead_after:
            reason = f"{reason}, and engine.dead_after_seconds is {dead_after:g}"
            self._give_up(TimeoutError(reason), reason)

    def _look(self) -> tuple[float, str]:
        """For how long nothing has gone forward, and why."""
        if self._thread is None:
            return 0.0, ""
        progress = Progress(self._thread.busy_since, self._thread.last_progress, self._live.has_work())
        seconds = self._timer.note(progress, self._clock.now())
        asking = self._engine.policies.asking if progress.busy_since is not None else None
        policy = "" if asking is None else f"{asking.axis} policy {asking.policy}"
        return seconds, stall_reason(progress, seconds, policy)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._options.stall_seconds / 4)
            self.check()


def stall_reason(progress: Progress, seconds: float, policy: str = "") -> str:
    """Why nothing goes forward, in a sentence. policy: the one that has not answered, if one was asked."""
    if policy:
        return f"the step under way has taken {seconds:.0f} s: {policy} has not answered"
    if progress.busy_since is not None:
        return f"the step under way has taken {seconds:.0f} s"
    return f"no step has begun for {seconds:.0f} s, though requests wait for one"
