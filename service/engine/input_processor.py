"""What a client states becomes what the scheduler takes: checked, tokenized, nothing left open."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

from pageturner.service.core.request import NewRequest, ResumedChoice
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.engine.adapters import Adapters
from pageturner.service.engine.api import GenerationRequest, ModelInfo, Prompt, Resumption
from pageturner.service.engine.fingerprint import Fingerprint
from pageturner.service.engine.prompt_limits import PromptLimits
from pageturner.service.engine.prompts import PromptReader
from pageturner.service.engine.structured_outputs import StructuredOutputs
from pageturner.service.errors import DeadlineExceeded, InvalidArgument, ModelNotFound
from pageturner.service.identity import scoped_id


class InputProcessor:
    """limits: of prompts that are to be answered. max_n: bound on parallel samples of one request. random:
    draws the seeds and ids that are left open. fingerprint: what answers that are resumed must agree with.
    shares_prefixes: whether proved tenants find one another's cached blocks. structured: checks forms.
    adapters: those that requests may name."""

    def __init__(
        self,
        prompts: PromptReader,
        model: ModelInfo,
        limits: PromptLimits,
        max_n: int,
        random: Random,
        fingerprint: Fingerprint,
        structured: StructuredOutputs,
        adapters: Adapters,
        *,
        shares_prefixes: bool,
    ) -> None:
        self._prompts = prompts
        self._model = model
        self._limits = limits
        self._max_n = max_n
        self._random = random
        self._shares_prefixes = shares_prefixes
        self._fingerprint = fingerprint
        self._structured = structured
        self._adapters = adapters

    def check(self, request: GenerationRequest) -> int:
        """Refuse what can be refused before the prompt is read. Returns the fewest tokens it can become.

        Raises ModelNotFound, AdapterNotFound, InvalidArgument, NotResumable or DeadlineExceeded.
        """
        request.check_names()
        if request.model and request.model != self._model.name:
            raise ModelNotFound(request.model, self._model.name)
        if request.adapter:
            self._adapters.find(request.adapter, request.identity.limits.adapters)
        request.params.check(self._model.vocab_size, self._max_n)
        if request.params.beam_search is not None:
            self._check_width(request.params, request.params.beam_search.width)
        self._structured.check(request.params)
        if request.params.stop and not self._prompts.has_text:
            raise InvalidArgument("stop", f"{self._model.name!r} has no tokenizer, hence no text to stop at")
        if request.deadline_seconds is not None:
            if not math.isfinite(request.deadline_seconds):
                raise InvalidArgument("deadline", f"{request.deadline_seconds} s is not a time")
            if request.deadline_seconds <= 0:
                raise DeadlineExceeded("the deadline had passed when the request arrived")
        num_tokens = self._prompts.check_size(request.prompt, self._limits)
        if request.continuations:
            return num_tokens + self._check_continuations(request.continuations)
        return (
            num_tokens if request.resume is None else num_tokens + self._check_resume(request, request.resume)
        )

    def _check_width(self, params: SamplingParams, width: int) -> None:
        """Refuse a beam search that the vocabulary can't fill."""
        eos = () if params.ignore_eos else self._model.eos_token_ids
        num_stops, vocab_size = len({*params.stop_token_ids, *eos}), self._model.vocab_size
        if width + num_stops > vocab_size:
            reason = f"{width} and {num_stops} stop tokens are over the vocabulary of {vocab_size}"
            raise InvalidArgument("beam_search.width", reason)

    def _check_continuations(self, continuations: tuple[tuple[int, ...], ...]) -> int:
        """Refuse what the model has no token for. Returns how many tokens there are."""
        for index, token_ids in enumerate(continuations):
            path = f"continuations[{index}]"
            if not token_ids:
                raise InvalidArgument(path, "has no tokens")
            self._check_ids(token_ids, path)
        return sum(map(len, continuations))

    def _check_ids(self, token_ids: tuple[int, ...], path: str) -> None:
        vocab_size = self._model.vocab_size
        self._limits.check_tokens(len(token_ids), path)
        if token_ids and max(token_ids) >= vocab_size:
            position = next(i for i, token_id in enumerate(token_ids) if token_id >= vocab_size)
            reason = f"{token_ids[position]} is not in [0, {vocab_size - 1}]"
            raise InvalidArgument(f"{path}[{position}]", reason)

    def _check_resume(self, request: GenerationRequest, resume: Resumption) -> int:
        """Refuse what no answer of this request and model can be. Returns the tokens that are known."""
        adapter = self._adapters.find(request.adapter) if request.adapter else ""
        self._fingerprint.check_server(resume.fingerprint, adapter, allow_inexact=resume.allow_inexact)
        if len(resume.choices) != request.params.n:
            raise InvalidArgument("resume.choices", f"{len(resume.choices)} choices; n is {request.params.n}")
        for index, choice in enumerate(resume.choices):
            if request.params.is_selective and (choice.token_ids or choice.is_finished):
                reason = "of the best of more choices, a part can't be gone on with; ask for the answer anew"
                raise InvalidArgument(f"resume.choices[{index}]", reason)
            if request.params.beam_search is not None and choice.num_characters is None:
                reason = "is to be stated of a beam search, which begins anew"
                raise InvalidArgument(f"resume.choices[{index}].text_characters", reason)
            self._check_ids(choice.token_ids, f"resume.choices[{index}].token_ids")
        return sum(len(choice.token_ids) for choice in resume.choices)

    async def read(self, prompt: Prompt, tenant: str) -> tuple[tuple[int, ...], str]:
        """The prompt's tokens, and the text that became them. Raises InvalidArgument, also where they leave
        no room for an answer."""
        token_ids, text = await self._prompts.read(prompt, self._limits, tenant=tenant)
        self._limits.check_tokens(len(token_ids), "prompt")
        return token_ids, text

    def name(self, request_id: str) -> str:
        """The id that a client gave, or one that is drawn."""
        return request_id or f"{self._random.getrandbits(64):016x}"

    def complete(
        self,
        request: GenerationRequest,
        request_id: str,
        token_ids: tuple[int, ...],
        arrival_time: float,
        adapter: str = "",
    ) -> NewRequest:
        """The request, its id told from other tenants', a seed in any case, its deadline on our clock.

        request_id: as `name` gave it. adapter: the digest of the one that it holds. Raises NotResumable for a
        prompt that became other tokens than it was.
        """
        params, seconds, proved = request.params, request.deadline_seconds, request.identity.tenant
        resume = request.resume
        grammar = "" if params.structured_output is None else self._structured.identity
        if resume is not None:
            self._fingerprint.check_prompt(
                resume.fingerprint, token_ids, grammar, allow_inexact=resume.allow_inexact
            )
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
            adapter=adapter,
            bypass_prefix_cache=request.bypass_prefix_cache,
            deadline=None if seconds is None else arrival_time + seconds,
            trace_parent=request.trace_parent,
            resumed=_known_choices(request),
            fingerprint=self._fingerprint.of_prompt(token_ids, grammar, adapter),
            is_exact=self._fingerprint.is_exact,
            is_scoring=bool(request.continuations),
            known=() if resume is None or params.beam_search is None else resume.choices,
            hands_over=request.hands_over,
        )


def _known_choices(request: GenerationRequest) -> tuple[ResumedChoice, ...]:
    """What is known of the answer's choices: to be scored, or to be gone on with."""
    if request.continuations:
        return tuple(map(ResumedChoice, request.continuations))
    if request.resume is None or request.params.is_selective or request.params.beam_search is not None:
        return ()  # of selected choices nothing was told, and all are sampled once more; so are beams
    return request.resume.choices


def as_it_began(request: GenerationRequest) -> GenerationRequest:
    """The request, with the seed and the bound in force that an answer which is resumed began with.

    Raises InvalidArgument where the request says otherwise.
    """
    params, resume = request.params, request.resume
    if resume is None:
        return request
    if params.seed not in (None, resume.seed):
        raise InvalidArgument("resume.seed", f"{resume.seed}; the request's seed is {params.seed}")
    max_tokens = params.max_tokens if resume.max_tokens is None else resume.max_tokens
    if params.max_tokens not in (None, max_tokens):
        reason = f"{max_tokens}; the request's max_tokens is {params.max_tokens}"
        raise InvalidArgument("resume.max_tokens", reason)
    return replace(request, params=replace(params, seed=resume.seed, max_tokens=max_tokens))
