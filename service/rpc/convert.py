"""Requests from the wire to domain values, and events and facts from domain values to the wire."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from pageturner.policies.spec import PolicySpec
from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    FinishedEvent,
    FinishReason,
    RequestTimings,
    SampledToken,
    SchedulerStats,
    TokenEvent,
    Usage,
)
from pageturner.service.core.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from pageturner.service.engine.api import (
    MAX_NAME_CHARACTERS,
    AbortOutcome,
    AcceptedEvent,
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    ModelInfo,
    PolicyChange,
    Prompt,
    ServerInfo,
    StreamEvent,
    TextPrompt,
)
from pageturner.service.engine.prompt_limits import PromptLimits
from pageturner.service.errors import InvalidArgument
from pageturner.service.policy_host.reports import PoliciesInfo, PolicyInfo, ShadowInfo
from pageturner.v1 import admin_pb2, generation_pb2, model_pb2

MAX_TEMPLATE_VARIABLES = 64
MAX_TEMPLATE_CHARACTERS = 1 << 16
"""Of a chat's template variables, names and values together."""

MAX_POLICY_AXES = 16
MAX_POLICY_OPTIONS = 64
MAX_OPTION_CHARACTERS = 1 << 17
"""Of one option of a policy, as JSON."""

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


# From the wire


def to_generation_request(
    request: generation_pb2.GenerateRequest | generation_pb2.GenerateStreamRequest,
    request_id: str,
    deadline_seconds: float | None,
    limits: PromptLimits,
) -> GenerationRequest:
    """Raises InvalidArgument with the field's path in the request."""
    return GenerationRequest(
        prompt=to_prompt(request.prompt, limits),
        params=to_sampling_params(request.sampling),
        request_id=request_id,
        model=request.model,
        priority=request.priority,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        bypass_prefix_cache=request.bypass_prefix_cache,
        deadline_seconds=deadline_seconds,
    )


def to_prompt(prompt: generation_pb2.Prompt, limits: PromptLimits) -> Prompt:
    """Raises InvalidArgument with the field's path, for a prompt that passes the limits before it is copied:
    a message may hold millions of ids or turns, and copying those stops the event loop for seconds."""
    match prompt.WhichOneof("input"):
        case "text":
            if not prompt.text:
                raise InvalidArgument("prompt.text", "is empty")
            limits.check_characters(len(prompt.text), "prompt.text")
            if prompt.HasField("parse_special"):
                return TextPrompt(prompt.text, prompt.parse_special)
            return prompt.text
        case "token_ids":
            if not prompt.token_ids.ids:
                raise InvalidArgument("prompt.token_ids.ids", "is empty")
            limits.check_tokens(len(prompt.token_ids.ids), "prompt.token_ids.ids")
            return tuple(prompt.token_ids.ids)
        case "chat":
            return to_chat(prompt.chat, limits)
        case _:
            raise InvalidArgument("prompt", "none of text, token_ids and chat is given")


def to_chat(chat: generation_pb2.Chat, limits: PromptLimits) -> tuple[ChatMessage, ...] | ChatPrompt:
    if not chat.messages:
        raise InvalidArgument("prompt.chat.messages", "is empty")
    limits.check_messages(len(chat.messages), "prompt.chat.messages")
    for position, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidArgument(f"prompt.chat.messages[{position}].role", "is empty")
    variables = chat.template_variables
    if len(variables) > MAX_TEMPLATE_VARIABLES:
        reason = f"{len(variables)} entries; at most {MAX_TEMPLATE_VARIABLES}"
        raise InvalidArgument("prompt.chat.template_variables", reason)
    size = sum(len(name) + len(value) for name, value in variables.items())
    if size > MAX_TEMPLATE_CHARACTERS:
        reason = f"{size} characters; at most {MAX_TEMPLATE_CHARACTERS}"
        raise InvalidArgument("prompt.chat.template_variables", reason)
    messages = tuple(ChatMessage(message.role, message.content) for message in chat.messages)
    if not variables and not chat.continue_final_message:
        return messages
    values = _json_values("prompt.chat.template_variables", variables)
    return ChatPrompt(messages, values, chat.continue_final_message)


def to_sampling_params(sampling: generation_pb2.SamplingParams) -> SamplingParams:
    """Fields have one name on both sides, and ListFields gives those that the client set.

    Raises InvalidArgument for a list that is too long, before the event loop spends seconds on copying it.
    """
    for name, limit in _MAX_LENGTHS.items():
        if (length := len(getattr(sampling, name))) > limit:
            raise InvalidArgument(f"sampling.{name}", f"{length} entries; at most {limit}")
    given: dict[str, Any] = {field.name: value for field, value in sampling.ListFields()}
    given["stop"] = tuple(sampling.stop)
    given["stop_token_ids"] = tuple(sampling.stop_token_ids)
    given["logit_bias"] = tuple(sorted(sampling.logit_bias.items()))
    return SamplingParams(**given)


_MAX_LENGTHS = {
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "logit_bias": MAX_LOGIT_BIAS,
}
_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))


def to_wire_path(error: InvalidArgument, prompt: Prompt) -> InvalidArgument:
    """The engine names what it was given (`top_p`, `prompt`); a client wants its own message's path."""
    root, bracket, rest = error.field.partition("[")
    if root in _SAMPLING_FIELDS:
        return InvalidArgument(f"sampling.{error.field}", error.reason)
    if root == "prompt":
        root = f"prompt.{_FORMS[type(prompt[0] if isinstance(prompt, tuple) else prompt)]}"
    leaf = _LEAVES.get(root, "")
    return InvalidArgument(f"{root}{leaf}{bracket}{rest}", error.reason)


_FORMS = {str: "text", TextPrompt: "text", ChatMessage: "chat", ChatPrompt: "chat", int: "token_ids"}
_LEAVES = {"prompt.token_ids": ".ids", "prompt.chat": ".messages"}
"""Messages that wrap a list, as a oneof cannot hold one."""


# To the wire


def to_policy_change(request: admin_pb2.SetPoliciesRequest, origin: str) -> PolicyChange:
    """Raises InvalidArgument with the path of what is too much, before anything is read of it, or no JSON."""
    _check_sizes(request)
    return PolicyChange(
        {
            axis: PolicySpec(choice.name, _options(f"policies[{axis}]", choice.options))
            for axis, choice in request.policies.items()
        },
        {
            axis: PolicySpec(choice.name, _options(f"shadows[{axis}]", choice.options))
            if choice.name
            else None
            for axis, choice in request.shadows.items()
        },
        request.preset,
        request.expected_revision if request.HasField("expected_revision") else None,
        origin,
    )


def _check_sizes(request: admin_pb2.SetPoliciesRequest) -> None:
    """Bound what one message may make the service do: half a million axes would cost the loop seconds."""
    _refuse_above("preset", len(request.preset), MAX_NAME_CHARACTERS, "characters")
    for field, choices in (("policies", request.policies), ("shadows", request.shadows)):
        _refuse_above(field, len(choices), MAX_POLICY_AXES, "entries")
        for axis, choice in choices.items():
            path = f"{field}[{axis[:MAX_NAME_CHARACTERS]}]"
            _refuse_above(path, len(axis), MAX_NAME_CHARACTERS, "characters")
            _refuse_above(f"{path}.name", len(choice.name), MAX_NAME_CHARACTERS, "characters")
            _refuse_above(f"{path}.options", len(choice.options), MAX_POLICY_OPTIONS, "entries")
            for name, text in choice.options.items():
                option = f"{path}.options[{name[:MAX_NAME_CHARACTERS]}]"
                _refuse_above(option, len(name), MAX_NAME_CHARACTERS, "characters of its name")
                _refuse_above(option, len(text), MAX_OPTION_CHARACTERS, "characters")


def _refuse_above(path: str, count: int, limit: int, of: str) -> None:
    if count > limit:
        raise InvalidArgument(path, f"{count} {of}; at most {limit}")


def _options(path: str, options: Mapping[str, str]) -> dict[str, object]:
    return _json_values(f"{path}.options", options)


def _json_values(path: str, texts: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, text in texts.items():
        try:
            values[name] = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"{path}[{name}]", f"is not JSON: {error}") from error
    return values


def from_event(event: StreamEvent) -> generation_pb2.GenerateStreamResponse:
    """One message of a stream, its sequence number yet to be written."""
    message = generation_pb2.GenerateStreamResponse(request_id=event.request_id)
    match event:
        case AcceptedEvent():
            message.accepted.seed = event.seed
            message.accepted.prompt_tokens = event.num_prompt_tokens
            message.accepted.max_tokens = event.max_tokens
        case TokenEvent():
            message.delta.index = event.index
            message.delta.text = event.text
            message.delta.token_ids.extend(token.token_id for token in event.tokens)
            message.delta.logprobs.extend(from_logprobs(event.tokens))
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
    if isinstance(event.matched, str):
        message.stop_string = event.matched
    elif event.matched is not None:
        message.stop_token_id = event.matched


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


def from_usage(usage: Usage) -> generation_pb2.Usage:
    return generation_pb2.Usage(
        prompt_tokens=usage.num_prompt_tokens,
        cached_prompt_tokens=usage.num_cached_prompt_tokens,
        output_tokens=usage.num_output_tokens,
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


def from_stats(stats: SchedulerStats) -> admin_pb2.Load:
    return admin_pb2.Load(**asdict(stats))


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
