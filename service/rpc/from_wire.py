"""Requests from the wire to domain values, their sizes checked before anything is copied."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from pageturner.policies.spec import PolicySpec
from pageturner.service.core.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    BeamSearch,
    EarlyStopping,
    SamplingParams,
)
from pageturner.service.core.structured_output import MAX_CHOICES, OutputForm, StructuredOutput
from pageturner.service.engine.api import (
    MAX_NAME_CHARACTERS,
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    PolicyChange,
    Prompt,
    ResumedChoice,
    Resumption,
    ScoreRequest,
    TextPrompt,
    ToolCall,
)
from pageturner.service.engine.fingerprint import MAX_CHARACTERS
from pageturner.service.engine.prompt_limits import MAX_PROMPT_CHARACTERS, PromptLimits
from pageturner.service.engine.scoring import MAX_CONTINUATION_TOKENS, MAX_CONTINUATIONS
from pageturner.service.errors import InvalidArgument, PermissionDenied, RefusalCause
from pageturner.service.identity import Identity
from pageturner.v1 import admin_pb2, generation_pb2

MAX_TEMPLATE_VARIABLES = 64
MAX_TEMPLATE_CHARACTERS = 1 << 16
"""Of a chat's template variables, names and values together."""

MAX_TOOLS = 128
"""That a conversation offers, and that one turn calls."""

MAX_TOOL_CHARACTERS = 1 << 18
"""Of all tools of a conversation, as JSON."""

MAX_PARTS = 1024
"""Texts that one turn is made of."""

MAX_RESUMED_CHOICES = 1024
MAX_RESUMED_TOKENS = 1 << 16
"""Of all choices of an answer that is resumed. Their text is found out between two steps, some microseconds
each, which all streams wait for."""

MAX_POLICY_AXES = 16
MAX_POLICY_OPTIONS = 64
MAX_OPTION_CHARACTERS = 1 << 17
"""Of one option of a policy, as JSON."""


def to_generation_request(
    request: generation_pb2.GenerateRequest | generation_pb2.GenerateStreamRequest,
    request_id: str,
    deadline_seconds: float | None,
    limits: PromptLimits,
    caller: Identity,
    trace_parent: str = "",
) -> GenerationRequest:
    """Raises InvalidArgument with the field's path in the request, and PermissionDenied as `tenant_of`."""
    return GenerationRequest(
        prompt=to_prompt(request.prompt, limits),
        params=to_sampling_params(request.sampling),
        request_id=request_id,
        model=request.model,
        priority=request.priority,
        tenant=tenant_of(request.tenant, caller),
        cache_salt=request.cache_salt,
        bypass_prefix_cache=request.bypass_prefix_cache,
        deadline_seconds=deadline_seconds,
        trace_parent=trace_parent,
        identity=caller,
        resume=to_resumption(request.resume, limits) if request.HasField("resume") else None,
        return_prompt=request.return_prompt,
        adapter=request.adapter,
    )


def to_score_request(
    request: generation_pb2.ScoreRequest,
    request_id: str,
    deadline_seconds: float | None,
    limits: PromptLimits,
    caller: Identity,
    trace_parent: str = "",
) -> ScoreRequest:
    """Raises InvalidArgument with the field's path in the request, and PermissionDenied as `tenant_of`."""
    _refuse_above("continuations", len(request.continuations), MAX_CONTINUATIONS, "entries")
    num_tokens = sum(len(each.token_ids.ids) for each in request.continuations)
    _refuse_above("continuations", num_tokens, MAX_CONTINUATION_TOKENS, "tokens together")
    num_characters = sum(len(each.text) for each in request.continuations)
    _refuse_above("continuations", num_characters, MAX_PROMPT_CHARACTERS, "characters together")
    return ScoreRequest(
        to_prompt(request.prompt, limits),
        tuple(_to_continuation(index, each) for index, each in enumerate(request.continuations)),
        request.logprobs,
        request_id,
        request.model,
        request.priority,
        tenant_of(request.tenant, caller),
        request.cache_salt,
        request.bypass_prefix_cache,
        deadline_seconds,
        trace_parent,
        caller,
        request.adapter,
    )


def _to_continuation(index: int, continuation: generation_pb2.Continuation) -> str | tuple[int, ...]:
    match continuation.WhichOneof("input"):
        case "text" if continuation.text:
            return continuation.text
        case "token_ids" if continuation.token_ids.ids:
            return tuple(continuation.token_ids.ids)
        case None:
            raise InvalidArgument(f"continuations[{index}]", "none of text and token_ids is given")
        case form:
            leaf = ".ids" if form == "token_ids" else ""
            raise InvalidArgument(f"continuations[{index}].{form}{leaf}", "is empty")


def to_score_path(error: InvalidArgument, prompt: Prompt) -> InvalidArgument:
    """As `to_wire_path`, of a request to score; what it names of its own is named as on the wire already."""
    return error if error.field == "logprobs" else to_wire_path(error, prompt)


def to_resumption(resume: generation_pb2.Resume, limits: PromptLimits) -> Resumption:
    """Raises InvalidArgument for lists that are too long, before they are copied."""
    _refuse_above("resume.fingerprint", len(resume.fingerprint), MAX_CHARACTERS, "characters")
    _refuse_above("resume.choices", len(resume.choices), MAX_RESUMED_CHOICES, "choices")
    for index, choice in enumerate(resume.choices):
        limits.check_tokens(len(choice.token_ids), f"resume.choices[{index}].token_ids")
    num_tokens = sum(len(choice.token_ids) for choice in resume.choices)
    _refuse_above("resume.choices", num_tokens, MAX_RESUMED_TOKENS, "tokens together")
    return Resumption(
        resume.seed,
        resume.fingerprint,
        tuple(
            ResumedChoice(
                tuple(choice.token_ids),
                choice.text_characters if choice.HasField("text_characters") else None,
                choice.finished,
            )
            for choice in resume.choices
        ),
        resume.max_tokens if resume.HasField("max_tokens") else None,
        resume.allow_inexact,
    )


def tenant_of(stated: str, caller: Identity) -> str:
    """On whose account a request runs: the caller's own tenant, or where nobody is known, the one that it
    states.

    Raises PermissionDenied where a caller states another tenant than its own.
    """
    if caller.is_anonymous:
        return stated
    if stated not in ("", caller.tenant):
        reason = "tenant: the credentials are of another; leave it empty"
        raise PermissionDenied(reason, RefusalCause.OTHER_TENANT)
    return caller.tenant


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
    messages = tuple(_to_turn(position, message) for position, message in enumerate(chat.messages))
    if not (variables or chat.continue_final_message or chat.tools or chat.template):
        return messages
    values = _json_values("prompt.chat.template_variables", variables)
    _refuse_above("prompt.chat.template", len(chat.template), MAX_NAME_CHARACTERS, "characters")
    return ChatPrompt(messages, values, chat.continue_final_message, _to_tools(chat.tools), chat.template)


def _to_tools(tools: Sequence[str]) -> tuple[object, ...]:
    _refuse_above("prompt.chat.tools", len(tools), MAX_TOOLS, "entries")
    _refuse_above("prompt.chat.tools", sum(map(len, tools)), MAX_TOOL_CHARACTERS, "characters together")
    return tuple(_json_value(f"prompt.chat.tools[{place}]", text) for place, text in enumerate(tools))


def _to_turn(position: int, message: generation_pb2.ChatMessage) -> ChatMessage:
    path = f"prompt.chat.messages[{position}]"
    if message.content and message.parts:
        raise InvalidArgument(f"{path}.parts", "beside content; a turn has one of them")
    if all(field.name in ("role", "content") for field, _ in message.ListFields()):
        return ChatMessage(message.role, message.content)
    _refuse_above(f"{path}.tool_calls", len(message.tool_calls), MAX_TOOLS, "entries")
    _refuse_above(f"{path}.parts", len(message.parts), MAX_PARTS, "entries")
    _refuse_above(f"{path}.fields", len(message.fields), MAX_TEMPLATE_VARIABLES, "entries")
    if taken := _TURN_FIELDS & message.fields.keys():
        raise InvalidArgument(f"{path}.fields[{min(taken)}]", "has a field of its own")
    calls = []
    for place, call in enumerate(message.tool_calls):
        if not call.name:
            raise InvalidArgument(f"{path}.tool_calls[{place}].name", "is empty")
        arguments = _json_value(f"{path}.tool_calls[{place}].arguments", call.arguments or "{}")
        calls.append(ToolCall(call.name, arguments, call.id))
    return ChatMessage(
        message.role,
        tuple(message.parts) or message.content,
        message.name,
        tuple(calls),
        message.tool_call_id,
        message.reasoning_content,
        _json_values(f"{path}.fields", message.fields),
    )


_TURN_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})


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
    if "beam_search" in given:
        given["beam_search"] = to_beam_search(sampling.beam_search)
    if "structured_output" in given:
        given["structured_output"] = to_structured_output(sampling.structured_output)
    return SamplingParams(**given)


def to_structured_output(wanted: generation_pb2.StructuredOutput) -> StructuredOutput:
    """Raises InvalidArgument where no form is given, or a list is too long."""
    name = wanted.WhichOneof("form")
    if name is None or (name == "json_object" and not wanted.json_object):
        reason = "none of json_schema, json_object, regex, choice and grammar is given"
        raise InvalidArgument("sampling.structured_output", reason)
    form = OutputForm(name)
    if form is OutputForm.CHOICE:
        _refuse_above(
            "sampling.structured_output.choice.texts", len(wanted.choice.texts), MAX_CHOICES, "texts"
        )
        return StructuredOutput.one_of(wanted.choice.texts)
    return StructuredOutput(form, "" if form is OutputForm.JSON_OBJECT else getattr(wanted, name))


def to_beam_search(search: generation_pb2.BeamSearch) -> BeamSearch:
    """Raises InvalidArgument for an early_stopping that a newer client knows and this server does not."""
    given: dict[str, Any] = {field.name: value for field, value in search.ListFields()}
    given["width"] = search.width
    if "early_stopping" in given:
        if search.early_stopping not in _EARLY_STOPPING:
            reason = f"{search.early_stopping} is none that this server knows"
            raise InvalidArgument("sampling.beam_search.early_stopping", reason)
        given["early_stopping"] = _EARLY_STOPPING[search.early_stopping]
    return BeamSearch(**given)


_EARLY_STOPPING = {
    generation_pb2.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.HEURISTIC,
    generation_pb2.EARLY_STOPPING_HEURISTIC: EarlyStopping.HEURISTIC,
    generation_pb2.EARLY_STOPPING_FIRST: EarlyStopping.FIRST,
    generation_pb2.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


_MAX_LENGTHS = {
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "logit_bias": MAX_LOGIT_BIAS,
}
_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))


def to_wire_path(error: InvalidArgument, prompt: Prompt) -> InvalidArgument:
    """The engine names what it was given (`top_p`, `prompt`); a client wants its own message's path."""
    root, bracket, rest = error.field.partition("[")
    if root.partition(".")[0] in _SAMPLING_FIELDS:
        field = error.field.replace("structured_output.choice", "structured_output.choice.texts", 1)
        return InvalidArgument(f"sampling.{field}", error.reason)
    if root == "prompt":
        root = f"prompt.{_FORMS[type(prompt[0] if isinstance(prompt, tuple) else prompt)]}"
    leaf = _LEAVES.get(root, "")
    return InvalidArgument(f"{root}{leaf}{bracket}{rest}", error.reason)


_FORMS = {str: "text", TextPrompt: "text", ChatMessage: "chat", ChatPrompt: "chat", int: "token_ids"}
_LEAVES = {"prompt.token_ids": ".ids", "prompt.chat": ".messages"}
"""Messages that wrap a list, as a oneof cannot hold one."""


def to_policy_change(request: admin_pb2.SetPoliciesRequest, origin: str) -> PolicyChange:
    """Raises InvalidArgument with the path of what is too much, before anything is read of it, or no JSON."""
    _check_sizes(request)
    return PolicyChange(
        {
            axis: PolicySpec(choice.name, _json_values(f"policies[{axis}].options", choice.options))
            for axis, choice in request.policies.items()
        },
        {
            axis: PolicySpec(choice.name, _json_values(f"shadows[{axis}].options", choice.options))
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


def _json_values(path: str, texts: Mapping[str, str]) -> dict[str, object]:
    return {name: _json_value(f"{path}[{name}]", text) for name, text in texts.items()}


def _json_value(path: str, text: str) -> object:
    try:
        value: object = json.loads(text)
    except RecursionError as error:
        raise InvalidArgument(path, "is nested too deeply") from error
    except ValueError as error:
        if "int_max_str_digits" in str(error):
            reason = f"has a number of more than {sys.get_int_max_str_digits()} digits"
            raise InvalidArgument(path, reason) from error
        raise InvalidArgument(path, f"is not JSON: {error}") from error
    return value
