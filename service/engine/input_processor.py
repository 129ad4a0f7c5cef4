"""What a client states becomes what the scheduler takes: checked, tokenized, nothing left open."""

from __future__ import annotations

import math
from random import Random

from pageturner.service.core.request import NewRequest
from pageturner.service.engine.api import GenerationRequest, ModelInfo, Prompt
from pageturner.service.engine.prompt_limits import PromptLimits
from pageturner.service.engine.prompts import PromptReader
from pageturner.service.errors import DeadlineExceeded, InvalidArgument, ModelNotFound
from pageturner.service.identity import scoped_id


class InputProcessor:
    """limits: of prompts that are to be answered. max_n: bound on parallel samples of one request. random:
    draws the seeds and ids that are left open. shares_prefixes: whether proved tenants find one another's
    cached blocks."""

    def __init__(
        self,
        prompts: PromptReader,
        model: ModelInfo,
        limits: PromptLimits,
        max_n: int,
        random: Random,
        *,
        shares_prefixes: bool,
    ) -> None:
        self._prompts = prompts
        self._model = model
        self._limits = limits
        self._max_n = max_n
        self._random = random
        self._shares_prefixes = shares_prefixes

    def check(self, request: GenerationRequest) -> int:
        """Refuse what can be refused before the prompt is read. Returns the fewest tokens it can become.

        Raises ModelNotFound, InvalidArgument or DeadlineExceeded.
        """
        request.check_names()
        if request.model and request.model != self._model.name:
            raise ModelNotFound(request.model, self._model.name)
        request.params.check(self._model.vocab_size, self._max_n)
        if request.params.stop and not self._prompts.has_text:
            raise InvalidArgument("stop", f"{self._model.name!r} has no tokenizer, hence no text to stop at")
        if request.deadline_seconds is not None:
            if not math.isfinite(request.deadline_seconds):
                raise InvalidArgument("deadline", f"{request.deadline_seconds} s is not a time")
            if request.deadline_seconds <= 0:
                raise DeadlineExceeded("the deadline had passed when the request arrived")
        return self._prompts.check_size(request.prompt, self._limits)

    async def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's tokens. Raises InvalidArgument, also where they leave no room for an answer."""
        token_ids = await self._prompts.encode(prompt, self._limits)
        self._limits.check_tokens(len(token_ids), "prompt")
        return token_ids

    def name(self, request: GenerationRequest) -> str:
        """The id that the client gave it, or one that is drawn."""
        return request.request_id or f"{self._random.getrandbits(64):016x}"

    def complete(
        self, request: GenerationRequest, request_id: str, token_ids: tuple[int, ...], arrival_time: float
    ) -> NewRequest:
        """The request, its id told from other tenants', a seed in any case, its deadline on our clock.

        request_id: as `name` gave it.
        """
        params, seconds, proved = request.params, request.deadline_seconds, request.identity.tenant
        return NewRequest(
            request_id=scoped_id(proved, request_id),
            prompt_token_ids=token_ids,
            params=params,
            seed=self._random.getrandbits(64) if params.seed is None else params.seed,
            arrival_time=arrival_time,
            eos_token_ids=self._model.eos_token_ids,
            priority=request.priority,
            tenant=proved or request.tenant,
            cache_salt=request.cache_salt,
            cache_tenant="" if self._shares_prefixes else proved,
            bypass_prefix_cache=request.bypass_prefix_cache,
            deadline=None if seconds is None else arrival_time + seconds,
        )
