"""A policy as it is named in a configuration, a command, a message and a record: one type, one reader.

least-computed
cost-model:swap_weight=2,bias=0.5
virtual-token-counter:tenant_weights="gold=4, free=0.5"
my_module:MyPolicy:patience=3
{ name = "cost-model", swap_weight = 2 }
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field

from pageturner.policies.errors import PolicySpecError, UnknownAxisError
from pageturner.policies.interfaces import AXES

_OPENING, _CLOSING, _QUOTES = "[{", "]}", "\"'"


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy by its registered name or as "module:Class", with options other than its defaults."""

    name: str
    options: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        """`cost-model(bias=2.0)`, for people."""
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"


def parse_spec(text: str) -> PolicySpec:
    """Read one of the forms above. Raises PolicySpecError.

    Values of options are as in TOML (numbers, true, "text", [1, 2]), null, or else text as it stands; a
    comma in a text or a list belongs to it.
    """
    text = text.strip()
    if text.startswith("{"):
        return spec_from_table(_value(text))
    head, equals, _ = text.partition("=")
    name, colon, _ = head.rpartition(":")
    if not text or (equals and not (colon and name)):
        raise PolicySpecError(text, "is not NAME or NAME:OPTION=VALUE,OPTION=VALUE")
    if not equals:
        return PolicySpec(text)
    options: dict[str, object] = {}
    for part in split_outside(text[len(name) + 1 :], ","):
        option, equals, value = part.partition("=")
        if not equals or not option.strip():
            raise PolicySpecError(text, f"{part.strip()!r} is not OPTION=VALUE")
        options[option.strip()] = parse_value(value)
    return PolicySpec(name.strip(), options)


def parse_choice(text: str) -> tuple[str, PolicySpec]:
    """An axis and its policy: `victim=least-computed`. Raises PolicySpecError or UnknownAxisError."""
    axis, equals, rest = text.partition("=")
    if not equals or not rest.strip():
        raise PolicySpecError(text, "is not AXIS=POLICY, such as victim=least-computed")
    if axis.strip() not in AXES:
        raise UnknownAxisError(axis.strip(), AXES)
    return axis.strip(), parse_spec(rest)


def spec_from_table(table: object) -> PolicySpec:
    """Read `{name: ..., option: ...}`, as TOML has it. Raises PolicySpecError."""
    if not isinstance(table, dict) or not isinstance(table.get("name"), str):
        reason = "has no name: write NAME or { name = ..., option = ... }"
        raise PolicySpecError(str(table), reason)
    return PolicySpec(table["name"], {name: value for name, value in table.items() if name != "name"})


def parse_value(text: str) -> object:
    """A value of TOML, null, or else the text itself."""
    text = text.strip()
    if text == "null":
        return None
    value = _value(text)
    return value if isinstance(value, bool | int | float | str | list | dict) else text


def split_outside(text: str, separator: str) -> list[str]:
    """The parts of `text` between separators that stand in no quotes and no brackets."""
    parts, part, depth, quote = [], "", 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        else:
            depth += (character in _OPENING) - (character in _CLOSING)
        if character == separator and not quote and depth <= 0:
            parts.append(part)
            part = ""
        else:
            part += character
    return [*parts, part]


def _value(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # of tomllib: no TOML, a number too long, tables too deep
        return text
