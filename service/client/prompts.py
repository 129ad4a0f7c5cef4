"""Prompts as callers state them to the wire. What is no prompt is a TypeError that names the position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from pageturner.service.client.messages import build, json_values
from pageturner.service.client.values import PromptLike, Turn
from pageturner.service.engine.api import ChatMessage, ChatPrompt, TextPrompt
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
        return to_chat(prompt.messages, prompt.template_variables, prompt.continue_final_message)
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
) -> generation_pb2.Prompt:
    """As `to_prompt`, of a conversation alone. template_variables: values as JSON has them.

    Raises TypeError for a value that JSON has not.
    """
    turns = _parts(messages, "the conversation", "a list of turns")
    return _chat(
        turns,
        "messages",
        template_variables=json_values("prompt.chat.template_variables", template_variables),
        continue_final_message=continue_final_message or None,
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
    messages = []
    for position, turn in enumerate(turns):
        role, content = _role_and_content(turn, f"{name}[{position}]")
        path = f"prompt.chat.messages[{position}]."
        messages.append(build(generation_pb2.ChatMessage, path, role=role, content=content))
    chat = build(generation_pb2.Chat, "prompt.chat.", messages=messages, **fields)
    return generation_pb2.Prompt(chat=chat)


def _role_and_content(turn: object, name: str) -> tuple[str, str]:
    if isinstance(turn, ChatMessage):
        pair: tuple[object, object] = (turn.role, turn.content)
    elif not isinstance(turn, Mapping):
        raise TypeError(f"{name} is {_type_of(turn)}, not a ChatMessage or a mapping of role and content")
    elif turn.keys() != {"role", "content"}:
        raise TypeError(f"{name} has the keys {sorted(map(str, turn))}; a turn has role and content")
    else:
        pair = (turn["role"], turn["content"])
    for key, text in zip(("role", "content"), pair, strict=True):
        if not isinstance(text, str):
            raise TypeError(f"{name}: its {key} is {_type_of(text)}, not a text")
    return pair  # type: ignore[return-value] # both were seen to be texts


def _type_of(value: object) -> str:
    return f"of type {type(value).__name__}"
