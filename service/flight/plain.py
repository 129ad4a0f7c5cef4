"""Frozen dataclasses to plain JSON values and back, by their annotations.

Enough for what a flight record holds: numbers, texts, bytes, enums, tuples, mappings by text, dataclasses,
and unions of dataclasses, of which each value names its class under "is".
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import types
import typing
from collections.abc import Hashable, Mapping
from enum import Enum
from typing import Any

from pageturner.policies.frozen_map import FrozenMap

KIND = "is"


class Malformed(Exception):
    """A value has no plain form, or a plain value is not what its annotation says."""


def to_plain(value: Any, *, is_whole: bool = False) -> Any:
    """A value that `json.dumps` takes. Raises Malformed.

    Fields that hold their default are left out, unless is_whole: defaults that may change one day must be
    written down.
    """
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, (tuple, list)):
        return [to_plain(part) for part in value]
    if isinstance(value, Mapping):
        return {key: to_plain(part) for key, part in value.items()}
    if isinstance(value, FrozenMap):
        return [[to_plain(key), to_plain(part)] for key, part in sorted(value.items(), key=str)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if not dataclasses.is_dataclass(value):
        raise Malformed(f"a {type(value).__name__} is no plain value")
    plain = {KIND: type(value).__name__}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if is_whole or field.default is dataclasses.MISSING or part != field.default:
            plain[field.name] = to_plain(part, is_whole=is_whole)
    return plain


def from_plain(annotation: Any, plain: Any) -> Any:
    """The value of which `to_plain` made `plain`. Raises Malformed."""
    try:
        return _read(annotation, plain)
    except (TypeError, ValueError, KeyError) as error:
        raise Malformed(f"{error}") from error


def _read(annotation: Any, plain: Any) -> Any:
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is tuple:
        if not isinstance(plain, list):
            raise Malformed(f"{plain!r} is not a list")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_read(arguments[0], part) for part in plain)
        return tuple(_read(kind, part) for kind, part in zip(arguments, plain, strict=True))
    if origin in (typing.Union, types.UnionType):
        return _read_union(arguments, plain)
    if origin is FrozenMap:
        entries: FrozenMap[Any, Any] = FrozenMap()
        for key, part in plain:
            entries = entries.set(_read(arguments[0], key), _read(arguments[1], part))
        return entries
    if origin is not None and issubclass(origin, Mapping):
        return {str(key): _read(arguments[1], part) for key, part in plain.items()}
    if dataclasses.is_dataclass(annotation):
        return _read_dataclass(typing.cast(type[Any], annotation), plain)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return annotation(plain)
    if annotation is bytes:
        return base64.b64decode(plain, validate=True)
    if annotation is float and isinstance(plain, int) and not isinstance(plain, bool):
        return float(plain)
    if annotation in (int, float, str, bool) and type(plain) is not annotation:
        raise Malformed(f"{plain!r} is not of type {annotation.__name__}")
    return plain


def _read_union(choices: tuple[Any, ...], plain: Any) -> Any:
    if plain is None and types.NoneType in choices:
        return None
    if isinstance(plain, dict):
        for choice in choices:
            if getattr(choice, "__name__", "") == plain.get(KIND):
                return _read(choice, plain)
        raise Malformed(f"{plain.get(KIND)!r} is unknown here")
    for choice in choices:
        if not dataclasses.is_dataclass(choice) and choice is not types.NoneType:
            try:
                return _read(choice, plain)
            except Malformed:
                continue
    raise Malformed(f"{plain!r} is of no type that is meant here")


def _read_dataclass(kind: type[Any], plain: Any) -> Any:
    if not isinstance(plain, dict) or plain.get(KIND) != kind.__name__:
        raise Malformed(f"{plain!r} is no {kind.__name__}")
    hints = _hints(typing.cast(Hashable, kind))
    unknown = plain.keys() - hints.keys() - {KIND}
    if unknown:
        raise Malformed(f"{kind.__name__} has no {sorted(unknown)[0]!r}")
    return kind(**{name: _read(hints[name], part) for name, part in plain.items() if name != KIND})


@functools.cache
def _hints(kind: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(typing.cast(type[Any], kind))
