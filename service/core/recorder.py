"""The flight recorder: what the scheduler was told and what it decided, the last of it.

`RecordedScheduler` stands between the engine and the scheduler, `FlightRecorder` keeps what it notes. A
ring cannot be replayed from any place, so it is made of stretches that each begin with a checkpoint of the
whole state; a full ring loses its oldest stretch. Only if no checkpoint could be taken does it lose single
entries, and the record then says that its beginning is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeAlias

from pageturner.policies import registry
from pageturner.policies.interfaces import AXES, PolicySet
from pageturner.service.core.checkpoint import take_checkpoint
from pageturner.service.core.decisions import ChoiceEnded, Decision, Ended, PolicyFault, PolicyReplaced
from pageturner.service.core.flight import (
    Aborted,
    Added,
    Entry,
    Expired,
    Failed,
    FlightRecord,
    FlightStart,
    Paused,
    PoliciesSet,
    PolicyChoice,
    PolicyChoices,
    RowResult,
    Scheduled,
    Setting,
    Updated,
    pack_rows,
)
from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    Event,
    FinishedEvent,
    FinishReason,
    SampledSequence,
    SchedulerOutput,
    SchedulerStats,
    TokenEvent,
)
from pageturner.service.core.plain import Malformed, to_plain
from pageturner.service.core.policy_guard import AxisReport, PolicyReport
from pageturner.service.core.pseudonyms import Chain, Namer
from pageturner.service.core.recorded_request import RecordedRequest
from pageturner.service.core.request import NewRequest, Request, Sequence
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.errors import PageturnerError

ENTRIES_A_STEP = 2
"""A step is two entries, decided and taken; what comes between counts as well."""

STRETCHES = 4
"""A ring is cut into so many parts, and forgets them one by one."""


class RecordedError(PageturnerError):
    """Stands, in a replay, for an error of which the record holds the name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def error_name(error: BaseException | None) -> str:
    if error is None:
        return ""
    return error.name if isinstance(error, RecordedError) else type(error).__name__


@dataclass(slots=True)
class _Stretch:
    start: FlightStart | None
    entries: list[Entry] = field(default_factory=list)


class FlightRecorder:
    """Keeps the entries of about `num_steps` steps: at most ENTRIES_A_STEP times as many, of any kind.

    A step of 64 sequences takes 1.3 kB, in all the rest hardly more than its decisions.

    One thread adds; `record` may be called from any other.
    """

    def __init__(self, setting: Setting, start: FlightStart | None, num_steps: int) -> None:
        self.setting = setting
        self._max_entries = max(STRETCHES, num_steps * ENTRIES_A_STEP)
        self._stretches = [_Stretch(start)]
        self._num_entries = 0
        self._num_dropped = 0

    @property
    def wants_checkpoint(self) -> bool:
        """Whether the present stretch is long enough, or has lost its beginning."""
        current = self._stretches[-1]
        return current.start is None or len(current.entries) >= self._max_entries // STRETCHES

    def begin(self, start: FlightStart) -> None:
        """A new stretch: a replay can begin here."""
        self._stretches = [*self._stretches, _Stretch(start)]

    def add(self, entry: Entry) -> None:
        self._stretches[-1].entries.append(entry)
        self._num_entries += 1
        if self._num_entries <= self._max_entries:
            return
        oldest = self._stretches[0]
        num_lost = len(oldest.entries)
        if len(self._stretches) > 1:
            self._stretches = self._stretches[1:]
        else:
            num_lost = num_lost // STRETCHES + 1
            self._stretches = [_Stretch(None, oldest.entries[num_lost:])]
        self._num_entries -= num_lost
        self._num_dropped += num_lost

    def __len__(self) -> int:
        """Entries so far, dropped ones included."""
        return self._num_dropped + self._num_entries

    def record(self, reason: str) -> FlightRecord:
        """What is kept at this moment."""
        stretches, num_dropped = self._stretches, self._num_dropped
        entries: list[Entry] = []
        for stretch in stretches:
            entries += stretch.entries[:]
        return FlightRecord(reason, self.setting, stretches[0].start, num_dropped, tuple(entries))


def recorded_scheduler(
    scheduler: Scheduler, setting: Setting, *, name_key: bytes, num_steps: int
) -> RecordedScheduler:
    """A scheduler just made, recorded from its first call on."""
    start = FlightStart(policy_choices(scheduler.guard.policies))
    return RecordedScheduler(scheduler, FlightRecorder(setting, start, num_steps), name_key)


class RecordedScheduler:
    """A scheduler, every call of which is noted together with what came of it.

    name_key: secret of the names of blocks, at most 64 bytes; never written.
    """

    def __init__(self, scheduler: Scheduler, recorder: FlightRecorder, name_key: bytes) -> None:
        self.recorder = recorder
        self._scheduler = scheduler
        self._state = scheduler.state
        manager = scheduler.manager
        self._namer = Namer(manager.hasher, name_key, manager.block_size)
        self._chains = {name: self._chains_of(request) for name, request in self._state.requests.items()}
        self._decisions: list[Decision] = []
        self._state.decisions = self._decisions
        # Set where the clock moved and nobody ended: noted only if something reads it before the next step.
        self._unnoted_now: float | None = None

    # --- requests in and out ---------------------------------------------------------------

    def add_request(self, request: NewRequest) -> int:
        self._note_clock()
        chain = self._namer.start(request.prompt_token_ids, adapter=request.adapter, salt=request.cache_salt)
        entry = Added(self._state.now, RecordedRequest.of(request, tuple(chain.names)))
        before = self._standing()
        try:
            max_tokens = self._scheduler.add_request(request)
        except PageturnerError as error:
            self.recorder.add(replace(entry, refusal=error_name(error)))
            raise
        except Exception as error:
            self.recorder.add(replace(entry, raised=error_name(error)))
            raise
        self._chains[request.request_id] = [chain] + [chain.fork() for _ in range(request.params.n - 1)]
        self.recorder.add(replace(entry, max_tokens=max_tokens, decisions=self._changes(before)))
        return max_tokens

    def abort_request(self, request_id: str, error: PageturnerError) -> tuple[Event, ...]:
        self._note_clock()
        entry = Aborted(self._state.now, request_id, error_name(error))
        before = self._standing()
        try:
            events = self._scheduler.abort_request(request_id, error)
        except Exception as fault:
            self.recorder.add(replace(entry, raised=error_name(fault)))
            raise
        if events:
            self.recorder.add(replace(entry, decisions=self._ended(events) + self._changes(before)))
        return events

    def expire(self, now: float) -> tuple[Event, ...]:
        before = self._standing()
        try:
            events = self._scheduler.expire(now)
        except Exception as fault:
            self.recorder.add(Expired(now, raised=error_name(fault)))
            raise
        self._unnoted_now = None if events else now
        if events:
            self.recorder.add(Expired(now, self._ended(events) + self._changes(before)))
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
        before, in_force = self._standing(), self._state.guard.policies
        come = tuple(axis for axis in AXES if getattr(policies, axis) is not getattr(in_force, axis))
        entry = PoliciesSet(now, policy_choices(policies, come))
        try:
            self._scheduler.set_policies(policies, now, shadows=shadows)
        except Exception as fault:
            self.recorder.add(replace(entry, raised=error_name(fault)))
            raise
        self.recorder.add(replace(entry, decisions=self._changes(before)))

    def policy_report(self) -> PolicyReport:
        return self._scheduler.policy_report()

    def take_quarantined(self) -> tuple[AxisReport, ...]:
        return self._scheduler.take_quarantined()

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    # --- one step --------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput:
        if self.recorder.wants_checkpoint:
            self._begin_stretch()
        self._unnoted_now = None
        before = self._standing()
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
        before = self._standing()
        try:
            events = self._scheduler.update(output, sampled, now)
        except Exception as fault:
            results = self._results(output, sampled, ())
            self.recorder.add(Updated(now, output.step_id, results, raised=error_name(fault)))
            raise
        results = self._results(output, sampled, events)
        decisions = self._ended(events) + self._changes(before)
        self.recorder.add(Updated(now, output.step_id, results, decisions))
        return events

    def fail_step(self, output: SchedulerOutput, error: Exception, now: float) -> tuple[Event, ...]:
        self._unnoted_now = None
        entry = Failed(now, output.step_id, error_name(error))
        before = self._standing()
        try:
            events = self._scheduler.fail_step(output, error, now)
        except Exception as fault:
            self.recorder.add(replace(entry, raised=error_name(fault)))
            raise
        self.recorder.add(replace(entry, decisions=self._ended(events) + self._changes(before)))
        return events

    def _chains_of(self, request: Request) -> list[Chain]:
        """Of a request that lived before the recorder came; nobody asks for those of ended choices."""
        new = request.new
        return [
            Chain(b"")
            if sequence.is_finished
            else self._namer.start(sequence.tokens, adapter=new.adapter, salt=new.cache_salt)
            for sequence in request.sequences
        ]

    # --- what is noted ---------------------------------------------------------------------

    def _note_clock(self) -> None:
        if self._unnoted_now is not None:
            self.recorder.add(Expired(self._unnoted_now))
            self._unnoted_now = None

    def _begin_stretch(self) -> None:
        checkpoint = take_checkpoint(self._scheduler, self._names_of, self._namer.name_of)
        if checkpoint is not None:
            self._note_clock()
            self.recorder.begin(FlightStart(policy_choices(self._state.guard.policies), checkpoint))

    def _names_of(self, sequence: Sequence) -> tuple[int, ...]:
        return tuple(self._chains[sequence.request.request_id][sequence.index].names)

    def _taken(self, before: _Standing) -> tuple[Decision, ...]:
        """What the last schedule decided."""
        changes = self._changes(before)
        if not self._decisions:
            return changes
        decisions = tuple(self._decisions) + changes
        self._decisions.clear()
        return decisions

    def _standing(self) -> _Standing:
        guard = self._state.guard
        return guard.names, dict(guard.faults)

    def _changes(self, before: _Standing) -> tuple[Decision, ...]:
        """Faults of policies since then, and those that another one replaced."""
        names, faults = before
        guard = self._state.guard
        if guard.names is names and guard.faults == faults:
            return ()
        counts = ((axis, guard.faults[axis] - faults.get(axis, 0)) for axis in AXES)
        return (
            *(PolicyFault(axis, names[axis], count) for axis, count in counts if count),
            *(
                PolicyReplaced(axis, names[axis], guard.names[axis])
                for axis in AXES
                if names[axis] != guard.names[axis]
            ),
        )

    def _ended(self, events: tuple[Event, ...]) -> tuple[Decision, ...]:
        decisions: list[Decision] = []
        for event in events:
            if isinstance(event, TokenEvent):
                continue
            if isinstance(event, ChoiceFinishedEvent):
                decisions.append(ChoiceEnded(event.request_id, event.index, event.reason.value))
            elif isinstance(event, FinishedEvent):
                self._chains.pop(event.request_id, None)
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

    def _results(
        self, output: SchedulerOutput, sampled: tuple[SampledSequence, ...], events: tuple[Event, ...]
    ) -> tuple[RowResult, ...]:
        """The results that are not the common one: a token taken, no block completed, no end.

        Tokens enter the chains here, so this comes before `_ended`, which forgets them.
        """
        names: dict[tuple[str, int], list[int]] = {}
        stopped: set[tuple[str, int]] = set()
        num_common = 0
        chains, block_size, append = self._chains, self._namer.block_size, self._namer.append
        for event in events:
            if isinstance(event, TokenEvent):
                chain, tokens = chains[event.request_id][event.index], event.tokens
                if len(tokens) == 1 and len(chain.tail) + 1 < block_size:
                    chain.tail.append(tokens[0].token_id)
                    num_common += 1
                else:
                    names[event.request_id, event.index] = [append(chain, t.token_id) for t in tokens]
            elif isinstance(event, ChoiceFinishedEvent) and event.reason is FinishReason.STOP:
                stopped.add((event.request_id, event.index))
        if num_common == len(sampled) and not stopped:
            return ()
        choices = [(part.request_id, row.index) for part in output.scheduled for row in part.samples]
        results = []
        for row, (choice, result) in enumerate(zip(choices, sampled, strict=True)):
            completed = names.get(choice) or [0] * len(result.tokens)
            noted = RowResult(row, tuple(completed), choice in stopped, error_name(result.error))
            if noted != RowResult(row, (0,)):
                results.append(noted)
        return tuple(results)


_Standing: TypeAlias = tuple[Mapping[str, str], dict[str, int]]
"""Names of the policies in force and the faults of each axis, at one moment."""


def policy_choices(policies: PolicySet, axes: tuple[str, ...] = AXES) -> PolicyChoices:
    """The names and options of these axes' policies; an option with no plain form as its repr."""
    chosen = {axis: getattr(policies, axis) for axis in axes}
    return {
        axis: PolicyChoice(
            registry.name_of(policy),
            {name: _plain_or_repr(value) for name, value in registry.options_of(policy).items()},
        )
        for axis, policy in chosen.items()
    }


def _plain_or_repr(value: object) -> object:
    try:
        return to_plain(value)
    except Malformed:
        return repr(value)
