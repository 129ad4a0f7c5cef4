"""A small scheduler and model for tests of the step loop: everything runs that is not paused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import structlog
from structlog.typing import FilteringBoundLogger

from pageturner.policies import registry
from pageturner.policies.interfaces import PolicySet
from pageturner.service.core.inspection import SchedulerInspection
from pageturner.service.core.outputs import (
    Acceptance,
    BlockCopies,
    ChoiceFinishedEvent,
    Event,
    FinishedEvent,
    FinishReason,
    RequestTimings,
    SampledSequence,
    SampledToken,
    SampleRow,
    ScheduledSequence,
    SchedulerOutput,
    SchedulerStats,
    TokenEvent,
    Usage,
)
from pageturner.service.core.request import NewRequest
from pageturner.service.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    PageturnerError,
    QueueFull,
    StepFailed,
)
from pageturner.service.policy_host.host import PolicyHost

TIMINGS = RequestTimings(0.5, 0.1, 0.1, 0, 0, 0)
DEFAULT_MAX_TOKENS = 16


def token_at(seed: int, index: int, position: int) -> int:
    """The scripted model: what choice `index` says at `position`."""
    return (seed * 31 + index * 7 + position * 3) % 97


def text_of(token_id: int) -> str:
    return f"{token_id} "


@dataclass
class _Entry:
    request: NewRequest
    first_seq_id: int
    max_tokens: int
    num_outputs: list[int]
    is_paused: bool = False

    @property
    def is_done(self) -> bool:
        return all(count == self.max_tokens for count in self.num_outputs)


class ScriptedScheduler:
    """One token for each choice of each request a step; holds one block a request.

    A failed step is retried with one request at a time; the one that fails alone fails.
    """

    def __init__(self, max_requests: int = 1000) -> None:
        self.max_requests = max_requests
        self.entries: dict[str, _Entry] = {}
        self.suspects: list[str] = []
        self.is_stuck: set[str] = set()
        self.fault: Exception | None = None
        self.copies = BlockCopies()
        self.policy_host = PolicyHost(registry.default_policies(), registry.default_policies())
        self._next_seq_id = 0
        self._step_id = 0

    def add_request(self, request: NewRequest) -> Acceptance:
        self._raise_fault()
        if request.request_id in self.entries:
            raise DuplicateRequest(request.request_id)
        if len(self.entries) >= self.max_requests:
            raise QueueFull("too many requests wait", retry_after_seconds=1.0)
        max_tokens = request.params.max_tokens or DEFAULT_MAX_TOKENS
        entry = _Entry(request, self._next_seq_id, max_tokens, [0] * request.params.n)
        self._next_seq_id += request.params.n
        self.entries[request.request_id] = entry
        return Acceptance(max_tokens)

    def abort_request(self, request_id: str, error: PageturnerError) -> tuple[Event, ...]:
        if request_id not in self.entries:
            return ()
        unfinished = [
            index
            for index, count in enumerate(self.entries[request_id].num_outputs)
            if count < self.entries[request_id].max_tokens
        ]
        events = [ChoiceFinishedEvent(request_id, index, FinishReason.ABORTED) for index in unfinished]
        return (*events, self._finish(request_id, error))

    def expire(self, now: float) -> tuple[Event, ...]:
        late = [
            name
            for name, entry in self.entries.items()
            if entry.request.deadline is not None and entry.request.deadline <= now
        ]
        return tuple(
            event for name in late for event in self.abort_request(name, DeadlineExceeded("too late"))
        )

    def pause_request(self, request_id: str) -> None:
        if request_id in self.entries:
            self.entries[request_id].is_paused = True

    def resume_request(self, request_id: str) -> None:
        if request_id in self.entries:
            self.entries[request_id].is_paused = False

    def has_work(self) -> bool:
        return any(not entry.is_paused for entry in self.entries.values())

    def schedule(self, now: float) -> SchedulerOutput:
        self._raise_fault()
        self._step_id += 1
        ready = [
            name for name, entry in self.entries.items() if not entry.is_paused and name not in self.is_stuck
        ]
        chosen = [name for name in self.suspects if name in ready][:1] or ready
        copies, self.copies = self.copies, BlockCopies()
        return SchedulerOutput(
            self._step_id,
            tuple(self._scheduled(self.entries[name]) for name in chosen),
            copies,
        )

    def update(
        self, output: SchedulerOutput, sampled: tuple[SampledSequence, ...], now: float
    ) -> tuple[Event, ...]:
        self._raise_fault()
        by_seq_id = {result.seq_id: result for result in sampled}
        events: list[Event] = []
        for scheduled in output.scheduled:
            self.suspects = [name for name in self.suspects if name != scheduled.request_id]
            entry = self.entries.get(scheduled.request_id)
            if entry is None:
                continue
            for row in scheduled.samples:
                tokens = by_seq_id[row.seq_id].tokens
                text = "".join(text_of(token.token_id) for token in tokens)
                events.append(TokenEvent(scheduled.request_id, row.index, tokens, text))
                entry.num_outputs[row.index] += len(tokens)
                if entry.num_outputs[row.index] == entry.max_tokens:
                    events.append(ChoiceFinishedEvent(scheduled.request_id, row.index, FinishReason.LENGTH))
            if entry.is_done:
                events.append(self._finish(scheduled.request_id, None))
        return tuple(events)

    def fail_step(self, output: SchedulerOutput, error: Exception, now: float) -> tuple[Event, ...]:
        names = [scheduled.request_id for scheduled in output.scheduled]
        if len(names) == 1:
            return self.abort_request(names[0], StepFailed(str(error)))
        self.suspects = names
        return ()

    def num_requests(self) -> tuple[int, int]:
        return 0, len(self.entries)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self.entries),
            num_blocks=self.max_requests,
            num_blocks_used=len(self.entries),
            num_steps_total=self._step_id,
        )

    def inspect(self, now: float) -> SchedulerInspection:
        return SchedulerInspection(num_blocks=self.max_requests)

    def set_policies(
        self, policies: PolicySet, now: float, *, shadows: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        self.policy_host.set_policies(policies, shadows, ())

    def quarantine(self, axis: str, reason: str, now: float) -> None:
        self.policy_host.quarantine(axis, reason)

    def _scheduled(self, entry: _Entry) -> ScheduledSequence:
        prompt, start = entry.request.prompt_token_ids, min(entry.num_outputs)
        rows = tuple(
            SampleRow(
                entry.first_seq_id + index,
                0,
                index,
                entry.request.seed,
                entry.request.params,
            )
            for index, count in enumerate(entry.num_outputs)
            if count < entry.max_tokens
        )
        return ScheduledSequence(
            entry.first_seq_id, entry.request.request_id, 0, prompt, start, 0, (entry.first_seq_id,), rows
        )

    def _finish(self, request_id: str, error: PageturnerError | None) -> FinishedEvent:
        entry = self.entries.pop(request_id)
        usage = Usage(len(entry.request.prompt_token_ids), 0, sum(entry.num_outputs))
        return FinishedEvent(request_id, usage, TIMINGS, error)

    def _raise_fault(self) -> None:
        if self.fault is not None:
            raise self.fault


@dataclass
class ScriptedModel:
    """KV cache, runner and sampler in one: records the calls, and fails or waits where told to.

    poison: requests whose forward fails. gate: each forward takes one permit, if there is a gate.
    """

    calls: list[str] = field(default_factory=list)
    poison: set[str] = field(default_factory=set)
    fail_in: dict[str, Exception] = field(default_factory=dict)
    gate: threading.Semaphore | None = None
    on_forward: Callable[[SchedulerOutput], object] | None = None

    def apply(self, copies: BlockCopies) -> None:
        self._call("apply")

    def forward(self, output: SchedulerOutput) -> SchedulerOutput:
        if self.on_forward is not None:
            self.on_forward(output)
        gate = self.gate
        if gate is not None:
            gate.acquire()
        self._call("forward")
        if any(scheduled.request_id in self.poison for scheduled in output.scheduled):
            raise RuntimeError("poison")
        return output

    def note_sampled(self, sampled: tuple[SampledSequence, ...]) -> None:
        """Nothing: the fake model knows what it sampled."""

    def sample(self, logits: SchedulerOutput, output: SchedulerOutput) -> tuple[SampledSequence, ...]:
        self._call("sample")
        assert logits is output
        return tuple(
            SampledSequence(
                row.seq_id, row.epoch, (SampledToken(token_at(row.seed, row.index, scheduled.end)),)
            )
            for scheduled in output.scheduled
            for row in scheduled.samples
        )

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail_in:
            raise self.fail_in[name]


def recording_logger() -> tuple[FilteringBoundLogger, list[MutableMapping[str, Any]]]:
    """A logger, and the entries written to it."""
    capture = structlog.testing.LogCapture()
    logger: FilteringBoundLogger = structlog.wrap_logger(None, processors=[capture])
    return logger, capture.entries
