"""Where in a JSON schema lies what makes it impossible to compile.

The compiler says what is wrong, not where. So parts of the schema are tried by themselves, the deepest that
fails is the place. A part is tried with the definitions of the whole, which it may refer to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_TRIES = 256
"""Parts that are tried; each is small, and takes some tenths of a millisecond."""

_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value has a schema under each of its names."""
_LISTS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems", "items"})
_SINGLE = frozenset(
    {"items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains"}
)
_DEFINITIONS = ("$defs", "definitions")


def place_of_fault(schema: object, fault_of: Callable[[Mapping[str, Any]], str]) -> tuple[str, str]:
    """(JSON pointer, what is wrong there) of the deepest part that fails by itself. The whole is known to
    fail.

    fault_of: what is wrong with a schema; empty if nothing is.
    """
    if not isinstance(schema, dict):
        return "#", "is not an object"
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    place, part, reason, num_tries = "#", schema, fault_of(schema), 0
    while True:
        for pointer, inner in _parts(part):
            num_tries += 1
            if num_tries > MAX_TRIES:
                return place, reason
            if fault := fault_of({**definitions, **inner}):
                place, part, reason = f"{place}/{pointer}", inner, fault
                break
        else:
            return place, reason


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas right below one, each by its pointer from there."""
    # Definitions first: what refers to one that fails, fails too.
    for keyword, value in sorted(schema.items(), key=lambda item: item[0] not in _DEFINITIONS):
        if keyword in _OF_SCHEMAS and isinstance(value, dict):
            for name, inner in value.items():
                if isinstance(inner, dict):
                    yield f"{keyword}/{_escaped(name)}", inner
        elif keyword in _LISTS and isinstance(value, list):
            for position, inner in enumerate(value):
                if isinstance(inner, dict):
                    yield f"{keyword}/{position}", inner
        elif keyword in _SINGLE and isinstance(value, dict):
            yield keyword, value


def _escaped(name: str) -> str:
    """A name within a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")
