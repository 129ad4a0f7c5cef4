"""Events and facts from domain values to the wire."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields

from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    FinishedEvent,
    FinishReason,
    RequestTimings,
    SampledToken,
    SchedulerStats,
    ScoredTokensEvent,
    TokenEvent,
    Usage,
)
from pageturner.service.engine.api import (
    AbortOutcome,
    AcceptedEvent,
    ModelInfo,
    ScoreAnswer,
    ServerInfo,
    StreamEvent,
)
from pageturner.service.engine.tenants import TenantReport, TenantsReport
from pageturner.service.policy_host.reports import PoliciesInfo, PolicyInfo, ShadowInfo
from pageturner.v1 import admin_pb2, generation_pb2, model_pb2

FINISH_REASONS: Mapping[FinishReason, generation_pb2.FinishReason] = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: generation_pb2.FINISH_REASON_ABORTED,
}

ABORT_OUTCOMES: Mapping[AbortOutcome, generation_pb2.AbortOutcome] = {
    AbortOutcome.ABORTED: generation_pb2.ABORT_OUTCOME_ABORTED,
    AbortOutcome.ALREADY_FINISHED: generation_pb2.ABORT_OUTCOME_ALREADY_FINISHED,
    AbortOutcome.NOT_FOUND: generation_pb2.ABORT_OUTCOME_NOT_FOUND,
}


def from_event(event: StreamEvent) -> generation_pb2.GenerateStreamResponse:
    """One message of a stream, its sequence number yet to be written."""
    message = generation_pb2.GenerateStreamResponse(request_id=event.request_id)
    match event:
        case AcceptedEvent():
            message.accepted.seed = event.seed
            message.accepted.prompt_tokens = event.num_prompt_tokens
            message.accepted.max_tokens = event.max_tokens
            message.accepted.fingerprint = event.fingerprint
            message.accepted.exact = event.is_exact
            message.accepted.rendered_prompt = event.rendered_prompt
        case TokenEvent():
            message.delta.index = event.index
            message.delta.text = event.text
            message.delta.token_ids.extend(token.token_id for token in event.tokens)
            message.delta.logprobs.extend(from_logprobs(event.tokens))
        case ScoredTokensEvent():
            message.prompt_logprobs.start = event.start
            message.prompt_logprobs.logprobs.extend(from_logprobs(event.tokens))
        case ChoiceFinishedEvent():
            message.choice_finished.index = event.index
            set_finish(message.choice_finished, event)
        case FinishedEvent():
            message.finished.usage.CopyFrom(from_usage(event.usage))
            message.finished.timings.CopyFrom(from_timings(event.timings))
            message.finished.policies.update(event.policies)
            message.finished.policies_changed = event.policies_changed
    return message


def set_finish(
    message: generation_pb2.ChoiceFinished | generation_pb2.Choice, event: ChoiceFinishedEvent
) -> None:
    message.finish_reason = FINISH_REASONS[event.reason]
    if event.score is not None:
        message.score = event.score
    if isinstance(event.matched, str):
        message.stop_string = event.matched
    elif event.matched is not None:
        message.stop_token_id = event.matched
    if event.cumulative_logprob is not None:
        message.cumulative_logprob = event.cumulative_logprob


def from_logprobs(tokens: Iterable[SampledToken]) -> Iterable[generation_pb2.TokenLogprobs]:
    """One for each token that carries a log-probability: all of a request's, or none."""
    for token in tokens:
        if token.logprob is not None:
            yield generation_pb2.TokenLogprobs(
                chosen=generation_pb2.TokenLogprob(token_id=token.token_id, logprob=token.logprob),
                top=[
                    generation_pb2.TokenLogprob(token_id=top.token_id, logprob=top.logprob)
                    for top in token.top_logprobs
                ],
            )


def from_scores(answer: ScoreAnswer) -> generation_pb2.ScoreResponse:
    return generation_pb2.ScoreResponse(
        request_id=answer.request_id,
        scores=[
            generation_pb2.ContinuationScore(
                logprob=score.logprob, greedy=score.is_greedy, tokens=from_logprobs(score.tokens)
            )
            for score in answer.scores
        ],
        usage=from_usage(answer.usage),
        timings=from_timings(answer.timings),
    )


def from_usage(usage: Usage) -> generation_pb2.Usage:
    return generation_pb2.Usage(
        prompt_tokens=usage.num_prompt_tokens,
        cached_prompt_tokens=usage.num_cached_prompt_tokens,
        output_tokens=usage.num_output_tokens,
        resumed_tokens=usage.num_resumed_tokens,
        drafted_tokens=usage.num_drafted_tokens,
        accepted_draft_tokens=usage.num_accepted_drafts,
    )


def from_timings(timings: RequestTimings) -> generation_pb2.Timings:
    return generation_pb2.Timings(
        queue_seconds=timings.queue_seconds,
        prefill_seconds=timings.prefill_seconds,
        decode_seconds=timings.decode_seconds,
        preemptions=generation_pb2.Preemptions(
            swaps=timings.num_swaps,
            recomputes=timings.num_recomputes,
            tail_reclaims=timings.num_tail_reclaims,
        ),
    )


def from_model(model: ModelInfo) -> model_pb2.Model:
    return model_pb2.Model(**asdict(model))


def from_server_info(info: ServerInfo) -> admin_pb2.GetServerInfoResponse:
    return admin_pb2.GetServerInfoResponse(**asdict(info))


_FIGURES = tuple(field.name for field in fields(SchedulerStats) if field.compare)


def from_stats(stats: SchedulerStats) -> admin_pb2.Load:
    return admin_pb2.Load(**{name: getattr(stats, name) for name in _FIGURES})


def from_tenants(report: TenantsReport) -> admin_pb2.ListTenantsResponse:
    return admin_pb2.ListTenantsResponse(
        tenants=map(_from_tenant, report.tenants),
        num_tenants=report.num_tenants,
        refused_total={cause.value: count for cause, count in report.refused.items()},
    )


def _from_tenant(report: TenantReport) -> admin_pb2.Tenant:
    limits = asdict(report.limits)
    del limits["adapters"]  # told to whom they bind, by the names that GetModel gives
    return admin_pb2.Tenant(
        name=report.tenant,
        num_requests=report.num_requests,
        num_waiting=report.num_waiting,
        num_queued_tokens=report.num_queued_tokens,
        tokens_left=report.tokens_left,
        limits=admin_pb2.TenantLimits(**limits),
        refused_total={cause.value: count for cause, count in report.refused.items()},
    )


def from_policies(info: PoliciesInfo) -> admin_pb2.GetPoliciesResponse:
    return admin_pb2.GetPoliciesResponse(policies=map(from_policy, info.axes), revision=info.revision)


def from_policy(policy: PolicyInfo) -> admin_pb2.Policy:
    message = admin_pb2.Policy(
        axis=policy.axis,
        name=policy.name,
        options=_to_json(policy.options),
        available=policy.available,
        quarantined=policy.is_quarantined,
        faults=policy.num_faults,
        last_fault=policy.last_fault,
        quarantine_reason=policy.quarantine_reason,
        calls=policy.num_calls,
        seconds=policy.seconds,
        step_seconds=policy.step_seconds,
        asking_seconds=policy.asking_seconds,
    )
    if policy.shadow is not None:
        message.shadow.CopyFrom(from_shadow(policy.shadow))
    return message


def from_shadow(shadow: ShadowInfo) -> admin_pb2.Shadow:
    return admin_pb2.Shadow(
        name=shadow.name,
        options=_to_json(shadow.options),
        compared=shadow.num_compared,
        disagreements=shadow.num_disagreements,
        samples=[
            admin_pb2.Disagreement(subject=one.subject, obeyed=one.obeyed, shadow=one.shadow)
            for one in shadow.samples
        ],
        faults=shadow.num_faults,
        last_fault=shadow.last_fault,
        seconds=shadow.seconds,
        step_seconds=shadow.step_seconds,
        stopped=shadow.is_stopped,
    )


def _to_json(options: Mapping[str, object]) -> dict[str, str]:
    return {name: json.dumps(value, default=str) for name, value in options.items()}
