"""The step loop: plan, compute, account. Bound to no thread.

At depth 0 a step is planned, computed and accounted for before the next is planned. At depth 1 the next one
is planned while the model computes, and started as soon as the tokens are there; only then are they accounted
for and put out. What the host does for a step is hidden behind the model's work on another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from structlog.typing import FilteringBoundLogger

from pageturner.service.core.clock import Clock
from pageturner.service.core.inspection import SchedulerInspection
from pageturner.service.core.outputs import (
    Acceptance,
    Event,
    FinishedEvent,
    SampledSequence,
    SchedulerOutput,
    SchedulerStats,
)
from pageturner.service.core.request import NewRequest
from pageturner.service.engine.api import AcceptedEvent
from pageturner.service.engine.metrics import Metrics
from pageturner.service.engine.options import EngineOptions
from pageturner.service.engine.paused_requests import PausedRequests
from pageturner.service.engine.policy_control import HostsPolicies, PolicyControl
from pageturner.service.engine.step_computation import Device, StepComputation
from pageturner.service.engine.thread_messages import (
    Abort,
    ChangePolicies,
    Command,
    EngineOutput,
    Inspect,
    Inspected,
    Pause,
    Resume,
    Submit,
    SubmitRefused,
)
from pageturner.service.engine.tier_exchange import TierExchange
from pageturner.service.errors import EngineDead, PageturnerError, SlowConsumer, StepFailed

EMPTY_SCHEDULE_PAUSE = 0.002
"""Seconds between two schedules of which the first planned nothing though there was work: no spinning."""

TRANSFER_PAUSE = 0.02
"""Seconds between two schedules while there is no work, but blocks are being written to disk."""

STATS_INTERVAL = 0.25
"""Seconds between two readings of the scheduler's figures while no request comes, starts or ends: they cost
time in proportion to the requests."""


REST_STEPS = 256
"""At depth 1, so many steps are started one behind the other before none is in flight for a moment. The
flight recorder takes its checkpoints then; the model waits for one plan."""


class StepScheduler(HostsPolicies, Protocol):
    """What the loop asks of `service.core.scheduler.Scheduler`."""

    def add_request(self, request: NewRequest) -> Acceptance: ...
    def abort_request(self, request_id: str, error: PageturnerError) -> tuple[Event, ...]: ...
    def expire(self, now: float) -> tuple[Event, ...]: ...
    def pause_request(self, request_id: str) -> None: ...
    def resume_request(self, request_id: str) -> None: ...
    def has_work(self) -> bool: ...
    def num_requests(self) -> tuple[int, int]: ...
    def schedule(self, now: float) -> SchedulerOutput: ...
    def update(
        self, output: SchedulerOutput, sampled: tuple[SampledSequence, ...], now: float
    ) -> tuple[Event, ...]: ...
    def fail_step(self, output: SchedulerOutput, error: Exception, now: float) -> tuple[Event, ...]: ...
    def stats(self) -> SchedulerStats: ...
    def inspect(self, now: float) -> SchedulerInspection: ...


class Engine:
    """One scheduler, one KV cache, one model. Call everything but the properties from one thread.

    A step that fails costs only the requests that the scheduler finds guilty. What cannot be survived
    is raised from `apply` or `step`: a fault of the scheduler itself, as it comes, or EngineDead
    after max_consecutive_failures failed steps without a success, or after one that the device did not
    survive. (A GPU's kernel that faults fails every call from then on, and no request is to blame.)

    depth: the scheduler's: 0, or 1 to have a step in flight while one is planned. device: None for the
    machine's own processor. on_fault: told, without a word of any user's, of the first step of a row to fail.
    tiers: None where no blocks are kept on disk.
    """

    def __init__(
        self,
        scheduler: StepScheduler,
        steps: StepComputation,
        *,
        clock: Clock,
        options: EngineOptions,
        metrics: Metrics,
        logger: FilteringBoundLogger,
        depth: int = 0,
        device: Device | None = None,
        on_fault: Callable[[str], object] | None = None,
        tiers: TierExchange | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._tiers = tiers
        self._schedule = scheduler.schedule if tiers is None else tiers.schedule
        self._steps = steps
        self._clock = clock
        self._options = options
        self._logger = logger
        self._depth = depth
        self._device = device
        self._on_fault = on_fault
        self.metrics = metrics
        self.stats = scheduler.stats()
        self.policies = PolicyControl(scheduler, clock, logger)
        # Live requests in order of arrival, each with its deadline.
        self._deadlines: dict[str, float | None] = {}
        self._paused = PausedRequests(options.slow_consumer_timeout_seconds)
        self._num_failures = 0
        self._num_empty_schedules = 0
        self._next_stats = 0.0
        self._num_requests = scheduler.num_requests()
        self._planned: SchedulerOutput | None = None
        self._in_flight: SchedulerOutput | None = None
        self._num_since_rest = 0

    def adopt_thread(self) -> None:
        """The caller's thread is the one that will compute."""
        if self._device is not None:
            self._device.adopt_thread()

    def close(self) -> None:
        """The last call: no step follows."""
        self._steps.close()
        if self._tiers is not None:
            self._tiers.close(is_sound=not self._num_failures)

    def apply(self, command: Command) -> tuple[EngineOutput, ...]:
        """Carry out one command between two steps."""
        match command:
            case Submit(request):
                return self._submit(request)
            case Abort(request_id, error):
                events = self._scheduler.abort_request(request_id, error)
                self._settle(events)
                return events
            case Pause(request_id, until) if request_id in self._deadlines:
                self._paused.pause(request_id, until)
                self._scheduler.pause_request(request_id)
            case Resume(request_id) if self._paused.forget(request_id):
                self._scheduler.resume_request(request_id)
            case ChangePolicies():
                return (self.policies.change(command),)
            case Inspect():
                now = self._clock.now()
                return (Inspected(self._scheduler.inspect(now), now),)
        return ()

    def step(self) -> tuple[Event, ...]:
        """Advance all that can by one forward of the model; at depth 1 its tokens come with the next step."""
        return self.begin_step() + self.finish_step()

    def begin_step(self) -> tuple[Event, ...]:
        """Plan the next step. Returns the ends of requests whose time is up; `stats` holds what waits and
        what runs until `finish_step`."""
        self.policies.end_step()
        events = self._expire()
        if self._in_flight is None or self._num_since_rest < REST_STEPS:
            self._planned = self._schedule(self._clock.now()) or None
            if self._planned is None and self._in_flight is None:
                events += self._notice_standstill()
        self._settle(events)
        self._refresh()
        return events

    def finish_step(self) -> tuple[Event, ...]:
        """Compute what was planned; at depth 1 start it, and take the results of the step before it."""
        planned, before = self._planned, self._in_flight
        self._planned = self._in_flight = None
        if self._depth and (planned or before):
            events = self._overlap(before, planned)
        elif planned:
            events = self._compute(planned)
        else:
            return ()
        self._settle(events)
        self._refresh()
        return events

    def _compute(self, planned: SchedulerOutput) -> tuple[Event, ...]:
        """Depth 0: the whole step."""
        self._steps.start(planned)
        return self._account(planned, self._finish())

    def _overlap(self, before: SchedulerOutput | None, planned: SchedulerOutput | None) -> tuple[Event, ...]:
        """Depth 1: `planned` is started before the results of the step before it are accounted for.

        Where that one failed, every request of `planned` starts over: it is not computed.
        """
        outcome = () if before is None else self._finish()
        events: tuple[Event, ...] = ()
        if planned is not None and not isinstance(outcome, Exception):
            self._steps.start(planned)
            self._in_flight = planned
        if before is not None:
            events = self._account(before, outcome)
        if planned is not None and self._in_flight is None:
            events += self._void(planned)
        is_behind = before is not None and self._in_flight is not None
        self._num_since_rest = self._num_since_rest + 1 if is_behind else 0
        return events

    def _finish(self) -> tuple[SampledSequence, ...] | Exception:
        try:
            return self._steps.finish()
        except EngineDead:  # no step can follow this one
            raise
        except Exception as error:
            return error

    def _account(
        self, output: SchedulerOutput, outcome: tuple[SampledSequence, ...] | Exception
    ) -> tuple[Event, ...]:
        """Give the scheduler what came of a step."""
        if isinstance(outcome, Exception):
            return self._recover(output, outcome)
        events = self._scheduler.update(output, outcome, self._clock.now())
        self._num_failures = self._num_empty_schedules = 0
        return events

    def _void(self, output: SchedulerOutput) -> tuple[Event, ...]:
        """End a step planned behind one that failed. Blocks are moved all the same, for those it clears."""
        try:
            self._steps.copy_blocks(output.block_copies)
        except EngineDead:
            raise
        except Exception as error:
            return self._scheduler.fail_step(output, error, self._clock.now())
        return self._scheduler.update(output, (), self._clock.now())

    def seconds_to_next_step(self) -> float | None:
        """How long the loop may wait for commands: 0 while there is work, None for as long as it takes."""
        if self._in_flight is not None:
            return 0.0
        if self._scheduler.has_work():
            return EMPTY_SCHEDULE_PAUSE if self._num_empty_schedules else 0.0
        moments = [moment for moment in self._deadlines.values() if moment is not None]
        moments += self._paused.moments()
        if self._tiers is not None and self._tiers.is_busy:
            pause = EMPTY_SCHEDULE_PAUSE if self._tiers.is_handing_over else TRANSFER_PAUSE
            moments.append(self._clock.now() + pause)
        return max(0.0, min(moments) - self._clock.now()) if moments else None

    def _submit(self, request: NewRequest) -> tuple[EngineOutput, ...]:
        try:
            acceptance = self._scheduler.add_request(request)
        except PageturnerError as error:
            return (SubmitRefused(request.request_id, error),)
        self._deadlines[request.request_id] = request.deadline
        self._next_stats = 0.0  # the figures that cross with the answer count this request
        accepted = AcceptedEvent(
            request.request_id,
            request.seed,
            len(request.prompt_token_ids),
            acceptance.max_tokens,
            request.fingerprint,
            request.is_exact,
        )
        self.metrics.accepted(
            accepted, request.arrival_time, request.tenant, is_resumed=bool(request.resumed)
        )
        self._settle(acceptance.events)
        return (accepted, *acceptance.events)

    def _expire(self) -> tuple[Event, ...]:
        now = self._clock.now()
        events = self._scheduler.expire(now)
        for request_id in self._paused.take_late(now):
            seconds = self._options.slow_consumer_timeout_seconds
            error = SlowConsumer(f"the stream was not read for {seconds:g} s")
            events += self._scheduler.abort_request(request_id, error)
        return events

    def _recover(self, output: SchedulerOutput, error: Exception) -> tuple[Event, ...]:
        self._num_failures += 1
        self._logger.error(
            "step_failed",
            step_id=output.step_id,
            num_sequences=len(output.scheduled),
            num_failures=self._num_failures,
            exc_info=error,
        )
        self._check_device(error)
        if self._num_failures > self._options.max_consecutive_failures:
            raise EngineDead(
                f"{self._num_failures} steps failed in a row, the last one with: {error}"
            ) from error
        events = self._scheduler.fail_step(output, error, self._clock.now())
        if self._on_fault is not None and self._num_failures == 1:
            self._on_fault(f"a step failed of {type(error).__name__}")
        return events

    def _check_device(self, error: Exception) -> None:
        if self._device is None:
            return
        try:
            self._device.synchronize()
        except Exception as fault:
            raise EngineDead(f"the device can't go on: {fault}") from error

    def _notice_standstill(self) -> tuple[Event, ...]:
        """Requests that no schedule advances would wait for ever, health SERVING: end the oldest."""
        if not self._scheduler.has_work():
            self._num_empty_schedules = 0
            return ()
        if self._tiers is not None and self._tiers.is_fetching:
            self._num_empty_schedules = 1  # a pause before the next schedule, however many there are
            return ()
        self._num_empty_schedules += 1
        if self._num_empty_schedules < self._options.max_empty_schedules:
            return ()
        if not self._deadlines:
            raise EngineDead("the scheduler claims to have work but holds no request")
        self._num_empty_schedules = 0
        oldest = next(iter(self._deadlines))
        self._logger.error("standstill", request_id=oldest, num_requests=len(self._deadlines))
        self.metrics.gave_up()
        return self._scheduler.abort_request(oldest, StepFailed("the scheduler could not advance it"))

    def _settle(self, events: tuple[Event, ...]) -> None:
        """Forget the requests that ended, and count."""
        for event in events:
            if isinstance(event, FinishedEvent):
                self._deadlines.pop(event.request_id, None)
                self._paused.forget(event.request_id)
        self.policies.log()
        self.metrics.observe(events, self._clock.now())

    def _refresh(self) -> None:
        """Read the figures anew where requests came, started or ended, before a rest, and now and then."""
        now, num_requests = self._clock.now(), self._scheduler.num_requests()
        if (
            num_requests != self._num_requests
            or now >= self._next_stats
            or not (self._planned or self._in_flight or self._scheduler.has_work())
        ):
            self.stats = self._scheduler.stats()
            self.policies.refresh()
            self._num_requests = num_requests
            self._next_stats = now + STATS_INTERVAL
