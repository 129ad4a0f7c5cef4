"""The client's values to protobuf and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message

from pageturner.policies.spec import PolicySpec
from pageturner.service.client.values import (
    Accepted,
    ChoiceFinished,
    Delta,
    Finished,
    Options,
    Sampling,
    StreamItem,
)
from pageturner.service.core.outputs import (
    FinishReason,
    RequestTimings,
    SampledToken,
    SchedulerStats,
    TokenLogprob,
    Usage,
)
from pageturner.service.engine.api import (
    AbortOutcome,
    ChatMessage,
    ChatPrompt,
    ModelInfo,
    PolicyInfo,
    Prompt,
    ShadowInfo,
    TextPrompt,
)
from pageturner.service.policy_host.shadow import Disagreement
from pageturner.v1 import admin_pb2, generation_pb2, model_pb2

# To the wire


_Request = TypeVar("_Request", generation_pb2.GenerateRequest, generation_pb2.GenerateStreamRequest)


def to_request(kind: type[_Request], prompt: Prompt, options: Options) -> tuple[_Request, float | None]:
    """What is not named among Sampling's fields has the same name in the request."""
    given = dict(options)
    timeout: Any = given.pop("timeout_seconds", None)
    sampling = {name: given.pop(name) for name in Sampling.__annotations__ if name in given}
    values: dict[str, Any] = {**given, "sampling": generation_pb2.SamplingParams(**sampling)}  # type: ignore[arg-type] # TypedDict.pop gives object
    return kind(prompt=to_prompt(prompt), **values), timeout


def to_prompt(prompt: Prompt) -> generation_pb2.Prompt:
    if isinstance(prompt, str):
        return generation_pb2.Prompt(text=prompt)
    if isinstance(prompt, TextPrompt):
        return generation_pb2.Prompt(text=prompt.text, parse_special=prompt.parse_special)
    if isinstance(prompt, ChatPrompt):
        chat = to_prompt(prompt.messages)
        chat.chat.template_variables.update(
            {name: json.dumps(value) for name, value in prompt.template_variables.items()}
        )
        chat.chat.continue_final_message = prompt.continue_final_message
        return chat
    ids = [part for part in prompt if isinstance(part, int)]
    if len(ids) == len(prompt):
        return generation_pb2.Prompt(token_ids=generation_pb2.TokenIds(ids=ids))
    turns = [part for part in prompt if isinstance(part, ChatMessage)]
    messages = [generation_pb2.ChatMessage(role=turn.role, content=turn.content) for turn in turns]
    return generation_pb2.Prompt(chat=generation_pb2.Chat(messages=messages))


# From the wire


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


def from_message(message: generation_pb2.GenerateStreamResponse) -> StreamItem | None:
    """None for an event that a newer server knows and this client does not."""
    match message.WhichOneof("event"):
        case "accepted":
            accepted = message.accepted
            return Accepted(message.request_id, accepted.seed, accepted.prompt_tokens, accepted.max_tokens)
        case "delta":
            return Delta(message.delta.index, message.delta.text, from_tokens(message.delta))
        case "choice_finished":
            choice = message.choice_finished
            return ChoiceFinished(choice.index, from_reason(choice), from_matched(choice))
        case "finished":
            finished = message.finished
            return Finished(
                from_usage(finished.usage),
                from_timings(finished.timings),
                dict(finished.policies),
                finished.policies_changed,
            )
    return None


def from_tokens(message: generation_pb2.Delta | generation_pb2.Choice) -> tuple[SampledToken, ...]:
    if not message.logprobs:
        return tuple(map(SampledToken, message.token_ids))
    return tuple(
        SampledToken(
            token_id,
            logprobs.chosen.logprob,
            tuple(TokenLogprob(top.token_id, top.logprob) for top in logprobs.top),
        )
        for token_id, logprobs in zip(message.token_ids, message.logprobs, strict=True)
    )


def from_reason(message: generation_pb2.ChoiceFinished | generation_pb2.Choice) -> FinishReason:
    return _FINISH_REASONS.get(message.finish_reason, FinishReason.UNSPECIFIED)


def from_matched(message: generation_pb2.ChoiceFinished | generation_pb2.Choice) -> str | int | None:
    match message.WhichOneof("matched"):
        case "stop_string":
            return message.stop_string
        case "stop_token_id":
            return message.stop_token_id
    return None


def from_usage(usage: generation_pb2.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.cached_prompt_tokens, usage.output_tokens)


def from_timings(timings: generation_pb2.Timings) -> RequestTimings:
    return RequestTimings(
        timings.queue_seconds,
        timings.prefill_seconds,
        timings.decode_seconds,
        timings.preemptions.swaps,
        timings.preemptions.recomputes,
        timings.preemptions.tail_reclaims,
    )


def field_values(kind: type[Any], message: Message) -> dict[str, Any]:
    """The fields that a domain value and its message have under one name."""
    return {field.name: getattr(message, field.name) for field in fields(kind)}


def from_model(model: model_pb2.Model) -> ModelInfo:
    return ModelInfo(**field_values(ModelInfo, model) | {"eos_token_ids": tuple(model.eos_token_ids)})


def to_choice(spec: PolicySpec | None) -> admin_pb2.PolicyChoice:
    if spec is None:
        return admin_pb2.PolicyChoice()
    options = {name: json.dumps(value) for name, value in spec.options.items()}
    return admin_pb2.PolicyChoice(name=spec.name, options=options)


def from_policy(policy: admin_pb2.Policy) -> PolicyInfo:
    return PolicyInfo(
        policy.axis,
        policy.name,
        _options(policy.options),
        tuple(policy.available),
        policy.quarantined,
        policy.faults,
        policy.last_fault,
        _shadow(policy.axis, policy.shadow) if policy.HasField("shadow") else None,
    )


def _shadow(axis: str, shadow: admin_pb2.Shadow) -> ShadowInfo:
    return ShadowInfo(
        shadow.name,
        _options(shadow.options),
        shadow.compared,
        shadow.disagreements,
        tuple(Disagreement(axis, one.subject, one.obeyed, one.shadow) for one in shadow.samples),
        shadow.faults,
        shadow.last_fault,
    )


def _options(options: Mapping[str, str]) -> dict[str, object]:
    return {name: json.loads(value) for name, value in options.items()}


def from_stats(load: admin_pb2.Load) -> SchedulerStats:
    return SchedulerStats(**field_values(SchedulerStats, load))
