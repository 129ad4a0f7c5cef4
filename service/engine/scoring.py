"""Scores: a call's continuations become requests, one behind the other, each of as many choices as may run
side by side.

The choices of a request share its prompt's blocks; the requests share them through the prefix cache. Each
request passes the same door as any other, and is preempted and resumed like one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import astuple, replace

from pageturner.service.core.clock import Clock
from pageturner.service.core.outputs import (
    FinishedEvent,
    RequestTimings,
    SampledToken,
    ScoredTokensEvent,
    Usage,
)
from pageturner.service.core.sampling_params import MAX_LOGPROBS, SamplingParams
from pageturner.service.engine.api import (
    ContinuationScore,
    GenerationRequest,
    RequestStream,
    ScoreAnswer,
    ScoreRequest,
    TextPrompt,
)
from pageturner.service.engine.prompt_limits import PromptLimits
from pageturner.service.engine.prompts import PromptReader
from pageturner.service.engine.reception import Fitting
from pageturner.service.errors import InvalidArgument

MAX_CONTINUATIONS = 1024
MAX_CONTINUATION_TOKENS = 1 << 16
"""Of all continuations of one call."""

_TokenIds = tuple[int, ...]


class Scorer:
    """limits: of prompts. fitting: what one request may hold. submit: as the engine's."""

    def __init__(
        self,
        prompts: PromptReader,
        limits: PromptLimits,
        fitting: Fitting,
        submit: Callable[[GenerationRequest], Awaitable[RequestStream]],
        clock: Clock,
    ) -> None:
        self._prompts = prompts
        self._limits = limits
        self._fitting = fitting
        self._submit = submit
        self._clock = clock

    async def score(self, request: ScoreRequest, request_id: str) -> ScoreAnswer:
        """request_id: the one in force, which each of its requests has in turn.

        Raises InvalidArgument naming the field, and what `EngineClient.submit` and its stream raise.
        """
        began = self._clock.now()
        _check_counts(request)
        tenant = request.identity.tenant
        prompt = await self._prompts.encode(request.prompt, self._limits, tenant=tenant)
        continuations = [
            await self._encode(index, continuation, tenant)
            for index, continuation in enumerate(request.continuations)
        ]
        self._check_sizes(len(prompt), continuations)
        scores: list[ContinuationScore] = []
        ends: list[FinishedEvent] = []
        while left := continuations[len(scores) :]:
            group = tuple(left[: self._fitting.num_side_by_side(len(prompt), [len(ids) for ids in left])])
            seconds = request.deadline_seconds
            if seconds is not None:
                seconds -= self._clock.now() - began
            generation = _generation(replace(request, deadline_seconds=seconds), request_id, prompt, group)
            tokens, end = await self._tokens_of(generation)
            scores += [_score_of(each, request.num_top) for each in tokens]
            ends.append(end)
        return ScoreAnswer(request_id, tuple(scores), _usage(ends), _timings(ends))

    async def _encode(self, index: int, continuation: str | _TokenIds, tenant: str) -> _TokenIds:
        """Its token ids: a text by itself, without special tokens. Raises InvalidArgument with its path."""
        given = (
            TextPrompt(continuation, parse_special=False) if isinstance(continuation, str) else continuation
        )
        try:
            return await self._prompts.encode(given, self._limits, add_special_tokens=False, tenant=tenant)
        except InvalidArgument as error:
            _, bracket, position = error.field.partition("[")
            leaf = "text" if isinstance(continuation, str) else f"token_ids.ids{bracket}{position}"
            raise InvalidArgument(f"continuations[{index}].{leaf}", error.reason) from error

    def _check_sizes(self, num_prompt_tokens: int, continuations: list[_TokenIds]) -> None:
        num_tokens = sum(map(len, continuations))
        if num_tokens > MAX_CONTINUATION_TOKENS:
            reason = f"{num_tokens} tokens together; at most {MAX_CONTINUATION_TOKENS}"
            raise InvalidArgument("continuations", reason)
        longest = self._fitting.options.max_model_len
        for index, token_ids in enumerate(continuations):
            if num_prompt_tokens + len(token_ids) > longest:
                reason = f"{len(token_ids)} tokens and a prompt of {num_prompt_tokens} exceed "
                raise InvalidArgument(f"continuations[{index}]", f"{reason}max_model_len {longest}")
            if not self._fitting.num_side_by_side(num_prompt_tokens, [len(token_ids)]):
                blocks = f"{self._fitting.pool.num_blocks} blocks of {self._fitting.pool.block_size}"
                reason = f"{len(token_ids)} tokens and a prompt of {num_prompt_tokens} never fit the cache"
                raise InvalidArgument(f"continuations[{index}]", f"{reason} of {blocks}")

    async def _tokens_of(self, request: GenerationRequest) -> tuple[list[list[SampledToken]], FinishedEvent]:
        """The scored tokens of one request's continuations, and its end."""
        tokens: list[list[SampledToken]] = [[] for _ in request.continuations]
        end: FinishedEvent | None = None
        stream = await self._submit(request)
        try:
            async for event in stream:
                if isinstance(event, ScoredTokensEvent) and event.index is not None:
                    tokens[event.index] += event.tokens
                elif isinstance(event, FinishedEvent):
                    end = event
        finally:
            await asyncio.shield(stream.aclose())
        assert end is not None, "a stream that ends without an error ends with its FinishedEvent"
        return tokens, end


def _check_counts(request: ScoreRequest) -> None:
    if not request.continuations:
        raise InvalidArgument("continuations", "is empty")
    if len(request.continuations) > MAX_CONTINUATIONS:
        reason = f"{len(request.continuations)} entries; at most {MAX_CONTINUATIONS}"
        raise InvalidArgument("continuations", reason)
    if not 0 <= request.num_top <= MAX_LOGPROBS:
        raise InvalidArgument("logprobs", f"{request.num_top} is not in [0, {MAX_LOGPROBS}]")


def _generation(
    request: ScoreRequest, request_id: str, prompt: _TokenIds, continuations: tuple[_TokenIds, ...]
) -> GenerationRequest:
    params = SamplingParams(
        temperature=0.0,
        seed=0,
        n=len(continuations),
        max_tokens=max(map(len, continuations)),
        logprobs=max(1, request.num_top),  # the most likely token says whether a choice is greedy
    )
    return GenerationRequest(
        prompt,
        params,
        request_id,
        request.model,
        request.priority,
        request.tenant,
        request.cache_salt,
        request.bypass_prefix_cache,
        request.deadline_seconds,
        request.trace_parent,
        identity=request.identity,
        continuations=continuations,
        adapter=request.adapter,
    )


def _score_of(tokens: list[SampledToken], num_top: int) -> ContinuationScore:
    """tokens: each with one alternative at least."""
    return ContinuationScore(
        math.fsum(token.logprob or 0.0 for token in tokens),
        all(token.top_logprobs[0].token_id == token.token_id for token in tokens),
        tuple(SampledToken(each.token_id, each.logprob, each.top_logprobs[:num_top]) for each in tokens),
    )


def _usage(ends: list[FinishedEvent]) -> Usage:
    first = ends[0].usage
    num_scored = sum(end.usage.num_output_tokens for end in ends)
    return Usage(first.num_prompt_tokens, first.num_cached_prompt_tokens, num_scored)


def _timings(ends: list[FinishedEvent]) -> RequestTimings:
    """Of requests that ran one behind the other."""
    queue, prefill, decode, *preemptions = map(sum, zip(*(astuple(end.timings) for end in ends), strict=True))
    swaps, recomputes, tail_reclaims = preemptions
    return RequestTimings(queue, prefill, decode, swaps, recomputes, tail_reclaims)
