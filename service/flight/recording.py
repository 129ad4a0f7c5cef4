"""A recording of what the service was asked and how long its steps took: numbers and labels, never text.

One JSON object a line. The first describes the engine. A request is written when it ends, in the fields of
Mooncake's traces and a few more; `hash_ids` are names of its prompt's blocks (`block_names`), which tell what
prompts share and nothing of what they say. A step is its `StepWork` and its seconds. `pageturner simulate`
replays the requests, `pageturner calibrate` fits the steps.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any, TextIO

from structlog.typing import FilteringBoundLogger

from pageturner.policies.views import Rates
from pageturner.service.core.clock import Clock
from pageturner.service.core.listener import AddRequest, Call, CallOutcome, Schedule, Update
from pageturner.service.core.memory.prefix_cache import PrefixHasher
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.outputs import Event, FinishedEvent, SchedulerOutput
from pageturner.service.core.request import Request
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.flight.block_names import names_of, names_of_prompt
from pageturner.service.flight.step_work import work_of

VERSION = 1

MAX_LINES_WAITING = 1 << 14
"""Lines that wait for the file; a disk that takes them slower loses some, and delays no step."""

CLOSE_SECONDS = 2.0
"""How long the end of the process waits for the last lines."""


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
        """The first line of a recording."""
        return {
            "pageturner_recording": VERSION,
            "name": self.name,
            "block_size": self.cache.block_size,
            "block_bytes": self.block_bytes,
            "cache": asdict(self.cache),
            "scheduler": asdict(self.scheduler),
            "rates": asdict(self.rates),
        }


class LineFile:
    """JSON lines to a file, from a thread of its own: `write` never waits and never fails.

    The first error of the file is logged and ends it; lines that come then, and those that find
    MAX_LINES_WAITING before them, are dropped and counted (num_dropped).
    """

    def __init__(self, file: TextIO, logger: FilteringBoundLogger) -> None:
        self.num_dropped = 0
        self._file = file
        self._logger = logger
        self._lines: queue.Queue[Mapping[str, Any] | None] = queue.Queue(MAX_LINES_WAITING)
        self._has_failed = False
        self._writer = threading.Thread(target=self._write_all, name="recording", daemon=True)
        self._writer.start()

    def write(self, line: Mapping[str, Any]) -> None:
        """Have it written soon. line: is not changed from now on."""
        if self._has_failed:
            self.num_dropped += 1
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Write what waits, for CLOSE_SECONDS at most, and close the file. Closing twice is no error."""
        if not self._writer.is_alive():
            return
        try:
            self._lines.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            self.num_dropped += self._lines.qsize()
        else:
            self._writer.join(CLOSE_SECONDS)
        if self.num_dropped:
            self._logger.error("recording_incomplete", num_lines_dropped=self.num_dropped)

    def flush(self) -> None:
        """Return when all that was written before is in the file, or lost."""
        self._lines.join()

    def _write_all(self) -> None:
        is_open = True
        while is_open:
            line = self._lines.get()
            is_open = line is not None
            try:
                if line is None:
                    self._file.close()
                elif self._has_failed:
                    self.num_dropped += 1
                else:
                    self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
                    if self._lines.empty():
                        self._file.flush()
            except (OSError, ValueError) as error:  # ValueError: the file is closed
                self._fail(error)
            finally:
                self._lines.task_done()

    def _fail(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._logger.error("recording_ended", reason=str(error))


class WorkloadRecorder:
    """Listens to a scheduler just made: a `core.listener.SchedulerListener`.

    hash_key: secret, for the names of blocks where the scheduler itself looks for no equal ones. clock: times
    the steps.
    """

    def __init__(
        self, scheduler: Scheduler, file: LineFile, engine: RecordedEngine, hash_key: bytes, clock: Clock
    ) -> None:
        self._scheduler = scheduler
        self._file = file
        self._hasher = PrefixHasher(hash_key)
        self._clock = clock
        self._live: dict[str, Request] = {}
        self._first_arrival: float | None = None
        self._scheduled_at = 0.0
        self._running_since: float | None = None
        file.write(engine.header())
        scheduler.add_listener(self)

    def before(self, call: Call) -> None:
        """Note when a step is scheduled."""
        if isinstance(call, Schedule) and not self._scheduler.state.unfinished_steps:
            self._scheduled_at = call.now

    def after(self, call: Call, outcome: CallOutcome) -> None:
        """Write what ended, and the step that was taken. What raised is not recorded."""
        if outcome.error is not None:
            return
        if isinstance(call, AddRequest):
            request = self._scheduler.state.requests.get(call.new.request_id)
            if request is not None:  # else it was resumed and had ended: nothing was computed for it
                self._live[call.new.request_id] = request
            if self._first_arrival is None:
                self._first_arrival = call.new.arrival_time
        if isinstance(outcome.answer, tuple):
            self._ended(outcome.answer)
        if isinstance(call, Update):
            self._stepped(call.output)

    def _ended(self, events: Iterable[Event]) -> None:
        """Write the requests that ended and had put out anything: what they asked for, and what came."""
        for event in events:
            if isinstance(event, FinishedEvent):
                self._finished(event)

    def _stepped(self, output: SchedulerOutput) -> None:
        """A step succeeded. While there is more work, what lies before the next step counts as its own: it is
        the loop's share, not a rest."""
        since = self._scheduled_at if self._running_since is None else self._running_since
        now = self._clock.now()
        self._running_since = now if self._scheduler.has_work() else None
        self._file.write({"step": astuple(work_of(output)), "seconds": round(now - since, 7)})

    def _finished(self, event: FinishedEvent) -> None:
        request, usage = self._live.pop(event.request_id, None), event.usage
        num_sampled = usage.num_output_tokens - usage.num_resumed_tokens
        if request is None or not num_sampled:
            return
        assert self._first_arrival is not None, "a request was accepted before it ended"
        new = request.new
        # What was known of an answer that is resumed is computed as a prompt is.
        n = new.params.best_of or new.params.n
        num_given = len(new.prompt_token_ids) + new.num_resumed_tokens // n
        self._file.write(
            {
                "timestamp": round(1e3 * (new.arrival_time - self._first_arrival), 3),
                "input_length": num_given,
                "output_length": max(1, num_sampled // n),
                "hash_ids": self._hash_ids(request),
                "num_choices": n,
                "max_tokens": new.params.max_tokens,
                "tenant": new.tenant,
                "priority": new.priority,
                "deadline_seconds": None if new.deadline is None else new.deadline - new.arrival_time,
                "outcome": "ok" if event.error is None else type(event.error).__name__,
            }
        )

    def _hash_ids(self, request: Request) -> tuple[int, ...]:
        manager = self._scheduler.manager
        if manager.caches_prefixes:
            sequence = request.sequences[0]
            is_alone = len(request.sequences) == 1
            return names_of(
                manager, sequence, sequence.num_given_tokens if is_alone else request.num_prompt_tokens
            )
        return names_of_prompt(self._hasher, request.new, manager.block_size)
