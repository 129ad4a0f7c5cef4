"""A scheduler that is recorded: stands between the engine and the scheduler, and notes what goes through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pageturner.policies.interfaces import AXES, PolicySet
from pageturner.service.core.decisions import ChoiceEnded, Decision, Ended
from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    Event,
    FinishedEvent,
    SampledSequence,
    SchedulerOutput,
    SchedulerStats,
    TokenEvent,
)
from pageturner.service.core.request import NewRequest
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.errors import PageturnerError
from pageturner.service.flight.checkpoint import take_checkpoint
from pageturner.service.flight.live_chains import LiveChains
from pageturner.service.flight.policy_notes import PolicyStanding, policy_specs
from pageturner.service.flight.pseudonyms import Namer
from pageturner.service.flight.recorded_error import error_name
from pageturner.service.flight.recorded_request import RecordedRequest
from pageturner.service.flight.recorder import FlightRecorder
from pageturner.service.flight.records import (
    Aborted,
    Added,
    Expired,
    Failed,
    FlightStart,
    Paused,
    PoliciesSet,
    Scheduled,
    Setting,
    Updated,
    pack_rows,
)
from pageturner.service.policy_host.host import AxisReport, PolicyReport


def recorded_scheduler(
    scheduler: Scheduler, setting: Setting, *, name_key: bytes, num_steps: int
) -> RecordedScheduler:
    """A scheduler just made, recorded from its first call on."""
    start = FlightStart(policy_specs(scheduler.policy_host.policies))
    return RecordedScheduler(scheduler, FlightRecorder(setting, start, num_steps), name_key)


class RecordedScheduler:
    """A scheduler, every call of which is noted together with what came of it.

    name_key: secret of the names of blocks, at most 64 bytes; never written.
    """

    def __init__(self, scheduler: Scheduler, recorder: FlightRecorder, name_key: bytes) -> None:
        self.recorder = recorder
        self._scheduler = scheduler
        self._state = scheduler.state
        self._policy_host = scheduler.policy_host
        manager = scheduler.manager
        self._namer = Namer(manager.hasher, name_key, manager.block_size)
        self._chains = LiveChains(self._namer, self._state.requests.values())
        self._decisions: list[Decision] = []
        self._state.decisions = self._decisions
        # Set where the clock moved and nobody ended: noted only if something reads it before the next step.
        self._unnoted_now: float | None = None

    # --- requests in and out ---------------------------------------------------------------

    def add_request(self, request: NewRequest) -> int:
        self._note_clock()
        chain = self._chains.prompt_chain(request)
        entry = Added(self._state.now, RecordedRequest.of(request, tuple(chain.names)))
        before = PolicyStanding(self._policy_host)
        try:
            max_tokens = self._scheduler.add_request(request)
        except PageturnerError as error:
            self.recorder.add(replace(entry, refusal=error_name(error)))
            raise
        except Exception as error:
            self.recorder.add(replace(entry, raised=error_name(error)))
            raise
        self._chains.add(request, chain)
        self.recorder.add(replace(entry, max_tokens=max_tokens, decisions=before.changes()))
        return max_tokens

    def abort_request(self, request_id: str, error: PageturnerError) -> tuple[Event, ...]:
        self._note_clock()
        entry = Aborted(self._state.now, request_id, error_name(error))
        before = PolicyStanding(self._policy_host)
        try:
            events = self._scheduler.abort_request(request_id, error)
        except Exception as fault:
            self.recorder.add(replace(entry, raised=error_name(fault)))
            raise
        if events:
            self.recorder.add(replace(entry, decisions=self._ended(events) + before.changes()))
        return events

    def expire(self, now: float) -> tuple[Event, ...]:
        before = PolicyStanding(self._policy_host)
        try:
            events = self._scheduler.expire(now)
        except Exception as fault:
            self.recorder.add(Expired(now, raised=error_name(fault)))
            raise
        self._unnoted_now = None if events else now
        if events:
            self.recorder.add(Expired(now, self._ended(events) + before.changes()))
        return events

    def pause_request(self, request_id: str) -> None:
        self._scheduler.pause_request(request_id)
        self.recorder.add(Paused(self._state.now, request_id, is_paused=True))

    def resume_request(self, request_id: str) -> None:
        self._scheduler.resume_request(request_id)
        self.recorder.add(Paused(self._state.now, request_id, is_paused=False))

    def set_policies(
        self, policies: PolicySet, now: float, *, shadows: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        """Shadows are not noted: they decide nothing."""
        self._unnoted_now = None
        before, in_force = PolicyStanding(self._policy_host), self._policy_host.policies
        come = tuple(axis for axis in AXES if getattr(policies, axis) is not getattr(in_force, axis))
        entry = PoliciesSet(now, policy_specs(policies, come))
        try:
            self._scheduler.set_policies(policies, now, shadows=shadows)
        except Exception as fault:
            self.recorder.add(replace(entry, raised=error_name(fault)))
            raise
        self.recorder.add(replace(entry, decisions=before.changes()))

    def policy_report(self) -> PolicyReport:
        return self._scheduler.policy_report()

    def take_quarantined(self) -> tuple[AxisReport, ...]:
        return self._scheduler.take_quarantined()

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def num_requests(self) -> tuple[int, int]:
        return self._scheduler.num_requests()

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    # --- one step --------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput:
        if self.recorder.wants_checkpoint:
            self._begin_stretch()
        self._unnoted_now = None
        before = PolicyStanding(self._policy_host)
        try:
            output = self._scheduler.schedule(now)
        except Exception as fault:
            self.recorder.add(Scheduled(now, 0, decisions=self._taken(before), raised=error_name(fault)))
            raise
        step_id = output.step_id if output else 0
        rows = pack_rows(output)
        self.recorder.add(Scheduled(now, step_id, rows, output.block_copies, self._taken(before)))
        return output

    def update(
        self, output: SchedulerOutput, sampled: tuple[SampledSequence, ...], now: float
    ) -> tuple[Event, ...]:
        self._unnoted_now = None
        before = PolicyStanding(self._policy_host)
        try:
            events = self._scheduler.update(output, sampled, now)
        except Exception as fault:
            results = self._chains.take(output, sampled, ())
            self.recorder.add(Updated(now, output.step_id, results, raised=error_name(fault)))
            raise
        results = self._chains.take(output, sampled, events)
        decisions = self._ended(events) + before.changes()
        self.recorder.add(Updated(now, output.step_id, results, decisions))
        return events

    def fail_step(self, output: SchedulerOutput, error: Exception, now: float) -> tuple[Event, ...]:
        self._unnoted_now = None
        entry = Failed(now, output.step_id, error_name(error))
        before = PolicyStanding(self._policy_host)
        try:
            events = self._scheduler.fail_step(output, error, now)
        except Exception as fault:
            self.recorder.add(replace(entry, raised=error_name(fault)))
            raise
        self.recorder.add(replace(entry, decisions=self._ended(events) + before.changes()))
        return events

    # --- what is noted ---------------------------------------------------------------------

    def _note_clock(self) -> None:
        if self._unnoted_now is not None:
            self.recorder.add(Expired(self._unnoted_now))
            self._unnoted_now = None

    def _begin_stretch(self) -> None:
        checkpoint = take_checkpoint(self._scheduler, self._chains.names_of, self._namer.name_of)
        if checkpoint is not None:
            self._note_clock()
            self.recorder.begin(FlightStart(policy_specs(self._policy_host.policies), checkpoint))

    def _taken(self, before: PolicyStanding) -> tuple[Decision, ...]:
        """What the last schedule decided."""
        changes = before.changes()
        if not self._decisions:
            return changes
        decisions = tuple(self._decisions) + changes
        self._decisions.clear()
        return decisions

    def _ended(self, events: tuple[Event, ...]) -> tuple[Decision, ...]:
        decisions: list[Decision] = []
        for event in events:
            if isinstance(event, TokenEvent):
                continue
            if isinstance(event, ChoiceFinishedEvent):
                decisions.append(ChoiceEnded(event.request_id, event.index, event.reason.value))
            elif isinstance(event, FinishedEvent):
                self._chains.drop(event.request_id)
                usage, timings = event.usage, event.timings
                decisions.append(
                    Ended(
                        event.request_id,
                        error_name(event.error),
                        usage.num_output_tokens,
                        usage.num_cached_prompt_tokens,
                        timings.queue_seconds,
                        timings.num_swaps + timings.num_recomputes + timings.num_tail_reclaims,
                    )
                )
        return tuple(decisions)
