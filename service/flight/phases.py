"""The phases of requests that are traced: when each waited, was computed, produced tokens, was preempted.

A scheduler's listener, like the flight recorder, that keeps what lives only and says each request's phases
once, at its end. Requests without a sampled trace cost a look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from pageturner.service.core.clock import Clock
from pageturner.service.core.decisions import Admitted, Preempted
from pageturner.service.core.listener import AddRequest, Call, CallOutcome, Schedule
from pageturner.service.core.outputs import Event, FinishedEvent, TokenEvent, Usage
from pageturner.service.trace_context import is_sampled

MAX_PHASES = 128
"""Of one request; what a storm of preemptions adds beyond is joined to the last."""


class PhaseKind(Enum):
    """PREFILL: computing the prompt, or again what a preemption dropped. DECODE: from a token on."""

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True)
class Phase:
    """began, ended: on the engine's clock. how: of a preemption: swap, recompute or tail."""

    kind: PhaseKind
    began: float
    ended: float
    how: str = ""


@dataclass(frozen=True, slots=True)
class RequestPhases:
    """One request from its arrival to its end, without a gap.

    trace_parent: as W3C's header has it, of the call that brought the request. error: name of its type, empty
    if all went well.
    """

    trace_parent: str
    phases: tuple[Phase, ...]
    usage: Usage
    error: str


@dataclass(slots=True)
class _Tracked:
    trace_parent: str
    kind: PhaseKind
    began: float
    how: str = ""
    has_token: bool = False
    past: list[Phase] = field(default_factory=list)

    def begin(self, kind: PhaseKind, now: float, how: str = "") -> None:
        if kind is self.kind or len(self.past) == MAX_PHASES - 1:
            return
        self.past.append(Phase(self.kind, self.began, now, self.how))
        self.kind, self.began, self.how = kind, now, how


class PhaseRecorder:
    """on_end: called on the scheduler's thread, once for each sampled request; neither waits nor raises."""

    def __init__(self, on_end: Callable[[RequestPhases], None], clock: Clock) -> None:
        self._on_end = on_end
        self._clock = clock
        self._tracked: dict[str, _Tracked] = {}

    def before(self, call: Call) -> None:
        """Nothing is to be looked at before a call."""

    def after(self, call: Call, outcome: CallOutcome) -> None:
        """Note what the call began and ended."""
        if isinstance(call, AddRequest) and outcome.error is None and is_sampled(call.new.trace_parent):
            tracked = _Tracked(call.new.trace_parent, PhaseKind.QUEUE, call.new.arrival_time)
            self._tracked[call.new.request_id] = tracked
        if not self._tracked:
            return
        if isinstance(call, Schedule):
            self._note_decisions(call.now, outcome)
        answer = outcome.answer
        events = getattr(answer, "events", answer)
        if isinstance(events, tuple) and events:
            self._note_events(events)

    def _note_decisions(self, now: float, outcome: CallOutcome) -> None:
        for decision in outcome.decisions:
            if isinstance(decision, Admitted):
                tracked = self._tracked.get(decision.request_id)
                if tracked is not None:
                    goes_on = tracked.has_token and decision.was_swapped
                    tracked.begin(PhaseKind.DECODE if goes_on else PhaseKind.PREFILL, now)
            elif isinstance(decision, Preempted):
                tracked = self._tracked.get(decision.request_id)
                if tracked is not None:
                    tracked.begin(PhaseKind.PREEMPTED, now, decision.how.value)

    def _note_events(self, events: tuple[Event, ...]) -> None:
        now = self._clock.now()
        for event in events:
            if type(event) is TokenEvent:
                tracked = self._tracked.get(event.request_id)
                if tracked is not None and tracked.kind is not PhaseKind.PREEMPTED:
                    tracked.has_token = True
                    tracked.begin(PhaseKind.DECODE, now)
            elif isinstance(event, FinishedEvent):
                tracked = self._tracked.pop(event.request_id, None)
                if tracked is not None:
                    last = Phase(tracked.kind, tracked.began, now, tracked.how)
                    error = "" if event.error is None else type(event.error).__name__
                    phases = RequestPhases(tracked.trace_parent, (*tracked.past, last), event.usage, error)
                    self._on_end(phases)
