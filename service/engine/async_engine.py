"""The engine for asyncio: requests in, streams out, health beside them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Protocol

from structlog.typing import FilteringBoundLogger

from pageturner.service.core.clock import Clock
from pageturner.service.core.memory.prefix_cache import PrefixHasher
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.core.prefix_summary import PrefixSummary
from pageturner.service.core.request import NewRequest
from pageturner.service.core.scheduling.intake import Room
from pageturner.service.engine.adapter_options import AdapterOptions
from pageturner.service.engine.adapter_reports import NoAdapters
from pageturner.service.engine.adapters import Adapters
from pageturner.service.engine.api import (
    AbortOutcome,
    AdapterInfo,
    Condition,
    DrainOutcome,
    EngineHealth,
    GenerationRequest,
    HandedBlock,
    Inspection,
    ModelInfo,
    PolicyChange,
    PrefillOrder,
    Prompt,
    ScoreAnswer,
    ScoreRequest,
    ServerInfo,
)
from pageturner.service.engine.block_sender import BlockSender
from pageturner.service.engine.door import Door
from pageturner.service.engine.engine import Engine
from pageturner.service.engine.fingerprint import Fingerprint
from pageturner.service.engine.handover import Handover
from pageturner.service.engine.health import Health
from pageturner.service.engine.input_processor import InputProcessor
from pageturner.service.engine.inspections import Inspections
from pageturner.service.engine.live_requests import LiveRequests
from pageturner.service.engine.loops import call_soon, is_set_within
from pageturner.service.engine.options import EngineOptions
from pageturner.service.engine.outbox import Outbox
from pageturner.service.engine.overview import EngineOverview
from pageturner.service.engine.pending_changes import PendingChanges
from pageturner.service.engine.prefill_service import PrefillService
from pageturner.service.engine.prefix_summaries import PrefixSummaries
from pageturner.service.engine.prompt_limits import InputLimits
from pageturner.service.engine.prompts import PromptReader
from pageturner.service.engine.reception import Fitting, Reception
from pageturner.service.engine.scoring import Scorer
from pageturner.service.engine.step_thread import StepThread
from pageturner.service.engine.stream import BufferedStream
from pageturner.service.engine.structured_outputs import NO_GRAMMARS, StructuredOutputs
from pageturner.service.engine.tenants import TenantLedger, TenantsReport
from pageturner.service.engine.thread_messages import (
    Command,
    EngineOutput,
    Inspected,
    PoliciesChanged,
    PolicyChangeRefused,
    Shutdown,
)
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.engine.watchdog import Watchdog
from pageturner.service.errors import Draining, PageturnerError, RankLost, RequestAborted
from pageturner.service.flight.dumps import FlightDumps
from pageturner.service.grammars.grammars import Grammars, Unavailable
from pageturner.service.identity import ANONYMOUS, Identity, scoped_id
from pageturner.service.policy_host.reports import PoliciesInfo

_POLICIES_ANSWERS = (PoliciesChanged, PolicyChangeRefused)


class Ranks(Protocol):
    """The other ranks of the model."""

    def on_lost(self, callback: Callable[[RankLost], object]) -> None:
        """Call this, from any thread, when one of them is lost."""
        ...


class AsyncEngine(EngineOverview):
    """Implements `api.EngineClient` over one engine thread.

    Everything here runs on the event loop that called `start`; the engine is touched by its thread alone,
    save for its counters. random: draws the seeds and ids that clients leave open. scheduler_options: those
    that the engine's scheduler obeys. flight: None if nothing is recorded. shares_prefixes: whether proved
    tenants find one another's cached blocks. grammars: which the engine's steps obey. adapters: that requests
    may name; None for a model that takes none. hasher: the scheduler's, of its prefix cache; None where
    nothing is cached. handover: has prompts computed by other servers; None where this one computes all.
    sender: hands over what this server computes for others; None where it computes for none. layout: of the
    bytes of a block, as text. allow_inexact_handover: whether who asks may differ in what moves last bits.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        *,
        model: ModelInfo,
        server_info: ServerInfo,
        scheduler_options: SchedulerOptions,
        options: EngineOptions,
        clock: Clock,
        random: Random,
        logger: FilteringBoundLogger,
        flight: FlightDumps | None = None,
        shares_prefixes: bool = False,
        grammars: Grammars | Unavailable = NO_GRAMMARS,
        adapters: Adapters | None = None,
        hasher: PrefixHasher | None = None,
        ranks: Ranks | None = None,
        handover: Handover | None = None,
        sender: BlockSender | None = None,
        layout: str = "",
        allow_inexact_handover: bool = False,
    ) -> None:
        if adapters is None:
            adapters = Adapters(NoAdapters("this model takes no adapters"), AdapterOptions(), logger)
        super().__init__(engine, model, server_info, clock, flight, Health(logger), adapters)
        self._options = options
        self._logger = logger
        self._stats = engine.stats
        longest = None if tokenizer is None else tokenizer.max_token_chars
        self._limits = InputLimits.of_model(model.max_model_len, longest)
        self._prompts = PromptReader(tokenizer, model, options.inline_prompt_characters)
        self._structured = StructuredOutputs(grammars, model.eos_token_ids)
        fingerprint = Fingerprint(server_info.fingerprint, server_info.exact_resume)
        inputs = InputProcessor(
            self._prompts,
            model,
            self._limits.generation,
            scheduler_options.max_n,
            random,
            fingerprint,
            self._structured,
            adapters,
            shares_prefixes=shares_prefixes,
        )
        self._door = Door(scheduler_options, clock, random, lambda: self._stats)
        self._tenants = TenantLedger(scheduler_options, self.load, clock.now)
        self._live = LiveRequests(options, clock, logger, self._send, self._door, self._tenants)
        window = server_info.sliding_window or None
        fitting = Fitting(scheduler_options, Room.of(server_info.num_blocks, server_info.block_size, window))
        self._reception = Reception(
            inputs,
            self._structured,
            self._door,
            self._tenants,
            self._live,
            self._health,
            adapters,
            limits=fitting,
            clock=clock,
            metrics=engine.metrics,
            take_in=None if handover is None else self._take_in,
        )
        self._handover = handover
        self._prefills = PrefillService(
            sender,
            hasher,
            fingerprint,
            layout,
            server_info.block_size,
            self._reception.take,
            shares_prefixes=shares_prefixes,
            allow_inexact=allow_inexact_handover,
        )
        self._scorer = Scorer(self._prompts, self._limits.generation, fitting, self.submit, clock)
        self._changes = PendingChanges(self._health, logger, self._send)
        self._inspections = Inspections(clock, self._send, num_blocks=engine.stats.num_blocks)
        self._prefixes = PrefixSummaries(hasher, server_info.block_size)
        self._has_ended = asyncio.Event()
        self._thread: StepThread | None = None
        self._ranks = ranks
        self._watchdog = Watchdog(engine, self._live, self._health, options, clock, logger, self._die)

    # Life and health

    async def start(self) -> None:
        """Start the engine thread and serve."""
        assert self._thread is None, "an engine starts once"
        loop = asyncio.get_running_loop()
        outbox = Outbox(loop, self._deliver)
        self._thread = StepThread(
            self._engine,
            self._clock,
            on_outputs=outbox.put,
            on_end=lambda fault: call_soon(loop, partial(self._on_thread_end, outbox, fault)),
        )
        self._thread.start()
        self._watchdog.watch(self._thread)
        self._health.become(EngineHealth.SERVING)
        if self._ranks is not None:
            # Not only where a step fails of it: none may run, and one that does may hang.
            self._ranks.on_lost(lambda lost: call_soon(loop, partial(self._die, lost, str(lost))))

    @property
    def condition(self) -> Condition:
        """Health with its reason, of this moment."""
        return self._watchdog.condition()

    async def drain(self, grace_seconds: float) -> DrainOutcome:
        """Refuse new work, let what runs finish and be read, tell to end (Draining) what is left."""
        num_live, num_aborted = len(self._live), 0
        if self.health is not EngineHealth.DRAINING:
            self._logger.info("draining", num_requests=len(self._live))
        self._health.become(EngineHealth.DRAINING)
        refusal = Draining("the server is shutting down and takes no new requests")
        self._prompts.fail_waiting(refusal)
        self._structured.fail_waiting(refusal)
        if not await is_set_within(self._live.is_read, grace_seconds) and len(self._live):
            num_aborted = len(self._live)
            self._logger.warning("drain_aborts", num_requests=num_aborted)
            self._live.abort_all()
        return DrainOutcome(max(0, num_live - num_aborted), num_aborted)

    async def aclose(self) -> None:
        """End every request, then the thread. Closing twice is no error."""
        await self.drain(0.0)
        if self._handover is not None:
            await self._handover.close()
        if self._thread is None:
            return
        if not await is_set_within(self._live.is_empty, self._options.shutdown_seconds):
            self._die(TimeoutError("the step under way did not end in time"))
        self._thread.send(Shutdown())
        # What was given up is waited for no more.
        patience = 0.0 if self.health is EngineHealth.DEAD else self._options.shutdown_seconds
        if await is_set_within(self._has_ended, patience):
            self._thread.join(self._options.shutdown_seconds)
        else:
            self._die(TimeoutError("the engine thread did not end in time"))
        self._watchdog.cancel()

    # Requests

    @property
    def limits(self) -> InputLimits:
        """What a prompt may measure here."""
        return self._limits

    async def submit(self, request: GenerationRequest) -> BufferedStream:
        """Accept a request and open its stream. Raises the refusal: InvalidArgument, QueueFull and others."""
        return await self._reception.take(request)

    async def score(self, request: ScoreRequest) -> ScoreAnswer:
        """How likely continuations of a prompt are. Raises the refusal, and what ends its requests."""
        self._health.refuse_unless_serving()
        return await self._scorer.score(request, self._reception.name(request.request_id))

    def tenants(self, limit: int) -> TenantsReport:
        """What tenants hold now, of at most `limit` of them."""
        return self._tenants.report(limit)

    async def abort(
        self, request_id: str, error: PageturnerError | None = None, *, tenant: str = ""
    ) -> AbortOutcome:
        """End a request with `error`, between two steps."""
        scoped = scoped_id(tenant, request_id)
        return self._live.abort(scoped, error or RequestAborted("aborted by its id"))

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True, identity: Identity = ANONYMOUS
    ) -> tuple[int, ...]:
        """The ids of a prompt. Raises InvalidArgument where it is longer than `limits.tokenization`,
        TenantLimitReached where the caller's tenant has had as many characters tokenized as it may."""
        limits = self._limits.tokenization
        self._tenants.take_text(identity, self._prompts.measure(prompt, limits))
        return await self._prompts.encode(
            prompt, limits, add_special_tokens=add_special_tokens, tenant=identity.tenant
        )

    async def render(self, prompt: Prompt, *, identity: Identity = ANONYMOUS) -> str:
        """The text of a prompt that is tokenized. Raises as `tokenize`."""
        limits = self._limits.tokenization
        self._tenants.take_text(identity, self._prompts.measure(prompt, limits))
        _, text = await self._prompts.read(prompt, limits, tenant=identity.tenant)
        return text

    async def detokenize(self, token_ids: tuple[int, ...], *, identity: Identity = ANONYMOUS) -> str:
        """The text of ids. Raises InvalidArgument, or TenantLimitReached as `tokenize` does."""
        limits = self._limits.tokenization
        limits.check_tokens(len(token_ids), "token_ids")
        self._tenants.take_text(identity, len(token_ids))
        return await self._prompts.decode(token_ids, limits, tenant=identity.tenant)

    def prefill(self, order: PrefillOrder) -> AsyncGenerator[HandedBlock, None]:
        """Compute a prompt for another server, and hand its blocks over. Raises HandoverRefused, and as
        `submit` and its stream do."""
        return self._prefills.prefill(order)

    async def _take_in(self, new: NewRequest) -> None:
        assert self._handover is not None, "only with other servers that compute prompts"
        await self._handover.fetch(new, self.prefix_summary)

    # What operators do; what they read is `EngineOverview`

    async def set_policies(self, change: PolicyChange) -> PoliciesInfo:
        """Change policies between two steps, all or none; what is in force then."""
        return await self._changes.carry_out(change)

    async def load_adapter(self, name: str, folder: Path) -> AdapterInfo:
        """Let requests name the adapter in a folder, which is read whole before."""
        self._health.refuse_unless_serving()
        return await self._adapters.load(name, folder)

    async def unload_adapter(self, name: str, wait_seconds: float) -> int:
        """Let no request name it any more; how many still have it after this wait."""
        return await self._adapters.unload(name, wait_seconds)

    def load(self) -> SchedulerStats:
        """The scheduler's figures, with requests that are accepted and on their way to it, and with those of
        grammars."""
        (num_pending, num_tokens), grammars, stats = (
            self._door.under_way,
            self._structured.figures(),
            self._stats,
        )
        if grammars.num_compilations:
            stats = replace(
                stats,
                num_cached_grammars=grammars.num_cached,
                num_grammar_compilations_total=grammars.num_compilations,
                mask_wait_seconds_total=grammars.wait_seconds,
            )
        if not num_pending:
            return stats
        return replace(
            stats,
            num_waiting=stats.num_waiting + num_pending,
            num_queued_prompt_tokens=stats.num_queued_prompt_tokens + num_tokens,
            queue_seconds=self._door.outlook().queue_seconds,
        )

    async def inspect(self) -> Inspection:
        """The requests and blocks of a moment between two steps."""
        return await self._inspections.look()

    async def prefix_summary(self) -> PrefixSummary:
        """What the prefix cache held at a moment between two steps, for who routes requests."""
        return self._prefixes.of((await self.inspect()).scheduler)

    # To the thread and from it

    def _send(self, command: Command) -> None:
        assert self._thread is not None
        self._thread.send(command)

    def _deliver(self, outputs: Sequence[EngineOutput], stats: SchedulerStats) -> None:
        """What the thread put out, and the figures of that moment: both at once, so that they agree."""
        self._stats = stats
        deliver = self._live.deliver
        for output in outputs:
            if isinstance(output, _POLICIES_ANSWERS):
                self._changes.deliver(output)
            elif isinstance(output, Inspected):
                self._inspections.deliver(output)
            else:
                deliver(output)

    def _on_thread_end(self, outbox: Outbox, fault: BaseException | None) -> None:
        outbox.cross()
        if fault is not None:
            self._die(fault, str(fault) if isinstance(fault, RankLost) else "")
        self._has_ended.set()

    def _die(self, fault: BaseException, known_reason: str = "") -> None:
        """Nothing more will come of the engine: tell every request, once. known_reason: for operators, where
        it is no arbitrary exception's."""
        if self.health is EngineHealth.DEAD:
            return
        self._logger.critical("engine_dead", num_requests=len(self._live), exc_info=fault)
        if self._flight is not None:
            self._flight.on_fault(f"the engine died of {type(fault).__name__}")
        self._health.become(EngineHealth.DEAD, known_reason)
        reason = f"the engine failed: {fault}"
        self._live.fail_all(reason)
        self._changes.fail_all(reason)
        self._inspections.end()
