"""The flight recorder: listens to a scheduler, and keeps the last of what it was told and decided."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from pageturner.policies.interfaces import AXES, PolicySet
from pageturner.service.core.decisions import ChoiceEnded, Decision, Ended, PolicyFault, PolicyReplaced
from pageturner.service.core.listener import (
    AbortRequest,
    AddRequest,
    Call,
    CallOutcome,
    EndTransfers,
    Expire,
    FailStep,
    PauseRequest,
    Quarantine,
    ResumeRequest,
    Schedule,
    SetPolicies,
    Update,
)
from pageturner.service.core.outputs import (
    Acceptance,
    ChoiceFinishedEvent,
    Event,
    FinishedEvent,
    FinishReason,
    SchedulerOutput,
    TokenEvent,
)
from pageturner.service.core.request import NewRequest, Sequence
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.errors import PageturnerError, TextFailed
from pageturner.service.flight import beams
from pageturner.service.flight.block_names import name_of, names_of, names_of_prompt
from pageturner.service.flight.checkpoint import take_checkpoint
from pageturner.service.flight.records import (
    Aborted,
    Added,
    Entry,
    Expired,
    Failed,
    FlightRecord,
    FlightStart,
    PartialName,
    Paused,
    PoliciesSet,
    PolicySpecs,
    Quarantined,
    RecordedChoice,
    RecordedRequest,
    RowResult,
    Scheduled,
    Setting,
    Transferred,
    Updated,
    error_name,
    pack_found_drafts,
    pack_rows,
    results_of,
)
from pageturner.service.flight.ring import EntryRing
from pageturner.service.policy_host.calls import safe_spec
from pageturner.service.policy_host.host import PolicyHost


class FlightRecorder:
    """Listens to `scheduler` from now on: a `core.listener.SchedulerListener`.

    start: where a replay begins; by default the scheduler as it was made, with its policies. num_steps: about
    as many are kept. The scheduler's thread writes; `record` may be called from any other.
    """

    def __init__(
        self, scheduler: Scheduler, setting: Setting, num_steps: int, start: FlightStart | None = None
    ) -> None:
        self._scheduler = scheduler
        self._state = scheduler.state
        self._manager = scheduler.manager
        self._policy_host = scheduler.policy_host
        self._setting = setting
        self._num_steps = num_steps
        self._start = start or FlightStart(policy_specs(scheduler.policy_host.policies))
        self._ring = EntryRing(setting, self._start, num_steps)
        self._standing = _PolicyStanding(scheduler.policy_host)
        # Set where the clock moved and no request ended: noted only if a call reads it before the next step.
        self._unnoted_now: float | None = None
        self._new_specs: PolicySpecs = {}
        # For each result of the step that is being taken: its sequence if it lives, and its tokens before.
        self._samples: list[tuple[Sequence | None, int]] = []
        self._has_beams = False
        self._manager.noted_hashes = {}
        if self._manager.tiers is not None:
            self._manager.tiers.found = {}
        scheduler.add_listener(self)

    def __len__(self) -> int:
        """Entries so far, dropped ones included."""
        return len(self._ring)

    def record(self, reason: str) -> FlightRecord:
        """What is kept at this moment."""
        return self._ring.record(reason)

    def forget(self) -> None:
        """Keep nothing of what was, as a replay does that compares one call at a time."""
        self._ring = EntryRing(self._setting, self._start, self._num_steps)

    # --- as a listener ---------------------------------------------------------------------

    def before(self, call: Call) -> None:
        """Look at what the call is about to change; where a stretch is full, take a checkpoint."""
        match call:
            case AddRequest() | AbortRequest():
                self._note_clock()
            case Schedule():
                if self._ring.wants_checkpoint:
                    self._begin_stretch()
            case SetPolicies(policies):
                in_force = self._policy_host.policies
                new = (axis for axis in AXES if getattr(policies, axis) is not getattr(in_force, axis))
                self._new_specs = policy_specs(policies, tuple(new))
            case Update(output):
                sequences = self._state.sequences
                self._has_beams = bool(self._state.searching)
                self._samples = [
                    (None, 0) if sequence is None else (sequence, len(sequence.tokens))
                    for row in results_of(output)
                    for sequence in (sequences.get(row.seq_id),)
                ]
        if isinstance(call, (Schedule, Update, FailStep, SetPolicies, Quarantine, EndTransfers)):
            self._unnoted_now = None
        self._standing = _PolicyStanding(self._policy_host)

    def after(self, call: Call, outcome: CallOutcome) -> None:
        """Keep an entry of the call, unless it made no difference."""
        answer = outcome.answer
        events = (
            answer.events if isinstance(answer, Acceptance) else answer if isinstance(answer, tuple) else ()
        )
        decisions = (*outcome.decisions, *_ends(events), *self._standing.changes())
        entry = self._entry(call, outcome, events, decisions, error_name(outcome.error))
        if entry is not None:
            self._ring.add(entry)

    def _entry(
        self,
        call: Call,
        outcome: CallOutcome,
        events: tuple[Event, ...],
        decisions: tuple[Decision, ...],
        raised: str,
    ) -> Entry | None:
        now = self._state.now
        match call:
            case AddRequest(new):
                return self._added(new, outcome, decisions, raised)
            case AbortRequest(request_id, error) if events or raised:
                return Aborted(now, request_id, error_name(error), decisions, raised)
            case Expire(now) if events or raised:
                self._unnoted_now = None
                return Expired(now, decisions, raised)
            case Expire(now):
                self._unnoted_now = now
            case PauseRequest(request_id):
                return Paused(now, request_id, is_paused=True, decisions=decisions, raised=raised)
            case ResumeRequest(request_id):
                return Paused(now, request_id, is_paused=False, decisions=decisions, raised=raised)
            case SetPolicies(_, now):
                return PoliciesSet(now, self._new_specs, decisions, raised)
            case Quarantine(axis, reason, now):
                return Quarantined(now, axis, reason, decisions, raised)
            case Schedule(now):
                names, found = self._partial_names(), self._found_on_disk()
                if raised:
                    return Scheduled(
                        now, 0, decisions=decisions, raised=raised, partial_names=names, on_disk=found
                    )
                output = cast(SchedulerOutput, outcome.answer)
                step_id = output.step_id if output else 0
                rows, copies = pack_rows(output), output.block_copies
                drafts = pack_found_drafts(self._state.found_drafts) if self._state.found_drafts else b""
                return Scheduled(
                    now,
                    step_id,
                    rows,
                    copies,
                    decisions,
                    partial_names=names,
                    found_drafts=drafts,
                    on_disk=found,
                )
            case Update(output, _, now):
                beam_names = beams.block_names(self._manager, self._samples) if self._has_beams else ()
                results, names = self._results(call, events), self._partial_names()
                return Updated(now, output.step_id, results, decisions, raised, names, beam_names)
            case FailStep(output, error, now):
                return Failed(now, output.step_id, error_name(error), decisions, raised)
            case EndTransfers(ended, now):
                return Transferred(now, ended, decisions, raised)
        return None

    # --- what is noted ---------------------------------------------------------------------

    def _note_clock(self) -> None:
        if self._unnoted_now is not None:
            self._ring.add(Expired(self._unnoted_now))
            self._unnoted_now = None

    def _begin_stretch(self) -> None:
        checkpoint = take_checkpoint(self._scheduler)
        if checkpoint is not None:
            self._note_clock()
            self._ring.begin(FlightStart(policy_specs(self._policy_host.policies), checkpoint))

    def _added(
        self, new: NewRequest, outcome: CallOutcome, decisions: tuple[Decision, ...], raised: str
    ) -> Added:
        now, hasher = self._state.now, self._manager.hasher
        if isinstance(outcome.error, PageturnerError):
            return Added(now, RecordedRequest.of(new, ()), refusal=raised, decisions=decisions)
        if raised:
            names = names_of_prompt(hasher, new, self._manager.block_size) if hasher is not None else ()
            return Added(now, RecordedRequest.of(new, names), decisions=decisions, raised=raised)
        acceptance = cast(Acceptance, outcome.answer)
        request = self._state.requests.get(new.request_id)
        if request is None:  # it was resumed, and has ended: no block of it was looked for
            names, resumed = (), self._resumed(new, (), acceptance)
        else:
            names = names_of(self._manager, request.sequences[0], len(new.prompt_token_ids))
            resumed = self._resumed(new, tuple(request.sequences), acceptance)
        recorded = RecordedRequest.of(new, names, resumed)
        return Added(now, recorded, acceptance.max_tokens, decisions=decisions)

    def _resumed(
        self, new: NewRequest, sequences: tuple[Sequence, ...], acceptance: Acceptance
    ) -> tuple[RecordedChoice, ...]:
        """What was known of each choice, for a replay. sequences: of the request if it lives."""
        num_shared = len(new.prompt_token_ids) // self._manager.block_size
        stopped = {
            event.index
            for event in acceptance.events
            if isinstance(event, ChoiceFinishedEvent) and event.reason is FinishReason.STOP
        }
        recorded = []
        for index, choice in enumerate(new.resumed):
            names: tuple[int, ...] = ()
            if sequences and not sequences[index].is_finished:
                names = names_of(self._manager, sequences[index], sequences[index].num_given_tokens)[
                    num_shared:
                ]
            num_tokens = len(choice.token_ids)
            is_stopped = index in stopped or (choice.is_finished and num_tokens < acceptance.max_tokens)
            recorded.append(RecordedChoice(num_tokens, names, is_stopped, choice.is_finished))
        return tuple(recorded)

    def _results(self, call: Update, events: tuple[Event, ...]) -> tuple[RowResult, ...]:
        """Those that are not the common one: a token taken, no block completed, no end."""
        stopped, without_text = set(), set()
        for event in events:
            if isinstance(event, ChoiceFinishedEvent) and event.reason is FinishReason.STOP:
                stopped.add((event.request_id, event.index))
            elif isinstance(event, FinishedEvent) and isinstance(event.error, TextFailed):
                without_text.add(event.request_id)
        told = {
            (event.request_id, event.index)
            for event in (events if without_text else ())
            if isinstance(event, TokenEvent)
        }
        has_common_end = not stopped and not without_text
        block_size = self._manager.block_size
        results = []
        # A scheduler that raised may have been given other results than it asked for.
        for row, ((sequence, num_before), result) in enumerate(
            zip(self._samples, call.sampled, strict=False)
        ):
            if (
                self._has_beams
                and sequence is not None
                and sequence.request.beams is not None
                and result.tokens
            ):
                failed = sequence.request.request_id in without_text
                results.append(beams.recorded(row, sequence.request, result.tokens[0], has_no_text=failed))
                continue
            num_now = num_before if sequence is None else len(sequence.tokens)
            if result.scores:
                continue  # nothing hangs on them
            if has_common_end and num_now == num_before + 1 and num_now % block_size and result.error is None:
                continue
            names = tuple(self._name(sequence, end) for end in range(num_before + 1, num_now + 1))
            noted = RowResult(row, names or (0,) * len(result.tokens), error=error_name(result.error))
            if sequence is not None:
                request_id = sequence.request.request_id
                noted = replace(noted, is_stopped=(request_id, sequence.index) in stopped)
                if request_id in without_text and (request_id, sequence.index) not in told:
                    without_text.remove(request_id)  # the first one; the request has ended with it
                    noted = replace(noted, has_no_text=True)
            if noted != RowResult(row, (0,)):
                results.append(noted)
        self._samples = []
        return tuple(results)

    def _partial_names(self) -> tuple[PartialName, ...]:
        """Of the partial blocks of which hashes were asked for since the last call."""
        noted = self._manager.noted_hashes
        if not noted:
            return ()
        self._manager.noted_hashes = {}
        return tuple(PartialName(*place, name_of(block_hash)) for place, block_hash in noted.items())

    def _found_on_disk(self) -> tuple[int, ...]:
        """Names of the blocks that the disk was found to hold since the last call."""
        tiers = self._manager.tiers
        if tiers is None or not tiers.found:
            return ()
        found, tiers.found = tiers.found, {}
        return tuple(map(name_of, found))

    def _name(self, sequence: Sequence | None, num_tokens: int) -> int:
        """The name of the block that its num_tokens-th token completes, or 0. An ended choice needs none, but
        of a block that drafts filled in the step that ended it."""
        size = self._manager.block_size
        if sequence is None or num_tokens % size or not self._manager.caches_prefixes:
            return 0
        index = num_tokens // size - 1
        if sequence.is_finished and index >= len(sequence.block_hashes):
            return 0
        return name_of(self._manager.block_hash(sequence, index))


def _ends(events: tuple[Event, ...]) -> list[Decision]:
    ends: list[Decision] = []
    for event in events:
        if isinstance(event, TokenEvent):
            continue
        if isinstance(event, ChoiceFinishedEvent):
            ends.append(ChoiceEnded(event.request_id, event.index, event.reason.value))
        elif isinstance(event, FinishedEvent):
            usage, timings = event.usage, event.timings
            ends.append(
                Ended(
                    event.request_id,
                    error_name(event.error),
                    usage.num_output_tokens,
                    usage.num_cached_prompt_tokens,
                    timings.queue_seconds,
                    timings.num_swaps + timings.num_recomputes + timings.num_tail_reclaims,
                )
            )
    return ends


# --- policies ------------------------------------------------------------------------------


def policy_specs(policies: PolicySet, axes: tuple[str, ...] = AXES) -> PolicySpecs:
    """The names and options of these axes' policies; an option with no plain form as its repr."""
    return {axis: safe_spec(getattr(policies, axis)) for axis in axes}


class _PolicyStanding:
    """The policies in force and the faults of each axis, at the moment this is made."""

    __slots__ = ("_faults", "_names", "_policy_host")

    def __init__(self, host: PolicyHost) -> None:
        self._policy_host = host
        self._names = host.names
        self._faults = dict(host.faults)

    def changes(self) -> tuple[Decision, ...]:
        """Faults of policies since then, and those that another one replaced."""
        host, names, faults = self._policy_host, self._names, self._faults
        if host.names is names and host.faults == faults:
            return ()
        counts = ((axis, host.faults[axis] - faults.get(axis, 0)) for axis in AXES)
        return (
            *(PolicyFault(axis, names[axis], count) for axis, count in counts if count),
            *(
                PolicyReplaced(axis, names[axis], host.names[axis])
                for axis in AXES
                if names[axis] != host.names[axis]
            ),
        )
