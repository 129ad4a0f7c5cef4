"""A conversation as a client states it, for the chat template that its model's author wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the assistant called. arguments: as JSON has them, mostly an object. id: as its result
    names it; empty where the model knows none."""

    name: str
    arguments: object = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation. What is empty is left out of what the template reads, but for the content
    of a turn that calls no tool.

    content: a text, or the texts of its parts for a template that reads lists of them. name: of who speaks,
    or of the tool whose result this is. tool_call_id: of the call whose result this is. fields: whatever else
    the template reads of a turn, as JSON has it.
    """

    role: str
    content: str | tuple[str, ...] = ""
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning_content: str = ""
    fields: Mapping[str, object] = field(default_factory=dict)

    def values(self) -> dict[str, object]:
        """The turn as `transformers` gives it to a template: reasoning under both of its names."""
        turn: dict[str, object] = {"role": self.role}
        if isinstance(self.content, tuple):
            turn["content"] = [{"type": "text", "text": text} for text in self.content]
        elif self.content or not self.tool_calls:
            turn["content"] = self.content
        for name in ("name", "tool_call_id"):
            if given := getattr(self, name):
                turn[name] = given
        if self.tool_calls:
            turn["tool_calls"] = [_call(call) for call in self.tool_calls]
        turn |= self.fields
        if self.reasoning_content:
            turn = {"thinking": self.reasoning_content, **turn, "reasoning_content": self.reasoning_content}
        return turn

    def texts(self) -> Iterator[str]:
        """What is said in it, tool calls and further fields aside."""
        yield from (self.content,) if isinstance(self.content, str) else self.content
        if self.reasoning_content:
            yield self.reasoning_content

    @property
    def num_characters(self) -> int:
        """Of all that it holds."""
        return num_characters(self.values()) - len(self.reasoning_content)


def _call(call: ToolCall) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"type": "function", **({"id": call.id} if call.id else {}), "function": function}


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation with choices."""

    messages: tuple[ChatMessage, ...]
    template_variables: Mapping[str, object] = field(default_factory=dict)
    """What the template reads beside the messages, as JSON has it; see `generation.proto`."""
    continue_final_message: bool = False
    """The answer goes on with the last message in place of a turn of its own."""
    tools: tuple[object, ...] = ()
    """What the assistant may call: JSON schemas, as the template reads them."""
    template: str = ""
    """One of the model's templates by name. Empty: that for tools where tools are given and there is one,
    else the model's own."""

    @property
    def num_characters(self) -> int:
        """Of messages and tools; variables have a bound of their own."""
        return sum(turn.num_characters for turn in self.messages) + num_characters(self.tools)


def num_characters(values: object) -> int:
    """Of all texts in what JSON has, however deep."""
    count, left = 0, [values]
    while left:
        value = left.pop()
        if isinstance(value, str):
            count += len(value)
        elif isinstance(value, Mapping):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            left += value
    return count
