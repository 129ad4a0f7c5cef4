"""Frozen dataclasses to plain values (JSON, TOML) and back, by their annotations: one strict converter.

Nothing is coerced: a text is no number, a bool is no int; an int does for a float. What does not fit is a
ValueError in one line, which does not name the place: the caller knows it.
"""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_origin

import cattrs
from cattrs.gen import make_dict_unstructure_fn, override
from cattrs.strategies import configure_union_passthrough

_KINDS: dict[type, tuple[type | tuple[type, ...], str]] = {
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    str: (str, "a string"),
}

_PLAIN = cattrs.Converter()


def _to_plain(kind: type[Any]) -> Callable[[Any], Any]:
    own: Any = {one.name: override(omit=True) for one in fields(kind) if not one.compare}
    return make_dict_unstructure_fn(kind, _PLAIN, **own)


_PLAIN.register_unstructure_hook_factory(is_dataclass, _to_plain)


def strict_converter(*, omit_if_default: bool = False) -> cattrs.Converter:
    """A converter that reads scalars, lists and tables as said above; hooks may be added to it.

    omit_if_default: fields that hold their default are not written.
    """
    converter = cattrs.Converter(
        detailed_validation=False, forbid_extra_keys=True, omit_if_default=omit_if_default
    )
    configure_union_passthrough(bool | int | float | str | None, converter)
    for kind in _KINDS:
        converter.register_structure_hook(kind, scalar)
    converter.register_structure_hook_func(lambda annotation: annotation is object, lambda value, _: value)
    before(converter, lambda annotation: get_origin(annotation) is tuple, _check_list)
    before(converter, lambda annotation: get_origin(annotation) is abc.Mapping, _check_table)
    return converter


def plain(value: object) -> Any:
    """A value as JSON has it: dataclasses and mappings as tables, enums as their values.

    A field that does not compare is its owner's own, and left out.
    """
    return _PLAIN.unstructure(value)


def scalar(value: object, annotation: type) -> Any:
    """A value of one of the four scalar types. Raises ValueError."""
    kind, name = _KINDS[annotation]
    # bool is an int to Python, not to a reader.
    if not isinstance(value, kind) or (isinstance(value, bool) and annotation is not bool):
        raise ValueError(f"{value!r} is not {name}")
    if annotation is float:
        try:
            value = float(value)  # type: ignore[arg-type]  # an int or a float, as was just seen
        except OverflowError:
            raise ValueError("the number is beyond the range of a double") from None
        if not math.isfinite(value):
            raise ValueError(f"{value} is not finite")
    return value


def before(
    converter: cattrs.Converter, is_meant: Callable[[Any], bool], check: Callable[[object], object]
) -> None:
    """Let `check` see, and change, what is read for the annotations that are meant."""
    # Within its own hook an annotation is read as if there were none.
    is_inside: list[Any] = []

    @converter.register_structure_hook_factory(lambda kind: is_meant(kind) and kind not in is_inside)
    def make(annotation: Any) -> Callable[[object, Any], Any]:
        is_inside.append(annotation)
        try:
            read = converter.get_structure_hook(annotation, cache_result=False)
        finally:
            is_inside.remove(annotation)
        return lambda value, _: read(check(value), annotation)


def _check_list(value: object) -> object:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{value!r} is not a list")
    return value


def _check_table(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not a table")
    return value
