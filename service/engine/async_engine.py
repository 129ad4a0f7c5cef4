"""The engine for asyncio: submissions in, streams out, health beside them."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from pageturner.service.core.clock import Clock
from pageturner.service.core.outputs import FinishedEvent, SchedulerStats
from pageturner.service.core.request import NewRequest
from pageturner.service.engine.api import (
    AbortOutcome,
    AcceptedEvent,
    EngineHealth,
    ModelInfo,
    PoliciesInfo,
    PolicyChange,
    Prompt,
    ServerInfo,
    Submission,
)
from pageturner.service.engine.commands import (
    Abort,
    EngineOutput,
    Pause,
    PoliciesAnswer,
    PoliciesRefused,
    PoliciesSet,
    Refused,
    Resume,
    SetPolicies,
    Shutdown,
    Submit,
)
from pageturner.service.engine.engine import Engine
from pageturner.service.engine.flight_dumps import FlightDumps
from pageturner.service.engine.health import Health
from pageturner.service.engine.metrics import MetricsSnapshot
from pageturner.service.engine.options import EngineOptions
from pageturner.service.engine.policy_changes import create_policies, describe, summarise
from pageturner.service.engine.prompts import PromptReader
from pageturner.service.engine.step_thread import StepThread
from pageturner.service.engine.stream import BufferedStream
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.errors import (
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    EngineDead,
    InvalidArgument,
    ModelNotFound,
    NotRecorded,
    PageturnerError,
    RequestAborted,
)
from structlog.typing import FilteringBoundLogger

MAX_REQUEST_ID_CHARACTERS = 256
MAX_REASON_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class _Live:
    """A request between its submission and its terminal event."""

    stream: BufferedStream
    accepted: asyncio.Future[None]
    logger: FilteringBoundLogger

    def refuse(self, error: PageturnerError) -> None:
        """Nothing comes after this: tell whoever waits, for acceptance or for events."""
        self.stream.fail(error)
        if not self.accepted.done():
            self.accepted.set_exception(error)


class AsyncEngine:
    """Implements `api.EngineClient` over one engine thread.

    Everything here runs on the event loop that called `start`; the engine is touched by its thread
    alone, save for its counters. random: draws the seeds and ids that clients leave open.
    max_n: bound on parallel samples of one request. flight: None if nothing is recorded.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        *,
        model: ModelInfo,
        server_info: ServerInfo,
        max_n: int,
        options: EngineOptions,
        clock: Clock,
        random: Random,
        logger: FilteringBoundLogger,
        flight: FlightDumps | None = None,
    ) -> None:
        self._engine = engine
        self._flight = flight
        self._model = model
        self._prompts = PromptReader(tokenizer, model, options.inline_prompt_characters)
        self._server_info = server_info
        self._max_n = max_n
        self._options = options
        self._clock = clock
        self._random = random
        self._logger = logger
        self._started_at = clock.now()
        self._health = Health()
        self._live: dict[str, _Live] = {}
        self._changes: dict[int, asyncio.Future[PoliciesAnswer]] = {}
        self._next_change_id = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._finished_ids: OrderedDict[str, None] = OrderedDict()
        self._has_ended = asyncio.Event()
        self._thread: StepThread | None = None
        self._watchdog: asyncio.Task[None] | None = None

    # Life and health

    async def start(self) -> None:
        """Start the engine thread and serve."""
        assert self._thread is None, "an engine starts once"
        loop = asyncio.get_running_loop()
        self._thread = StepThread(
            self._engine,
            self._clock,
            on_outputs=lambda outputs: _call_soon(loop, partial(self._deliver, outputs)),
            on_end=lambda fault: _call_soon(loop, partial(self._on_thread_end, fault)),
        )
        self._thread.start()
        self._watchdog = asyncio.create_task(self._watch())
        self._set_health(EngineHealth.SERVING)

    @property
    def health(self) -> EngineHealth:
        return self._health.value

    async def wait_for_health_change(self, known: EngineHealth) -> EngineHealth:
        return await self._health.wait_for_change(known)

    async def drain(self, grace_seconds: float) -> None:
        """Refuse new work, let what runs finish, abort what is left after the grace."""
        self._set_health(EngineHealth.DRAINING)
        if await _is_set_within(self._is_idle, grace_seconds):
            return
        self._logger.warning("drain_aborts", num_requests=len(self._live))
        for request_id in self._live:
            self._send_abort(request_id, "the server is shutting down")
        if not await _is_set_within(self._is_idle, self._options.shutdown_seconds):
            self._die(TimeoutError("the step under way did not end in time"))

    async def aclose(self) -> None:
        """End every request, then the thread. Closing twice is no error."""
        await self.drain(0.0)
        if self._thread is None:
            return
        self._thread.send(Shutdown())
        if await _is_set_within(self._has_ended, self._options.shutdown_seconds):
            self._thread.join(self._options.shutdown_seconds)
        else:
            self._die(TimeoutError("the engine thread did not end in time"))
        if self._watchdog is not None:
            self._watchdog.cancel()

    def check_heartbeat(self) -> None:
        """Report a step that takes longer than stall_seconds, and its return."""
        since = self._thread.busy_since if self._thread is not None else None
        seconds = 0.0 if since is None else self._clock.now() - since
        is_stalled = seconds > self._options.stall_seconds
        if is_stalled and self.health is EngineHealth.SERVING:
            self._logger.error("engine_stalled", seconds=seconds, num_requests=len(self._live))
            self._engine.metrics.stalled()
            self._set_health(EngineHealth.STALLED)
        elif not is_stalled and self.health is EngineHealth.STALLED:
            self._logger.warning("engine_resumed")
            self._set_health(EngineHealth.SERVING)

    @property
    def last_progress(self) -> float:
        """When a step last ended, on our clock; for a readiness probe."""
        return self._thread.last_progress if self._thread is not None else self._started_at

    # Requests

    async def submit(self, submission: Submission) -> BufferedStream:
        arrival_time = self._clock.now()
        self._refuse_unless_serving()
        self._check(submission)
        token_ids = await self._prompts.encode(submission.prompt)
        if len(token_ids) >= self._model.max_model_len:
            limit = self._model.max_model_len - 1
            raise InvalidArgument(
                "prompt", f"{len(token_ids)} tokens; at most {limit} leave room for an answer"
            )
        # Encoding may have taken a while.
        self._refuse_unless_serving()
        self._refuse_duplicate(submission.request_id)
        params, seconds = submission.params, submission.deadline_seconds
        request = NewRequest(
            request_id=submission.request_id or f"{self._random.getrandbits(64):016x}",
            prompt_token_ids=token_ids,
            params=params,
            seed=self._random.getrandbits(64) if params.seed is None else params.seed,
            arrival_time=arrival_time,
            eos_token_ids=self._model.eos_token_ids,
            priority=submission.priority,
            tenant=submission.tenant,
            cache_salt=submission.cache_salt,
            bypass_prefix_cache=submission.bypass_prefix_cache,
            deadline=None if seconds is None else arrival_time + seconds,
        )
        live = self._enlist(request)
        self._send(Submit(request))
        try:
            await live.accepted
        except asyncio.CancelledError:
            await live.stream.aclose()
            if not live.accepted.cancelled():
                live.accepted.exception()  # seen: asyncio complains of exceptions that nobody looked at
            raise
        return live.stream

    async def abort(self, request_id: str) -> AbortOutcome:
        if request_id in self._live:
            self._send_abort(request_id, "aborted by its id")
            return AbortOutcome.ABORTED
        if request_id in self._finished_ids:
            return AbortOutcome.ALREADY_FINISHED
        return AbortOutcome.NOT_FOUND

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        return await self._prompts.encode(prompt, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        return await self._prompts.decode(token_ids)

    # What runs here

    def models(self) -> tuple[ModelInfo, ...]:
        return (self._model,)

    def server_info(self) -> ServerInfo:
        return replace(self._server_info, uptime_seconds=self._clock.now() - self._started_at)

    def policies(self) -> PoliciesInfo:
        return describe(self._engine.policies)

    async def set_policies(self, change: PolicyChange) -> PoliciesInfo:
        try:
            done = await self._set_policies(change)
        except PageturnerError as error:
            reason = str(error)[:MAX_REASON_CHARACTERS]  # it may quote what was sent
            self._logger.warning("policies_refused", origin=change.origin, reason=reason)
            raise
        old, new = summarise(done.old), summarise(done.new)
        changed = [axis for axis in new if new[axis] != old[axis]]
        self._logger.info(
            "policies_set",
            origin=change.origin,
            revision=done.new.revision,
            old={axis: old[axis] for axis in changed},
            new={axis: new[axis] for axis in changed},
        )
        return describe(done.new)

    async def _set_policies(self, change: PolicyChange) -> PoliciesSet:
        self._refuse_unless_serving()
        policies, shadows = await asyncio.to_thread(create_policies, change)
        # Importing a policy may have taken a while.
        self._refuse_unless_serving()
        answer: asyncio.Future[PoliciesAnswer] = asyncio.get_running_loop().create_future()
        change_id, self._next_change_id = self._next_change_id, self._next_change_id + 1
        self._changes[change_id] = answer
        try:
            self._send(SetPolicies(change_id, policies, shadows, change.expected_revision))
            done = await answer
        finally:
            del self._changes[change_id]
        if isinstance(done, PoliciesRefused):
            raise done.error
        return done

    def load(self) -> SchedulerStats:
        return self._engine.stats

    async def flight_record(self) -> bytes:
        if self._flight is None:
            raise NotRecorded("the flight recorder is off: engine.flight_recorder_steps is 0")
        return await asyncio.to_thread(self._flight.content, "asked for")

    def metrics(self) -> MetricsSnapshot:
        return self._engine.metrics.snapshot(self._engine.stats)

    # From submissions to the thread

    def _check(self, submission: Submission) -> None:
        if submission.model and submission.model != self._model.name:
            raise ModelNotFound(submission.model, self._model.name)
        if len(submission.request_id) > MAX_REQUEST_ID_CHARACTERS:
            raise InvalidArgument("request_id", f"longer than {MAX_REQUEST_ID_CHARACTERS} characters")
        self._refuse_duplicate(submission.request_id)
        submission.params.check(self._model.vocab_size, self._max_n)
        if submission.params.stop and not self._prompts.has_text:
            raise InvalidArgument("stop", f"{self._model.name!r} has no tokenizer, hence no text to stop at")
        if submission.deadline_seconds is not None:
            if not math.isfinite(submission.deadline_seconds):
                raise InvalidArgument("deadline", f"{submission.deadline_seconds} s is not a time")
            if submission.deadline_seconds <= 0:
                raise DeadlineExceeded("the deadline had passed when the request arrived")

    def _refuse_unless_serving(self) -> None:
        if self.health is EngineHealth.DEAD:
            raise EngineDead("the engine has failed; this server must be restarted")
        if self.health in (EngineHealth.STARTING, EngineHealth.DRAINING):
            raise Draining(f"the server is {self.health.value} and takes no new work")

    def _refuse_duplicate(self, request_id: str) -> None:
        if request_id in self._live:
            raise DuplicateRequest(request_id)

    def _enlist(self, request: NewRequest) -> _Live:
        request_id = request.request_id
        timeout = self._options.slow_consumer_timeout_seconds
        stream = BufferedStream(
            request_id,
            self._options.stream_buffer_tokens,
            on_full=lambda: self._send(Pause(request_id, self._clock.now() + timeout)),
            on_drained=lambda: self._send(Resume(request_id)),
            on_leave=lambda: self._send_abort(request_id, "its client left"),
        )
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        live = _Live(stream, accepted, self._logger.bind(request_id=request_id))
        self._live[request_id] = live
        self._is_idle.clear()
        return live

    def _send(self, command: Submit | Abort | Pause | Resume | SetPolicies) -> None:
        assert self._thread is not None
        self._thread.send(command)

    def _send_abort(self, request_id: str, reason: str) -> None:
        # After a death the streams have ended, and nobody reads the queue.
        if request_id in self._live:
            self._send(Abort(request_id, RequestAborted(reason)))

    # From the thread to the streams

    def _deliver(self, outputs: tuple[EngineOutput, ...]) -> None:
        """All that one step put out. A request that is no longer known has had its terminal event."""
        for output in outputs:
            if isinstance(output, PoliciesSet | PoliciesRefused):
                answer = self._changes.get(output.change_id)
                if answer is not None and not answer.done():
                    answer.set_result(output)
                continue
            live = self._live.get(output.request_id)
            if live is None:
                continue
            if isinstance(output, Refused):
                self._forget(output.request_id)
                live.logger.info("refused", reason=str(output.error))
                live.refuse(output.error)
                continue
            live.stream.push(output)
            if isinstance(output, AcceptedEvent):
                live.logger.debug("accepted", num_prompt_tokens=output.num_prompt_tokens)
                if not live.accepted.done():
                    live.accepted.set_result(None)
            elif isinstance(output, FinishedEvent):
                self._forget(output.request_id)
                self._remember(output.request_id)
                _log_finish(live.logger, output)

    def _forget(self, request_id: str) -> None:
        del self._live[request_id]
        if not self._live:
            self._is_idle.set()

    def _remember(self, request_id: str) -> None:
        self._finished_ids[request_id] = None
        self._finished_ids.move_to_end(request_id)
        while len(self._finished_ids) > self._options.num_remembered_requests:
            self._finished_ids.popitem(last=False)

    def _on_thread_end(self, fault: BaseException | None) -> None:
        if fault is not None:
            self._die(fault)
        self._has_ended.set()

    def _die(self, fault: BaseException) -> None:
        """Nothing more will come of the engine: say so to everybody, once."""
        if self.health is EngineHealth.DEAD:
            return
        self._logger.critical("engine_dead", num_requests=len(self._live), exc_info=fault)
        if self._flight is not None:
            self._flight.on_fault(f"the engine died of {type(fault).__name__}")
        self._set_health(EngineHealth.DEAD)
        for live in self._live.values():
            error = EngineDead(f"the engine failed: {fault}")
            live.refuse(error)
        self._live.clear()
        for change_id, answer in self._changes.items():
            if not answer.done():
                answer.set_result(PoliciesRefused(change_id, EngineDead(f"the engine failed: {fault}")))
        self._is_idle.set()

    def _set_health(self, health: EngineHealth) -> None:
        was = self.health
        if self._health.become(health):
            self._logger.info("health", was=was.value, now=health.value)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._options.stall_seconds / 4)
            self.check_heartbeat()


def _call_soon(loop: asyncio.AbstractEventLoop, callback: partial[None]) -> None:
    # A loop that was closed over us has no readers left.
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True


def _log_finish(logger: FilteringBoundLogger, event: FinishedEvent) -> None:
    usage, timings = event.usage, event.timings
    logger.info(
        "finished",
        error=None if event.error is None else str(event.error),
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_prompt_tokens=usage.num_cached_prompt_tokens,
        num_output_tokens=usage.num_output_tokens,
        queue_seconds=round(timings.queue_seconds, 4),
        prefill_seconds=round(timings.prefill_seconds, 4),
        decode_seconds=round(timings.decode_seconds, 4),
        num_preemptions=timings.num_swaps + timings.num_recomputes + timings.num_tail_reclaims,
    )
