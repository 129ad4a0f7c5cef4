"""The requests between their acceptance by `submit` and their end, by id: the one owner of both.

They are known by the ids that the scheduler has (`identity.scoped_id`); a client hears of its own id alone.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from structlog.typing import FilteringBoundLogger

from pageturner.service.core.clock import Clock
from pageturner.service.core.known_answers import KnownAnswers
from pageturner.service.core.outlook import Work
from pageturner.service.core.outputs import Event, FinishedEvent, ScoredTokensEvent, TokenEvent
from pageturner.service.core.request import NewRequest
from pageturner.service.core.selection import Selection
from pageturner.service.engine.api import AbortOutcome, AcceptedEvent
from pageturner.service.engine.door import Door
from pageturner.service.engine.options import EngineOptions
from pageturner.service.engine.stream import BufferedStream
from pageturner.service.engine.tenants import Holding, TenantLedger
from pageturner.service.engine.thread_messages import Abort, Command, Pause, Resume, Submit, SubmitRefused
from pageturner.service.errors import (
    Draining,
    DuplicateRequest,
    EngineDead,
    InvalidArgument,
    PageturnerError,
    RequestAborted,
)
from pageturner.service.grammars.compiler import CompiledGrammar
from pageturner.service.identity import scoped_id
from pageturner.service.trace_context import trace_id_of

ENDED_TEXT = "the server is shutting down; this request was not done in time"


@dataclass(frozen=True, slots=True)
class _Live:
    """A request between its acceptance by `submit` and its terminal event.

    is_renamed: its client knows it by another id than the scheduler. selection: None where every choice is
    told as it comes, without sums. known: what its client has of a search that begins anew, else None.
    grammar: of its form, held for as long. beams_a_choice: of a search, beams computed for each choice that
    is told; else 1.
    """

    work: Work
    is_renamed: bool
    holding: Holding
    stream: BufferedStream
    accepted: asyncio.Future[None]
    logger: FilteringBoundLogger
    selection: Selection | None = None
    known: KnownAnswers | None = None
    grammar: CompiledGrammar | None = None
    rendered_prompt: str = ""
    beams_a_choice: float = 1.0

    def refuse(self, error: PageturnerError) -> None:
        """Nothing comes after this: tell the caller, who waits for acceptance or for events."""
        self.stream.fail(error)
        if not self.accepted.done():
            self.accepted.set_exception(error)

    def push(self, event: AcceptedEvent | Event) -> None:
        """Hand an event on, or what it leads to, under the id that the client knows."""
        if isinstance(event, AcceptedEvent) or (self.selection is None and self.known is None):
            self._hand_on(event)
            return
        for selected in (event,) if self.selection is None else self.selection.told(event):
            for told in (selected,) if self.known is None else self.known.told(selected):
                self._hand_on(told)

    def _hand_on(self, event: AcceptedEvent | Event) -> None:
        if self.is_renamed:
            name = self.stream.request_id
            if type(event) is TokenEvent:  # almost all of them, and `replace` takes ten times as long
                event = TokenEvent(name, event.index, event.tokens, event.text)
            else:
                event = replace(event, request_id=name)
        self.stream.push(event)


class LiveRequests:
    """The streams, by request id, and the ids of those that ended of late. Lives on the event loop.

    send: leaves a command for the engine thread. door: counts what is on its way there. tenants: told of each
    request's first token and end. is_empty: set while no request lives. is_read: set while, beside that, no
    reader has anything left to read.
    """

    def __init__(
        self,
        options: EngineOptions,
        clock: Clock,
        logger: FilteringBoundLogger,
        send: Callable[[Command], None],
        door: Door,
        tenants: TenantLedger,
    ) -> None:
        self._options = options
        self._clock = clock
        self._logger = logger
        self._send = send
        self._door = door
        self._tenants = tenants
        self._live: dict[str, _Live] = {}
        self._finished_ids: OrderedDict[str, None] = OrderedDict()
        self.is_empty = asyncio.Event()
        self.is_empty.set()
        self._num_unread = 0
        self.is_read = asyncio.Event()
        self.is_read.set()

    def __len__(self) -> int:
        return len(self._live)

    def has_work(self) -> bool:
        """Whether a request lives that is not paused for its reader."""
        return any(not live.stream.is_full for live in self._live.values())

    # To the thread

    def refuse_duplicate(self, tenant: str, request_id: str) -> None:
        """Raise an error if a live request of this tenant has this id."""
        if scoped_id(tenant, request_id) in self._live:
            raise DuplicateRequest(request_id)

    async def submit(
        self,
        request: NewRequest,
        client_id: str,
        holding: Holding,
        grammar: CompiledGrammar | None = None,
        rendered_prompt: str = "",
    ) -> BufferedStream:
        """Its stream, once the scheduler has taken it. Raises what it was refused with.

        client_id: the id that its client knows it by. holding: ended here from now on, whatever comes.
        rendered_prompt: for its AcceptedEvent."""
        live = self._enlist(request, client_id, holding, grammar, rendered_prompt)
        self._send(Submit(request))
        try:
            await live.accepted
        except PageturnerError:
            await live.stream.aclose()
            raise
        except asyncio.CancelledError:
            await live.stream.aclose()
            if not live.accepted.cancelled():
                live.accepted.exception()  # read once: asyncio logs exceptions that are never retrieved
            raise
        return live.stream

    def abort(self, request_id: str, error: PageturnerError) -> AbortOutcome:
        """Ask for its end, which its stream will tell with this error."""
        if request_id in self._live:
            self._send(Abort(request_id, error))
            return AbortOutcome.ABORTED
        if request_id in self._finished_ids:
            return AbortOutcome.ALREADY_FINISHED
        return AbortOutcome.NOT_FOUND

    def abort_all(self) -> None:
        """The server is shutting down, and these have had their grace."""
        for request_id in self._live:
            self._send(Abort(request_id, Draining(ENDED_TEXT)))

    def _enlist(
        self,
        request: NewRequest,
        client_id: str,
        holding: Holding,
        grammar: CompiledGrammar | None,
        rendered_prompt: str,
    ) -> _Live:
        request_id = request.request_id
        timeout = self._options.slow_consumer_timeout_seconds
        stream = BufferedStream(
            client_id,
            self._options.stream_buffer_tokens,
            on_full=lambda: self._send(Pause(request_id, self._clock.now() + timeout)),
            on_drained=lambda: self._send(Resume(request_id)),
            on_leave=lambda: self._leave(request_id),
            on_close=self._close,
        )
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        logger = self._logger.bind(request_id=client_id)
        if request.tenant:
            logger = logger.bind(tenant=request.tenant)
        if request.trace_parent:
            logger = logger.bind(trace_id=trace_id_of(request.trace_parent))
        selection = None
        if request.params.needs_logprobs and not request.is_scoring:
            selection = Selection(request.params, has_all_tokens=not request.num_resumed_tokens)
        is_renamed = request_id != client_id
        work, known = self._door.admit(request), KnownAnswers(request.known) if request.known else None
        params = request.params
        beams_a_choice = 1.0 if params.beam_search is None else params.beam_search.width / params.n
        live = _Live(
            work,
            is_renamed,
            holding,
            stream,
            accepted,
            logger,
            selection,
            known,
            grammar,
            rendered_prompt,
            beams_a_choice,
        )
        self._live[request_id] = live
        self._num_unread += 1
        self.is_empty.clear()
        self.is_read.clear()
        return live

    def _leave(self, request_id: str) -> None:
        self.abort(request_id, RequestAborted("its client left"))

    def _close(self) -> None:
        self._num_unread -= 1
        self._note_end()

    # From the thread

    def deliver(self, output: AcceptedEvent | SubmitRefused | Event) -> None:
        """To its stream. A request that is no longer known has had its terminal event."""
        live = self._live.get(output.request_id)
        if live is None:
            return
        if type(output) is TokenEvent:  # almost all of them
            if live.holding.is_waiting:
                self._tenants.start(live.holding)
            live.push(output)
            return
        if isinstance(output, ScoredTokensEvent) and live.holding.is_waiting:
            self._tenants.start(live.holding)
        if isinstance(output, SubmitRefused | AcceptedEvent):
            self._door.answered(live.work)
        if isinstance(output, AcceptedEvent) and live.rendered_prompt:
            output = replace(output, rendered_prompt=live.rendered_prompt)
        if isinstance(output, SubmitRefused):
            if isinstance(output.error, InvalidArgument):
                self._tenants.refuse(live.holding)
            else:
                self._tenants.cancel(live.holding)
            self._forget(output.request_id)
            live.logger.info("refused", reason=str(output.error))
            live.refuse(output.error)
            return
        live.push(output)
        if isinstance(output, AcceptedEvent):
            live.logger.debug("accepted", num_prompt_tokens=output.num_prompt_tokens)
            if not live.accepted.done():
                live.accepted.set_result(None)
        elif isinstance(output, FinishedEvent):
            usage = output.usage
            num_outputs = round(usage.num_output_tokens * live.beams_a_choice)
            self._tenants.end(live.holding, usage.num_prompt_tokens + num_outputs)
            self._forget(output.request_id)
            self._remember(output.request_id)
            _log_finish(live.logger, output)

    def fail_all(self, reason: str) -> None:
        """The engine is dead: it hears no command and delivers nothing more."""
        for live in self._live.values():
            self._tenants.cancel(live.holding)
            live.refuse(EngineDead(reason))
        self._live.clear()
        self._door.forget_all()
        self._note_end()

    def _forget(self, request_id: str) -> None:
        del self._live[request_id]
        self._note_end()

    def _note_end(self) -> None:
        """A request that was left is read, and lives until its abort is carried out."""
        if not self._live:
            self.is_empty.set()
            if not self._num_unread:
                self.is_read.set()

    def _remember(self, request_id: str) -> None:
        self._finished_ids[request_id] = None
        self._finished_ids.move_to_end(request_id)
        while len(self._finished_ids) > self._options.num_remembered_requests:
            self._finished_ids.popitem(last=False)


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
