"""Prompts as callers state them to the wire. What is no prompt is a TypeError that names the position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields as fields_of
from types import MappingProxyType
from typing import Any

from pageturner.service.client.messages import build, json_value, json_values
from pageturner.service.client.values import PromptLike, Turn
from pageturner.service.engine.api import ChatMessage, ChatPrompt, TextPrompt, ToolCall
from pageturner.v1 import generation_pb2


def to_prompt(prompt: PromptLike) -> generation_pb2.Prompt:
    """An empty list is an empty list of ids.

    Raises TypeError naming the position of a part that is not like the others, InvalidArgument with the path
    of an id or a text that the wire cannot carry.
    """
    if isinstance(prompt, str):
        return build(generation_pb2.Prompt, "prompt.", text=prompt)
    if isinstance(prompt, TextPrompt):
        return build(generation_pb2.Prompt, "prompt.", text=prompt.text, parse_special=prompt.parse_special)
    if isinstance(prompt, ChatPrompt):
        return to_chat(
            prompt.messages,
            prompt.template_variables,
            prompt.continue_final_message,
            prompt.tools,
            prompt.template,
        )
    parts = _parts(prompt, "the prompt", "a text, a list of token ids, or a list of turns")
    if any(map(_is_turn, parts[:1])):
        return _chat(parts, "prompt")
    for position, part in enumerate(parts):
        if isinstance(part, bool) or not hasattr(part, "__index__"):
            raise TypeError(f"prompt[{position}] is {_type_of(part)}, in a list that begins like token ids")
    ids = build(generation_pb2.TokenIds, "prompt.token_ids.", ids=parts)
    return generation_pb2.Prompt(token_ids=ids)


def to_chat(
    messages: Iterable[Turn],
    template_variables: Mapping[str, object] = MappingProxyType({}),
    continue_final_message: bool = False,
    tools: Iterable[object] = (),
    template: str = "",
) -> generation_pb2.Prompt:
    """As `to_prompt`, of a conversation alone. template_variables, tools: values as JSON has them.

    Raises TypeError for a value that JSON has not.
    """
    turns = _parts(messages, "the conversation", "a list of turns")
    return _chat(
        turns,
        "messages",
        template_variables=json_values("prompt.chat.template_variables", template_variables),
        continue_final_message=continue_final_message or None,
        tools=[json_value(f"prompt.chat.tools[{place}]", tool) for place, tool in enumerate(tools)],
        template=template,
    )


def _parts(given: object, name: str, wanted: str) -> tuple[object, ...]:
    if isinstance(given, str | bytes | bytearray | memoryview) or _is_turn(given):
        raise TypeError(f"{name} is {_type_of(given)}, not {wanted}")
    try:
        return tuple(given)  # type: ignore[arg-type] # the except below names what is no iterable
    except TypeError:
        raise TypeError(f"{name} is {_type_of(given)}, not {wanted}") from None


def _is_turn(part: object) -> bool:
    return isinstance(part, ChatMessage | Mapping)


def _chat(turns: Sequence[object], name: str, **fields: object) -> generation_pb2.Prompt:
    """fields: what else the message holds."""
    messages = [_message(turn, f"{name}[{position}]", position) for position, turn in enumerate(turns)]
    chat = build(generation_pb2.Chat, "prompt.chat.", messages=messages, **fields)
    return generation_pb2.Prompt(chat=chat)


def _message(turn: object, name: str, position: int) -> generation_pb2.ChatMessage:
    """name: of the turn, for TypeErrors."""
    path = f"prompt.chat.messages[{position}]."
    values = _turn_values(turn, name)
    content = values.pop("content", "")
    parts: list[object] = []
    if not isinstance(content, str):
        if not isinstance(content, list | tuple):
            raise TypeError(f"{name}: its content is {_type_of(content)}, not a text or a list of text parts")
        parts, content = [_part(part, f"{name}.content[{place}]") for place, part in enumerate(content)], ""
    calls = [
        _tool_call(call, f"{name}.tool_calls[{place}]", f"{path}tool_calls[{place}].")
        for place, call in enumerate(values.pop("tool_calls", None) or ())
    ]
    fields = json_values(f"{path}fields", values.pop("fields", None) or {})
    for key, text in values.items():
        if not isinstance(text, str):
            raise TypeError(f"{name}: its {key} is {_type_of(text)}, not a text")
    values |= {"content": content, "parts": parts, "tool_calls": calls, "fields": fields}
    return build(generation_pb2.ChatMessage, path, **values)


def _turn_values(turn: object, name: str) -> dict[str, Any]:
    """What the turn says, by the names of the wire; what is None is left out."""
    if isinstance(turn, ChatMessage):
        values: dict[str, Any] = {each.name: getattr(turn, each.name) for each in fields_of(turn)}
    elif not isinstance(turn, Mapping):
        raise TypeError(f"{name} is {_type_of(turn)}, not a ChatMessage or a mapping of role and content")
    else:
        values = dict(turn)
    needed = {"role"} if values.get("tool_calls") else {"role", "content"}
    if not needed <= values.keys() <= _TURN_KEYS:
        raise TypeError(f"{name} has the keys {sorted(map(str, values))}; a turn has role and content")
    return {key: value for key, value in values.items() if value is not None}


_TURN_KEYS = {each.name for each in fields_of(ChatMessage)}


def _part(part: object, name: str) -> str:
    """A text, or a part as other APIs have it: {"type": "text", "text": ...}."""
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        raise TypeError(f"{name} is {_type_of(part)}, not a text; other parts are not taken")
    return text


def _tool_call(call: object, name: str, path: str) -> generation_pb2.ToolCall:
    """A ToolCall, or a mapping of its fields, or one as other APIs have it, with `function` around two of
    them. Arguments that are a text are taken for JSON."""
    if isinstance(call, ToolCall):
        values: dict[str, Any] = {each.name: getattr(call, each.name) for each in fields_of(call)}
    elif isinstance(call, Mapping):
        values = {key: value for key, value in call.items() if key not in ("type", "function")}
        values |= call.get("function") or {}
    else:
        raise TypeError(f"{name} is {_type_of(call)}, not a ToolCall or a mapping")
    if not values.keys() <= {"id", "name", "arguments"} or "name" not in values:
        raise TypeError(f"{name} has the keys {sorted(map(str, values))}; a call has name, arguments and id")
    arguments = values.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json_value(f"{path}arguments", arguments)
    return build(generation_pb2.ToolCall, path, name=values["name"], id=values.get("id"), arguments=arguments)


def _type_of(value: object) -> str:
    return f"of type {type(value).__name__}"
