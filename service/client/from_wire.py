"""Answers of GenerationService, from their messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pageturner.service.client.values import Choice, Completion
from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    FinishedEvent,
    FinishReason,
    RequestTimings,
    SampledToken,
    ScoredTokensEvent,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from pageturner.service.engine.api import (
    AbortOutcome,
    AcceptedEvent,
    ContinuationScore,
    ScoreAnswer,
    StreamEvent,
)
from pageturner.v1 import generation_pb2

_FINISH_REASONS = {
    generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    generation_pb2.FINISH_REASON_ABORTED: FinishReason.ABORTED,
}

ABORT_OUTCOMES = {
    generation_pb2.ABORT_OUTCOME_ABORTED: AbortOutcome.ABORTED,
    generation_pb2.ABORT_OUTCOME_ALREADY_FINISHED: AbortOutcome.ALREADY_FINISHED,
    generation_pb2.ABORT_OUTCOME_NOT_FOUND: AbortOutcome.NOT_FOUND,
}


def most_telling(outcomes: Iterable[Mapping[str, AbortOutcome]]) -> Mapping[str, AbortOutcome]:
    """What became of each request, by what several servers said: one that had it knows best."""
    found: dict[str, AbortOutcome] = {}
    for outcome_of in outcomes:
        for request_id, outcome in outcome_of.items():
            found[request_id] = min(found.get(request_id, outcome), outcome, key=_TELLING.index)
    return found


_TELLING = (AbortOutcome.ABORTED, AbortOutcome.ALREADY_FINISHED, AbortOutcome.NOT_FOUND)


def from_message(message: generation_pb2.GenerateStreamResponse) -> StreamEvent | None:
    """None for an event that a newer server knows and this client does not."""
    request_id = message.request_id
    match message.WhichOneof("event"):
        case "accepted":
            accepted = message.accepted
            return AcceptedEvent(
                request_id,
                accepted.seed,
                accepted.prompt_tokens,
                accepted.max_tokens,
                accepted.fingerprint,
                accepted.exact,
                accepted.rendered_prompt,
            )
        case "delta":
            delta = message.delta
            return TokenEvent(request_id, delta.index, from_tokens(delta), delta.text)
        case "prompt_logprobs":
            scored = message.prompt_logprobs
            return ScoredTokensEvent(request_id, None, scored.start, from_logprobs(scored.logprobs))
        case "choice_finished":
            choice = message.choice_finished
            return ChoiceFinishedEvent(
                request_id,
                choice.index,
                from_reason(choice),
                from_matched(choice),
                from_score(choice),
                from_sum(choice),
            )
        case "finished":
            finished = message.finished
            return FinishedEvent(
                request_id,
                from_usage(finished.usage),
                from_timings(finished.timings),
                policies=dict(finished.policies),
                policies_changed=finished.policies_changed,
            )
    return None


def from_response(response: generation_pb2.GenerateResponse) -> Completion:
    """The answer to Generate as a completion."""
    return Completion(
        response.request_id,
        response.seed,
        tuple(
            Choice(
                choice.index,
                choice.text,
                from_tokens(choice),
                from_reason(choice),
                from_matched(choice),
                from_score(choice),
                from_sum(choice),
            )
            for choice in response.choices
        ),
        from_usage(response.usage),
        from_timings(response.timings),
        dict(response.policies),
        response.policies_changed,
        from_logprobs(response.prompt_logprobs),
        response.rendered_prompt,
    )


def from_scores(response: generation_pb2.ScoreResponse) -> ScoreAnswer:
    """The answer to Score."""
    return ScoreAnswer(
        response.request_id,
        tuple(
            ContinuationScore(score.logprob, score.greedy, from_logprobs(score.tokens))
            for score in response.scores
        ),
        from_usage(response.usage),
        from_timings(response.timings),
    )


def from_tokens(message: generation_pb2.Delta | generation_pb2.Choice) -> tuple[SampledToken, ...]:
    if not message.logprobs:
        return tuple(map(SampledToken, message.token_ids))
    return from_logprobs(message.logprobs)


def from_logprobs(messages: Iterable[generation_pb2.TokenLogprobs]) -> tuple[SampledToken, ...]:
    return tuple(
        SampledToken(
            logprobs.chosen.token_id,
            logprobs.chosen.logprob,
            tuple(TokenLogprob(top.token_id, top.logprob) for top in logprobs.top),
        )
        for logprobs in messages
    )


def from_sum(message: generation_pb2.ChoiceFinished | generation_pb2.Choice) -> float | None:
    return message.cumulative_logprob if message.HasField("cumulative_logprob") else None


def from_reason(message: generation_pb2.ChoiceFinished | generation_pb2.Choice) -> FinishReason:
    return _FINISH_REASONS.get(message.finish_reason, FinishReason.UNSPECIFIED)


def from_matched(message: generation_pb2.ChoiceFinished | generation_pb2.Choice) -> str | int | None:
    match message.WhichOneof("matched"):
        case "stop_string":
            return message.stop_string
        case "stop_token_id":
            return message.stop_token_id
    return None


def from_score(message: generation_pb2.ChoiceFinished | generation_pb2.Choice) -> float | None:
    return message.score if message.HasField("score") else None


def from_usage(usage: generation_pb2.Usage) -> Usage:
    return Usage(
        usage.prompt_tokens,
        usage.cached_prompt_tokens,
        usage.output_tokens,
        usage.resumed_tokens,
        usage.drafted_tokens,
        usage.accepted_draft_tokens,
    )


def from_timings(timings: generation_pb2.Timings) -> RequestTimings:
    return RequestTimings(
        timings.queue_seconds,
        timings.prefill_seconds,
        timings.decode_seconds,
        timings.preemptions.swaps,
        timings.preemptions.recomputes,
        timings.preemptions.tail_reclaims,
    )
