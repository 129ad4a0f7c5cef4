"""A flight record in words: what happened to one request, in order of time, and which policy decided it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pageturner.policies.interfaces import Reclaim
from pageturner.service.core.decisions import (
    AdmissionsHeld,
    Admitted,
    AwaitsProducer,
    ChoiceEnded,
    CoreRule,
    Decision,
    Ended,
    Fetches,
    GuardedChosen,
    Overtaken,
    PolicyReplaced,
    Preempted,
    Refused,
    Stalled,
)
from pageturner.service.core.request import RequestStatus
from pageturner.service.errors import PageturnerError
from pageturner.service.flight.records import Added, Entry, FlightRecord, Paused, RequestState, Scheduled
from pageturner.service.identity import is_id_of

_MAX_SHOWN = 8
"""Ids that a message lists."""


class NotInRecord(PageturnerError):
    """The record says nothing of this request."""


class AmbiguousRequest(PageturnerError):
    """Requests of several tenants have this id."""


@dataclass(frozen=True, slots=True)
class Line:
    """seconds: since the request arrived. count: in how many steps in a row this was so."""

    seconds: float
    text: str
    count: int = 1

    def __str__(self) -> str:
        again = f" ({self.count} steps)" if self.count > 1 else ""
        return f"{self.seconds:10.3f} s  {self.text}{again}"


def explain(record: FlightRecord, request_id: str) -> tuple[Line, ...]:
    """Its latest life, should the id have been used more than once.

    request_id: as the scheduler knows it (TENANT/ID where authentication is on), or as its client does.
    Raises NotInRecord, or AmbiguousRequest where clients of several tenants chose it.
    """
    request_id = _find(record, request_id)
    first, told = 0, _told_at_start(record, request_id)
    for index, entry in enumerate(record.entries):
        if isinstance(entry, Added) and entry.request.request_id == request_id:
            first, told = index, _RequestHistory(request_id, entry.request.arrival_time)
    if told is None:
        told = _RequestHistory(request_id, _first_mention(record, request_id))
    for entry in record.entries[first:]:
        told.take(entry)
    return tuple(told.lines)


def _find(record: FlightRecord, request_id: str) -> str:
    """The id as the scheduler knows it. An exact one goes before those of which it is a part."""
    found = sorted({name for name in _mentioned(record) if is_id_of(name, request_id)})
    if request_id in found or len(found) < 2:
        return request_id if request_id in found or not found else found[0]
    shown = ", ".join(found[:_MAX_SHOWN]) + (", ..." if len(found) > _MAX_SHOWN else "")
    raise AmbiguousRequest(f"{request_id!r} is a request of {len(found)} tenants; name one of {shown}")


def _mentioned(record: FlightRecord) -> Iterator[str]:
    checkpoint = None if record.start is None else record.start.checkpoint
    if checkpoint is not None:
        yield from (state.request.request_id for state in checkpoint.requests)
    for entry in record.entries:
        if isinstance(entry, Added):
            yield entry.request.request_id
        for decision in entry.decisions:
            yield from _named(decision)


def _told_at_start(record: FlightRecord, request_id: str) -> _RequestHistory | None:
    checkpoint = None if record.start is None else record.start.checkpoint
    for state in () if checkpoint is None else checkpoint.requests:
        if state.request.request_id == request_id and checkpoint is not None:
            history = _RequestHistory(request_id, state.request.arrival_time)
            history.begin(state, checkpoint.scheduler.now)
            return history
    return None


def _first_mention(record: FlightRecord, request_id: str) -> float:
    for entry in record.entries:
        if any(request_id in _named(decision) for decision in entry.decisions):
            return entry.now
    lost = f"; {record.num_dropped} earlier entries are gone" if record.num_dropped else ""
    raise NotInRecord(f"no request {request_id!r} in this record of {len(record.entries)} entries{lost}")


def _named(decision: Decision) -> tuple[str, ...]:
    named = (getattr(decision, field, "") for field in ("request_id", "claimant", "by", "producer"))
    return tuple(filter(None, named))


class _RequestHistory:
    """lines: so far."""

    def __init__(self, request_id: str, arrival: float) -> None:
        self.lines: list[Line] = []
        self._id = request_id
        self._arrival = arrival
        self._queued_at = arrival
        self._is_waiting = False
        self._is_over = False
        self._last_kind: object = None

    def begin(self, state: RequestState, now: float) -> None:
        """The record begins when it was alive already."""
        self._is_waiting = state.status is not RequestStatus.RUNNING
        queued_since = state.fields["queued_since"]
        self._queued_at = queued_since if isinstance(queued_since, float) else self._arrival
        self._say(now, f"{state.status.value} when the record begins")

    def take(self, entry: Entry) -> None:
        """The next entry of the record."""
        if self._is_over:
            return
        if isinstance(entry, Added) and entry.request.request_id == self._id:
            self._add(entry)
        if isinstance(entry, Paused) and entry.request_id == self._id:
            reader = "its reader lags behind: paused" if entry.is_paused else "its reader reads on: resumed"
            self._say(entry.now, reader)
        num_lines, was_waiting = len(self.lines), self._is_waiting
        counts = sum(line.count for line in self.lines)
        for decision in entry.decisions:
            self._decide(entry.now, decision)
        is_untold = len(self.lines) == num_lines and sum(line.count for line in self.lines) == counts
        if isinstance(entry, Scheduled):
            if was_waiting and is_untold:
                for decision in entry.decisions:
                    if isinstance(decision, AdmissionsHeld):
                        self._say(entry.now, _held(decision), kind=(decision.by, decision.after))
            if entry.raised:
                self._say(entry.now, f"the scheduler itself failed: {entry.raised}")

    def _add(self, entry: Added) -> None:
        request = entry.request
        facts = [_count(request.num_prompt_tokens, "prompt token")]
        if entry.refusal:
            self._say(request.arrival_time, f"refused on arrival ({', '.join(facts)}): {entry.refusal}")
            self._is_over = True
            return
        known = sum(choice.num_tokens for choice in request.resumed)
        if request.is_scoring:
            facts.append(f"{_count(known, 'token')} of {_count(request.n, 'continuation')} to score")
        else:
            facts.append(f"at most {_count(entry.max_tokens, 'output token')}")
        if request.resumed and not request.is_scoring:
            facts.append(f"resumed with {known} of them")
        if request.n > 1 and not request.is_scoring:
            facts.append(f"{request.n} choices")
        if request.scores_prompt:
            facts.append("the prompt to score")
        if request.beam_search is not None:
            facts.append(f"the best of {request.beam_search.width} beams")
        if request.priority:
            facts.append(f"priority {request.priority}")
        if request.tenant:
            facts.append(f"tenant {request.tenant}")
        self._is_waiting, self._queued_at = True, request.arrival_time
        self._say(request.arrival_time, f"queued: {', '.join(facts)}")

    def _decide(self, now: float, decision: Decision) -> None:
        match decision:
            case Admitted(request_id) if request_id == self._id:
                seconds = now - self._queued_at
                self._say(now, f"{_admitted(decision, seconds)}")
                self._is_waiting = False
            case Refused(request_id) if request_id == self._id:
                self._say(now, _refused(decision), kind=(Refused, decision.by))
            case AwaitsProducer(request_id, producer) if request_id == self._id:
                self._say(now, f"waited for {producer}, which computes blocks of the same prefix")
            case Fetches(request_id, num_blocks) if request_id == self._id:
                self._say(now, f"waited for {_count(num_blocks, 'block')} of its prefix to be read from disk")
            case Overtaken(request_id, by) if request_id == self._id:
                self._say(now, f"overtaken by {by}, which was admitted")
            case Preempted(request_id) if request_id == self._id:
                self._say(now, _preempted(decision))
                self._is_waiting, self._queued_at = True, now
            case Preempted(request_id, claimant) if claimant == self._id:
                self._say(now, f"{request_id} was preempted for it by {decision.how.value}")
            case Stalled(request_id) if request_id == self._id:
                until = (
                    "some in flight come free next"
                    if decision.awaits_pending
                    else "no request is preempted for it"
                )
                self._say(
                    now, f"stalled: {_count(decision.num_blocks_short, 'block')} short, {until}", Stalled
                )
            case GuardedChosen(request_id, reason) if request_id == self._id:
                self._say(now, f"became the guarded request ({reason.value}): no policy can hold it back")
            case PolicyReplaced(axis, policy, successor):
                self._say(now, f"{axis} policy {policy} was replaced by {successor}")
            case ChoiceEnded(request_id, index, reason) if request_id == self._id:
                self._say(now, f"choice {index} ended: {reason}")
            case Ended(request_id) if request_id == self._id:
                self._say(now, _ended(decision))
                self._is_over = True

    def _say(self, now: float, text: str, kind: object = None) -> None:
        """The same thing in a row is said once, as it was at first."""
        kind = text if kind is None else kind
        if self.lines and kind == self._last_kind:
            self.lines[-1] = replace(self.lines[-1], count=self.lines[-1].count + 1)
            return
        self._last_kind = kind
        self.lines.append(Line(now - self._arrival, text))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _admitted(decision: Admitted, seconds: float) -> str:
    verb = (
        "admitted" if decision.is_first else "swapped in and resumed" if decision.was_swapped else "resumed"
    )
    by = {
        CoreRule.GUARDED.value: "as the guarded request, whatever the policies say",
        CoreRule.CLAIM.value: "since others were preempted for it",
    }.get(decision.by, f"by admission policy {decision.by}")
    cached = decision.num_cached_tokens
    hits = f"; {_count(cached, 'token')} of it were cached" if cached and not decision.was_swapped else ""
    return f"{verb} after {seconds:.3f} s in the queue, {by}{hits}"


def _refused(decision: Refused) -> str:
    parts = []
    if decision.num_blocks:
        parts.append(f"needs {_count(decision.num_blocks, 'block')}, {decision.num_available} available")
        if decision.num_promised:
            parts[-1] += f" of which {decision.num_promised} are promised"
        if decision.watermark_blocks:
            parts[-1] += f", watermark {decision.watermark_blocks}"
    if decision.num_slots_short:
        parts.append(f"{_count(decision.num_slots_short, 'slot')} short of max_num_seqs")
    why = f" ({'; '.join(parts)})" if parts else ""
    match decision.by:
        case CoreRule.CAPACITY.value:
            return f"not admitted: it does not fit{why}"
        case CoreRule.PENDING.value:
            return f"not admitted yet: blocks of the step in flight come free next{why}"
        case CoreRule.BUDGET.value:
            return f"not admitted: the step's token budget is spent{why}"
        case CoreRule.DEADLINES.value:
            return "not admitted yet: it would be late, or make a running request late, beside those that run"
    return f"not admitted by admission policy {decision.by}{why}"


def _held(decision: AdmissionsHeld) -> str:
    after = f" after {decision.after}" if decision.after else ""
    why = {
        CoreRule.BUDGET.value: (
            f"the step's token budget was spent, as batch policy {decision.batch} split it"
        ),
        CoreRule.MAX_BYPASSES.value: "one that was overtaken often enough goes first",
        CoreRule.DEADLINES.value: "no more may run side by side for the deadlines to be met",
        CoreRule.MAX_SKIPS.value: "no step looks past more than max_skips",
    }.get(decision.by, f"admission policy {decision.by} said wait")
    return f"stood behind in the order of queue policy {decision.queue}; admissions stopped{after}: {why}"


def _preempted(decision: Preempted) -> str:
    how = {
        Reclaim.SWAP: "preempted by swap",
        Reclaim.RECOMPUTE: "preempted by recompute",
        Reclaim.TAIL: "cut at its tail",
    }[decision.how]
    short = []
    if decision.num_blocks_short:
        short.append(_count(decision.num_blocks_short, "block"))
    if decision.num_slots_short:
        short.append(_count(decision.num_slots_short, "slot"))
    whom = "itself" if decision.claimant == decision.request_id else decision.claimant
    chosen = {
        CoreRule.HOLDERS_FIRST.value: "waiting requests that hold blocks are preempted first",
        CoreRule.PAUSED_FIRST.value: "requests whose reader lags are preempted first",
    }.get(
        decision.chosen_by,
        f"victim policy {decision.chosen_by} ranked it {decision.rank} of {decision.num_candidates}",
    )
    by = {
        CoreRule.WHOLE.value: "it had only this way",
        CoreRule.CAPACITY.value: "there was room for nothing else",
        CoreRule.DEFAULT.value: "the default reclaim policy chose how",
    }.get(decision.how_by, f"reclaim policy {decision.how_by} chose how")
    return f"{how} for {whom}, which lacked {' and '.join(short)}: {chosen}; {by}"


def _ended(decision: Ended) -> str:
    facts = [_count(decision.num_output_tokens, "output token")]
    facts.append(f"{decision.queue_seconds:.3f} s in the queue")
    if decision.num_preemptions:
        facts.append(f"preempted {_count(decision.num_preemptions, 'time')}")
    return f"{f'ended by {decision.error}' if decision.error else 'finished'}: {', '.join(facts)}"
