"""Runs a flight record again, through the real scheduler, and compares every decision.

The scheduler is told what it was told then, by the same clock; tokens are stand-ins (`block_names`), the
model's results and where a choice stopped are the recorded ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from pageturner.policies import registry
from pageturner.policies.errors import PolicyError
from pageturner.policies.interfaces import AXES, PolicySet
from pageturner.policies.spec import PolicySpec
from pageturner.service.core.drafting.ngram_index import Drafts
from pageturner.service.core.outputs import (
    SampledSequence,
    SampledToken,
    SchedulerOutput,
    ScoreRun,
    TextDelta,
)
from pageturner.service.core.request import NewRequest, Sequence
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.errors import InvalidArgument, PageturnerError, TextFailed
from pageturner.service.flight import beams
from pageturner.service.flight.block_names import NameHasher, hash_of
from pageturner.service.flight.checkpoint import restore_checkpoint
from pageturner.service.flight.former_versions import as_it_was
from pageturner.service.flight.recorder import FlightRecorder
from pageturner.service.flight.records import (
    LOW,
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
    RecordedError,
    Scheduled,
    Transferred,
    Updated,
    results_of,
    unpack_found_drafts,
)


class CannotReplay(PageturnerError):
    """The record holds no moment to begin at, or a policy that is not here."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first entry that came out otherwise. index: from 0. step_id: of its step, or of the one before."""

    index: int
    step_id: int
    recorded: Entry
    replayed: Entry


@dataclass(frozen=True, slots=True)
class Replay:
    """num_steps: steps that were decided again, up to a difference if there is one."""

    num_steps: int
    num_entries: int
    difference: Difference | None


def replay(record: FlightRecord) -> Replay:
    """Raises CannotReplay."""
    if record.start is None:
        raise CannotReplay(
            f"its beginning is lost: {record.num_dropped} entries before it were dropped, "
            "and no checkpoint was taken since"
        )
    player = _Player(record, record.start)
    num_steps = step_id = 0
    for index, entry in enumerate(record.entries):
        again = player.play(entry)
        if isinstance(entry, Scheduled):
            num_steps += entry.step_id > 0
            step_id = entry.step_id or step_id
        if again != entry:
            return Replay(num_steps, index + 1, Difference(index, step_id, entry, again))
    return Replay(num_steps, len(record.entries), None)


_START_ERRORS: Mapping[str, Exception] = MappingProxyType(
    {
        TextFailed.__name__: RuntimeError("recorded"),
        InvalidArgument.__name__: InvalidArgument("resume", "recorded"),
    }
)
"""What raises again, by the name of a refusal that hangs on a request's tokens."""


class _Stops:
    """A stop condition that stops, and fails, where that of the recorded choice did.

    num_left: tokens of the step until a choice stops, or its text fails, by sequence. without_text: sequences
    of which it is the text that fails. start_error: of the request that is being added.
    """

    def __init__(self) -> None:
        self.num_left: dict[int, int] = {}
        self.without_text: set[int] = set()
        self.start_error: Exception | None = None

    def start(self, seq_id: int, request: NewRequest) -> None:
        if self.start_error is not None:
            raise self.start_error

    def append(self, seq_id: int, token_id: int, *, may_stop: bool, is_stop_token: bool) -> TextDelta:
        if seq_id not in self.num_left:
            return TextDelta("")
        self.num_left[seq_id] -= 1
        if self.num_left[seq_id]:
            return TextDelta("")
        if seq_id in self.without_text:
            raise RecordedError("text")
        return TextDelta("", matched_stop="recorded")

    def finish(self, seq_id: int) -> str:
        return ""


class _Disk:
    """Holds what the recorded disk was found to hold. hashes: in the step that is being decided."""

    num_blocks = 0

    def __init__(self) -> None:
        self.hashes: frozenset[bytes] = frozenset()

    def holds(self, block_hash: bytes) -> bool:
        return block_hash in self.hashes


class _Player:
    """The scheduler of one replay, itself recorded."""

    def __init__(self, record: FlightRecord, start: FlightStart) -> None:
        setting = record.setting
        self._block_size = setting.cache.block_size
        self._stops = _Stops()
        self._drafter = _FoundDrafts()
        self._disk = _Disk()
        scheduler = Scheduler(
            setting.options,
            setting.cache,
            _created(start.policies),
            self._stops,
            setting.rates,
            depth=setting.depth,
            hasher=NameHasher(),
            speculation=setting.speculation,
            drafter=self._drafter,
            disk=self._disk if setting.cache.num_disk_cache_blocks else None,
        )
        if start.checkpoint is not None:
            restore_checkpoint(scheduler, start.checkpoint)
        self._scheduler = scheduler
        self._recorder = FlightRecorder(scheduler, setting, 1, start)
        self._policy_host = scheduler.policy_host
        self._in_flight: dict[int, SchedulerOutput] = {}

    def play(self, entry: Entry) -> Entry:
        """What the same call comes to now: an entry to compare with the recorded one.

        A scheduler that raises has its exception in the entry, so that a fault is a decision like others.
        """
        self._recorder.forget()
        try:
            self._call(entry)
        except Exception as error:
            if not len(self._recorder):
                raise CannotReplay(f"the record does not fit together: {error!r}") from error
        noted = self._recorder.record("").entries
        again: Entry = noted[-1] if noted else replace(entry, decisions=(), raised="")
        # What was told is no decision, and its names of blocks were hashed under another key.
        if isinstance(entry, Added) and isinstance(again, Added):
            again = replace(again, request=entry.request)
        if isinstance(entry, Updated) and isinstance(again, Updated):
            again = replace(
                again,
                results=entry.results,
                partial_names=entry.partial_names,
                beam_names=entry.beam_names,
            )
        if isinstance(entry, Scheduled) and isinstance(again, Scheduled):
            again = replace(again, partial_names=entry.partial_names, on_disk=entry.on_disk)
        return again

    def _call(self, entry: Entry) -> None:
        scheduler = self._scheduler
        if isinstance(entry, (Scheduled, Updated)):
            for named in entry.partial_names:
                self._name_partial_block(named)
        match entry:
            case Added():
                self._start_texts(entry)
                scheduler.add_request(entry.request.stand_in(self._block_size))
            case Aborted():
                scheduler.abort_request(entry.request_id, RecordedError(entry.error))
            case Expired():
                scheduler.expire(entry.now)
            case Paused():
                change = scheduler.pause_request if entry.is_paused else scheduler.resume_request
                change(entry.request_id)
            case PoliciesSet():
                come = {axis: _created_one(axis, choice) for axis, choice in entry.policies.items()}
                policies: Any = {axis: getattr(self._policy_host.policies, axis) for axis in AXES} | come
                scheduler.set_policies(PolicySet(**policies), entry.now)
            case Quarantined():
                scheduler.quarantine(entry.axis, entry.reason, entry.now)
            case Scheduled():
                self._drafter.by_sequence = unpack_found_drafts(entry.found_drafts)
                self._disk.hashes = frozenset(map(hash_of, entry.on_disk))
                output = scheduler.schedule(entry.now)
                self._in_flight[output.step_id] = output
                scheduler.take_transfers()
            case Updated():
                output = self._in_flight.pop(entry.step_id)
                scheduler.update(output, self._sampled(entry, output), entry.now)
                beams.give_names(entry.beam_names, scheduler.state.sequences, self._block_size)
            case Failed():
                output = self._in_flight.pop(entry.step_id)
                scheduler.fail_step(output, RuntimeError(entry.error), entry.now)
            case Transferred():
                scheduler.end_transfers(entry.ended, entry.now)

    def _start_texts(self, entry: Added) -> None:
        """Have a request's texts begin, or fail to, as they did: what its tokens said is not recorded."""
        stops, first = self._stops, self._scheduler.state.next_seq_id
        stops.start_error = _START_ERRORS.get(entry.refusal)
        stops.num_left = {
            first + index: choice.num_tokens
            for index, choice in enumerate(entry.request.resumed)
            if choice.is_stopped
        }

    def _name_partial_block(self, named: PartialName) -> None:
        """Let the stand-in of a partial block's last token be its name, as that of a full block's is."""
        sequence = self._scheduler.state.sequences.get(named.seq_id)
        if sequence is not None and 0 < named.num_tokens <= len(sequence.tokens):
            sequence.tokens[named.num_tokens - 1] = named.name

    def _sampled(self, entry: Updated, output: SchedulerOutput) -> tuple[SampledSequence, ...]:
        """The results of the step: one token each, save for those recorded as unlike it."""
        rows = results_of(output)
        sampled = [
            SampledSequence(row.seq_id, row.epoch, (), scores=tuple(map(SampledToken, row.token_ids)))
            if isinstance(row, ScoreRun)
            else SampledSequence(row.seq_id, row.epoch, (SampledToken(0),))
            for row in rows
        ]
        self._stops.num_left.clear()
        self._stops.without_text.clear()
        for result in entry.results:
            if result.row >= len(rows):
                continue
            row = rows[result.row]
            tokens = beams.candidates(result) or tuple(map(SampledToken, result.block_names))
            error = RecordedError(result.error) if result.error else None
            sampled[result.row] = SampledSequence(row.seq_id, row.epoch, tokens, error)
            if result.has_no_text:
                self._stops.without_text.update(self._texts_of(row.seq_id))
            if result.is_stopped or result.has_no_text:
                self._stops.num_left[row.seq_id] = len(tokens)
        return tuple(self._with_partial_name(result, entry) for result in sampled)

    def _texts_of(self, seq_id: int) -> set[int]:
        """The sequences under which the text of this one may be made: its own, or any of its beams'."""
        sequence = self._scheduler.state.sequences.get(seq_id)
        if sequence is None or sequence.request.beams is None:
            return {seq_id}
        return {beam.seq_id for beam in sequence.request.sequences}

    def _with_partial_name(self, result: SampledSequence, entry: Updated) -> SampledSequence:
        """As `_name_partial_block`, for a token that came with this step: it was a draft that came true."""
        sequence = self._scheduler.state.sequences.get(result.seq_id)
        if sequence is None or not entry.partial_names:
            return result
        tokens = list(result.tokens)
        for named in entry.partial_names:
            place = named.num_tokens - 1 - len(sequence.tokens)
            if named.seq_id == result.seq_id and 0 <= place < len(tokens):
                tokens[place] = SampledToken(named.name)
        return SampledSequence(result.seq_id, result.epoch, tuple(tokens), result.error)


class _FoundDrafts:
    """A drafter that finds, in a step, as many drafts as were found then. by_sequence: of that step."""

    def __init__(self) -> None:
        self.by_sequence: dict[int, tuple[int, bool]] = {}

    def propose(self, sequence: Sequence, limit: int) -> Drafts:
        count, is_whole = self.by_sequence.get(sequence.seq_id & LOW, (0, False))
        return Drafts((0,) * min(limit, count), is_whole)


def _created(policies: PolicySpecs) -> PolicySet:
    made: Any = {axis: _created_one(axis, choice) for axis, choice in policies.items()}
    return PolicySet(**made)


def _created_one(axis: str, choice: PolicySpec) -> Any:
    choice = as_it_was(axis, choice)
    try:
        return registry.create(axis, choice.name, choice.options)
    except PolicyError as error:
        raise CannotReplay(f"{error}") from error
