"""Frozen dataclasses read as a schema: text and TOML become field values, field values become TOML.

Knows no section by name. Errors are ValueErrors that say what was expected; the caller names the key.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
import types
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

from pageturner.policies.errors import PolicySpecError
from pageturner.policies.spec import PolicySpec, parse_spec, spec_from_table

Bytes = NewType("Bytes", int)
"""A size: bytes, or text with a unit such as "2GiB"."""

_UNITS = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}
_SMALLEST_BARE_SIZE = 1 << 16
_BOOLEANS = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True, slots=True)
class Key:
    """One field of one section. annotation is resolved; default is MISSING where there is none."""

    section: str
    name: str
    annotation: Any
    default: object
    doc: str

    def __str__(self) -> str:
        return f"{self.section}.{self.name}"


@cache
def keys_of(config: type) -> Mapping[str, Key]:
    """Every key of a dataclass whose fields are sections, by its dotted name, in order."""
    keys: dict[str, Key] = {}
    for section, options in get_type_hints(config).items():
        hints, docs = get_type_hints(options), _field_docs(options)
        for spec in dataclasses.fields(options):
            default = spec.default
            if spec.default_factory is not dataclasses.MISSING:
                default = spec.default_factory()
            annotation = hints[spec.name]
            if annotation is int and spec.name.endswith("_bytes"):
                annotation = Bytes
            key = Key(section, spec.name, annotation, default, docs.get(spec.name, ""))
            keys[str(key)] = key
    return types.MappingProxyType(keys)


def _field_docs(options: type) -> dict[str, str]:
    """The sentences of a class docstring that have the form `name, other: what it is.`"""
    names = {spec.name for spec in dataclasses.fields(options)}
    text = " ".join((options.__doc__ or "").split())
    docs: dict[str, str] = {}
    found: list[str] = []
    position = 0
    for match in re.finditer(r"(?:^|(?<=[.;)] ))(\w+(?:, \w+)*): ", text):
        subjects = match[1].split(", ")
        if not names.issuperset(subjects):
            continue
        for name in found:
            docs[name] = text[position : match.start()].strip()
        found, position = subjects, match.end()
    for name in found:
        docs[name] = text[position:].strip()
    return docs


def parse_size(text: str) -> int:
    """Bytes of "2GiB", "500 MB" or "4096". Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or (match[2] and match[2].lower() not in _UNITS):
        raise ValueError(f"{text!r} is no size; write 512MiB or 2GiB")
    if not match[2]:
        return _check_size(int(float(match[1])))
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_size(size: int) -> str:
    """The shortest exact form: 2GiB, else bytes."""
    for power, prefix in reversed(tuple(enumerate("KMGT", 1))):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{prefix}iB"
    return str(size)


def _check_size(size: int) -> int:
    if size < 0:
        raise ValueError(f"{size} is negative")
    # vLLM counts swap space in GiB: a bare 4 means that, and must not become four bytes.
    if 0 < size < _SMALLEST_BARE_SIZE:
        raise ValueError(f"a size needs a unit: write {size}GiB, or bytes from {_SMALLEST_BARE_SIZE} up")
    return size


def from_toml(annotation: Any, value: object) -> Any:
    """A TOML value as a field value. Raises ValueError."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not types.NoneType]
        return None if value is None else from_toml(inner[0], value)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{value!r} is none of {', '.join(str(argument) for argument in arguments)}")
        return value
    if origin in (tuple, list):
        if not isinstance(value, list):
            raise ValueError(f"{value!r} is not a list")
        return tuple(from_toml(arguments[0], item) for item in value)
    if annotation is PolicySpec:
        return _policy_spec(value)
    if origin is abc.Mapping:
        if not isinstance(value, dict):
            raise ValueError(f"{value!r} is not a table")
        return {name: from_toml(arguments[1], item) for name, item in value.items()}
    if annotation is Bytes:
        if isinstance(value, str):
            return parse_size(value)
        return _check_size(int(_expect(value, int, "a size such as 2GiB")))
    if annotation is bool:
        return _expect(value, bool, "true or false")
    if annotation is int:
        return _expect(value, int, "a whole number")
    if annotation is float:
        number = float(_expect(value, (int, float), "a number"))
        if not math.isfinite(number):
            raise ValueError(f"{number} is not finite")
        return number
    if annotation is str:
        return _expect(value, str, "a string")
    if annotation is Path:
        return Path(_expect(value, str, "a path"))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        try:
            return annotation(value)
        except ValueError:
            raise ValueError(f"{value!r} is none of {', '.join(str(m.value) for m in annotation)}") from None
    raise TypeError(f"no reading of {annotation} is known")


def _expect(value: object, kind: type | tuple[type, ...], name: str) -> Any:
    # bool is an int to Python, not to an operator.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{value!r} is not {name}")
    return value


def _policy_spec(value: object) -> PolicySpec:
    try:
        return parse_spec(value) if isinstance(value, str) else spec_from_table(value)
    except PolicySpecError as error:
        raise ValueError(str(error)) from None


def from_text(annotation: Any, text: str) -> Any:
    """Text of a flag or an environment variable as a field value. Raises ValueError."""
    arguments = get_args(annotation)
    if types.NoneType in arguments:
        if text.lower() in ("", "none"):
            return None
        return from_text(next(argument for argument in arguments if argument is not types.NoneType), text)
    if get_origin(annotation) in (tuple, list):
        return tuple(from_text(arguments[0], item.strip()) for item in text.split(",") if item.strip())
    if annotation is bool:
        if text.lower() not in _BOOLEANS:
            raise ValueError(f"{text!r} is not true or false")
        return _BOOLEANS[text.lower()]
    if annotation in (int, float):
        return from_toml(annotation, _number(text, annotation))
    if get_origin(annotation) is abc.Mapping and text.lstrip().startswith("{"):
        try:
            return from_toml(annotation, tomllib.loads(f"value = {text}")["value"])
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{text!r} is no TOML table: {error}") from None
    return from_toml(annotation, text)


def _number(text: str, annotation: type[int] | type[float]) -> int | float:
    try:
        return annotation(text.replace("_", ""))
    except ValueError:
        raise ValueError(f"{text!r} is not {'a whole number' if annotation is int else 'a number'}") from None


def to_plain(value: object) -> Any:
    """A field value as JSON and TOML know it; None stays None."""
    if isinstance(value, PolicySpec):
        return {"name": value.name, **value.options} if value.options else value.name
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: to_plain(item) for name, item in value.items()}
    return value


def to_toml(annotation: Any, value: object) -> str:
    """The right-hand side of a TOML line that reads back as `value`, which is not None."""
    if annotation is Bytes or Bytes in get_args(annotation):
        return json.dumps(format_size(value)) if isinstance(value, int) and value else "0"
    return _toml(to_plain(value))


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
