"""Takes requests in: every check between a call and the engine thread, in the one order that is right."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from pageturner.service.core.clock import Clock
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.request import NewRequest
from pageturner.service.core.scheduling.intake import Room, checked_max_tokens
from pageturner.service.engine.adapters import Adapters
from pageturner.service.engine.api import GenerationRequest
from pageturner.service.engine.door import Door
from pageturner.service.engine.health import Health
from pageturner.service.engine.input_processor import InputProcessor, as_it_began
from pageturner.service.engine.live_requests import LiveRequests
from pageturner.service.engine.metrics import Metrics
from pageturner.service.engine.stream import BufferedStream
from pageturner.service.engine.structured_outputs import StructuredOutputs
from pageturner.service.engine.tenants import Holding, TenantLedger
from pageturner.service.errors import PageturnerError
from pageturner.service.identity import Identity


@dataclass(frozen=True, slots=True)
class Fitting:
    """What the scheduler can hold: its options, and its pool."""

    options: SchedulerOptions
    pool: Room

    def max_tokens(self, new: NewRequest) -> int:
        """The bound on a choice that the scheduler will put in force. Raises InvalidArgument as it would."""
        return checked_max_tokens(new, self.options, self.pool)

    def num_side_by_side(self, num_prompt_tokens: int, lengths: Sequence[int]) -> int:
        """How many of the first of these continuations one request may hold; 0 where not even one fits.

        A quarter of all sequences at most: more would wait until nearly all others have ended.
        """
        count = min(self.options.max_n, max(1, self.options.max_num_seqs // 4), len(lengths))
        while count:
            longest = max(lengths[:count])
            if self.pool.whole.num_peak_blocks(num_prompt_tokens, longest, count) <= self.pool.num_blocks:
                break
            count //= 2
        return count


class Reception:
    """Lives on the event loop. A request that is refused, or whose caller is cancelled, leaves nothing
    behind: neither a place at the door, nor a charge to its tenant, nor an id, nor a hold on its adapter.

    metrics: counts refusals, each once. take_in: before a request goes to the scheduler, fetches what other
    servers compute of its prompt; None where there are none.
    """

    def __init__(
        self,
        inputs: InputProcessor,
        structured: StructuredOutputs,
        door: Door,
        tenants: TenantLedger,
        live: LiveRequests,
        health: Health,
        adapters: Adapters,
        *,
        limits: Fitting,
        clock: Clock,
        metrics: Metrics,
        take_in: Callable[[NewRequest], Awaitable[None]] | None = None,
    ) -> None:
        self._take_in = take_in
        self._inputs = inputs
        self._structured = structured
        self._door = door
        self._tenants = tenants
        self._live = live
        self._health = health
        self._adapters = adapters
        self._limits = limits
        self._clock = clock
        self._metrics = metrics

    def name(self, request_id: str) -> str:
        """The id that a client gave, or one that is drawn."""
        return self._inputs.name(request_id)

    async def take(self, request: GenerationRequest) -> BufferedStream:
        """Its stream, once the scheduler has it. Raises the refusal: InvalidArgument, QueueFull ..."""
        try:
            return await self._take(request)
        except PageturnerError as error:
            self._metrics.refused(error)
            raise

    async def _take(self, request: GenerationRequest) -> BufferedStream:
        arrival_time = self._clock.now()
        self._health.refuse_unless_serving()
        request = as_it_began(request)
        num_tokens = self._inputs.check(request)
        params = replace(request.params, max_tokens=None) if request.continuations else request.params
        priority = self._tenants.check(request.identity, params, request.priority)
        if priority != request.priority:
            request = replace(request, priority=priority)
        tenant, request_id = request.identity.tenant, self.name(request.request_id)
        self._live.refuse_duplicate(tenant, request_id)
        self._door.check(request, arrival_time, num_tokens)  # before the work of reading the prompt
        likely = request.params.max_tokens or request.identity.limits.max_tokens
        likely = likely or self._limits.options.max_model_len - num_tokens
        likely = 0 if request.continuations else likely
        holding = self._tenants.enter(request.identity, num_tokens, request.params.num_sequences * likely)
        try:
            if request.adapter:
                holding.adapter = await self._adapters.acquire(request.adapter)
            token_ids, text = await self._inputs.read(request.prompt, tenant)
            resumed = () if request.resume is None else request.resume.choices
            grammar = await self._structured.prepare(request.params, resumed, tenant)
            adapter = "" if holding.adapter is None else holding.adapter.digest
            new = self._inputs.complete(request, request_id, token_ids, arrival_time, adapter)
            if self._take_in is not None:
                await self._take_in(new)
            # This may have taken a while. From here to the scheduler nothing is waited for.
            self._health.refuse_unless_serving()
            self._live.refuse_duplicate(tenant, request_id)
            self._door.check(request, arrival_time, len(token_ids), new.num_resumed_tokens)
            new = self._charge(request.identity, holding, new)
        except BaseException:
            self._tenants.cancel(holding)
            raise
        rendered = text if request.return_prompt else ""
        return await self._live.submit(new, request_id, holding, grammar, rendered)

    def _charge(self, identity: Identity, holding: Holding, new: NewRequest) -> NewRequest:
        """Put the request on its tenant's account, max_tokens stated where the tenant has limits of tokens.

        Raises InvalidArgument as the scheduler would, or TenantLimitReached.
        """
        limits, num_prompt, num_resumed = identity.limits, len(new.prompt_token_ids), new.num_resumed_tokens
        if new.is_scoring or (limits.max_tokens is None and limits.tokens_per_minute is None):
            self._tenants.charge(identity, holding, num_prompt, num_resumed, num_resumed)
            return new
        fitting = self._limits.max_tokens(new)
        max_tokens = fitting if limits.max_tokens is None else min(fitting, limits.max_tokens)
        num_outputs = new.params.num_sequences * max_tokens
        self._tenants.charge(identity, holding, num_prompt, num_outputs, num_resumed)
        return replace(new, params=replace(new.params, max_tokens=max_tokens))
