"""A recording of what the service was asked and how long its steps took: numbers and labels, never text.

One JSON object a line. The first describes the engine. A request is written when it ends, in the fields of
Mooncake's traces and a few more; `hash_ids` are digests of its prompt's blocks under a key that dies
with the process, so that they tell what prompts share and nothing of what they say. A step is its
`StepWork` and its seconds. `pageturner simulate` replays the requests, `pageturner calibrate` fits the steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any, TextIO

from structlog.typing import FilteringBoundLogger

from pageturner.policies.views import Rates
from pageturner.service.core.clock import Clock
from pageturner.service.core.memory.prefix_cache import PrefixHasher
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.outputs import Event, FinishedEvent, SampledSequence, SchedulerOutput
from pageturner.service.core.request import NewRequest
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.errors import PageturnerError
from pageturner.service.flight.step_work import work_of

VERSION = 1


@dataclass(frozen=True, slots=True)
class RecordedEngine:
    """What the first line says of the engine. block_bytes: of a KV block over all layers. rates: as it
    measured them when it started."""

    name: str
    cache: CacheOptions
    scheduler: SchedulerOptions
    block_bytes: int
    rates: Rates

    def header(self) -> Mapping[str, Any]:
        return {
            "pageturner_recording": VERSION,
            "name": self.name,
            "block_size": self.cache.block_size,
            "block_bytes": self.block_bytes,
            "cache": asdict(self.cache),
            "scheduler": asdict(self.scheduler),
            "rates": asdict(self.rates),
        }


class Recorder:
    """Writes to `file` until it fails, which is logged once and ends the recording, not the service.

    hash_key: secret, of this recording alone.
    """

    def __init__(
        self, file: TextIO, engine: RecordedEngine, hash_key: bytes, logger: FilteringBoundLogger
    ) -> None:
        self._file = file
        self._logger = logger
        self._hasher = PrefixHasher(hash_key)
        self._block_size = engine.cache.block_size
        self._live: dict[str, NewRequest] = {}
        self._started_at: float | None = None
        self._running_since: float | None = None
        self._is_failed = False
        self._write(engine.header())

    def accepted(self, request: NewRequest) -> None:
        self._live[request.request_id] = request
        if self._started_at is None:
            self._started_at = request.arrival_time

    def ended(self, events: Iterable[Event]) -> None:
        """Write the requests that ended and had put out anything: what they asked for, and what came."""
        for event in events:
            if isinstance(event, FinishedEvent):
                self._finished(event)

    def stepped(self, output: SchedulerOutput, started_at: float, ended_at: float, *, goes_on: bool) -> None:
        """A step succeeded. goes_on: there is more work, so that what lies before the next step counts
        as its own: the loop's share, not a rest."""
        since = started_at if self._running_since is None else self._running_since
        self._running_since = ended_at if goes_on else None
        self._write({"step": astuple(work_of(output)), "seconds": round(ended_at - since, 7)})

    def _finished(self, event: FinishedEvent) -> None:
        request = self._live.pop(event.request_id, None)
        if request is None or not event.usage.num_output_tokens:
            return
        assert self._started_at is not None, "a request was accepted before it ended"
        deadline = request.deadline
        self._write(
            {
                "timestamp": round(1e3 * (request.arrival_time - self._started_at), 3),
                "input_length": len(request.prompt_token_ids),
                "output_length": max(1, event.usage.num_output_tokens // request.params.n),
                "hash_ids": self._hash_ids(request),
                "num_choices": request.params.n,
                "max_tokens": request.params.max_tokens,
                "tenant": request.tenant,
                "priority": request.priority,
                "deadline_seconds": None if deadline is None else deadline - request.arrival_time,
                "outcome": "ok" if event.error is None else type(event.error).__name__,
            }
        )

    def _hash_ids(self, request: NewRequest) -> list[int]:
        parent = self._hasher.root(adapter=request.adapter, salt=request.cache_salt)
        hash_ids = []
        tokens, size = request.prompt_token_ids, self._block_size
        for start in range(0, len(tokens) - size + 1, size):
            parent = self._hasher.extend(parent, tokens[start : start + size])
            hash_ids.append(int.from_bytes(parent[:8], "big") >> 1)
        return hash_ids

    def _write(self, entry: Mapping[str, Any]) -> None:
        if self._is_failed:
            return
        try:
            self._file.write(json.dumps(entry, separators=(",", ":")) + "\n")
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            self._is_failed = True
            self._logger.error("recording_ended", reason=str(error))


class RecordingScheduler(Scheduler):
    """A scheduler that tells a recorder what comes in and goes out; it decides as any other does.

    Further arguments are those of `Scheduler`.
    """

    def __init__(self, *arguments: Any, recorder: Recorder, clock: Clock, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._recorder = recorder
        self._clock = clock
        self._scheduled_at = 0.0

    def add_request(self, new: NewRequest) -> int:
        max_tokens = super().add_request(new)
        self._recorder.accepted(new)
        return max_tokens

    def abort_request(self, request_id: str, error: PageturnerError) -> tuple[Event, ...]:
        return self._ended(super().abort_request(request_id, error))

    def expire(self, now: float) -> tuple[Event, ...]:
        return self._ended(super().expire(now))

    def schedule(self, now: float) -> SchedulerOutput:
        self._scheduled_at = now
        return super().schedule(now)

    def update(
        self, output: SchedulerOutput, sampled: tuple[SampledSequence, ...], now: float
    ) -> tuple[Event, ...]:
        events = self._ended(super().update(output, sampled, now))
        self._recorder.stepped(output, self._scheduled_at, self._clock.now(), goes_on=self.has_work())
        return events

    def fail_step(self, output: SchedulerOutput, error: Exception, now: float) -> tuple[Event, ...]:
        return self._ended(super().fail_step(output, error, now))

    def _ended(self, events: tuple[Event, ...]) -> tuple[Event, ...]:
        self._recorder.ended(events)
        return events
