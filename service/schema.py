"""Frozen dataclasses read as a schema: text and TOML become field values, field values become TOML.

Knows no section by name. Errors are ValueErrors that say what was expected; the caller names the key.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
import tomllib
import types
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

import cattrs

from pageturner.policies.errors import PolicySpecError
from pageturner.policies.spec import PolicySpec, parse_spec, spec_from_table
from pageturner.service.codec import before, scalar, strict_converter
from pageturner.service.sizes import Bytes, check_size, format_size, parse_size

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
    """One field of one section. annotation is resolved; default is MISSING where there is none.

    options: the dataclass of the section.
    """

    section: str
    name: str
    annotation: Any
    default: object
    options: type

    def __str__(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def doc(self) -> str:
        """What the field's own docstring says."""
        return _field_docs(self.options).get(self.name, "")


@cache
def keys_of(config: type) -> Mapping[str, Key]:
    """Every key of a dataclass whose fields are sections, by its dotted name, in order."""
    keys: dict[str, Key] = {}
    for section, options in get_type_hints(config).items():
        hints = get_type_hints(options)
        for spec in dataclasses.fields(options):
            default = spec.default
            if spec.default_factory is not dataclasses.MISSING:
                default = spec.default_factory()
            annotation = hints[spec.name]
            if annotation is int and spec.name.endswith("_bytes"):
                annotation = Bytes
            key = Key(section, spec.name, annotation, default, options)
            keys[str(key)] = key
    return types.MappingProxyType(keys)


@cache
def _field_docs(options: type) -> Mapping[str, str]:
    """The docstring below each field, which an editor shows as well."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(options))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                docs[name] = " ".join(doc.split())
    return docs


def from_toml(annotation: Any, value: object) -> Any:
    """A TOML value as a field value. Raises ValueError."""
    return _TOML.structure(value, annotation)


def from_text(annotation: Any, text: str) -> Any:
    """Text of a flag or an environment variable as a field value. Raises ValueError."""
    return _TEXT.structure(text, annotation)


def to_plain(value: object) -> Any:
    """A field value as JSON and TOML know it; None stays None."""
    return _TOML.unstructure(value)


def _toml_converter() -> cattrs.Converter:
    converter = strict_converter()
    converter.register_structure_hook(Bytes, _size)
    converter.register_structure_hook(PolicySpec, _policy_spec)
    converter.register_structure_hook_func(_is_literal, _word)
    converter.register_unstructure_hook(
        PolicySpec, lambda spec: {"name": spec.name, **spec.options} if spec.options else spec.name
    )
    return converter


def _text_converter() -> cattrs.Converter:
    """As TOML, where a text says what TOML has types for."""
    converter = _toml_converter()
    converter.register_structure_hook(bool, _flag)
    converter.register_structure_hook(int, _number)
    converter.register_structure_hook(float, _number)
    before(converter, lambda annotation: get_origin(annotation) is abc.Mapping, _table)
    before(converter, lambda annotation: get_origin(annotation) is tuple, _listed)
    before(converter, lambda annotation: types.NoneType in get_args(annotation), _none_or_text)
    return converter


def _is_literal(annotation: Any) -> bool:
    origin: object = get_origin(annotation)
    return origin is Literal


def _size(value: object, _: Any) -> int:
    if isinstance(value, str):
        return parse_size(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a size such as 2GiB")
    return check_size(value)


def _word(value: object, annotation: Any) -> object:
    words = get_args(annotation)
    if value not in words:
        raise ValueError(f"{value!r} is none of {', '.join(map(str, words))}")
    return value


def _policy_spec(value: object, _: Any) -> PolicySpec:
    try:
        return parse_spec(value) if isinstance(value, str) else spec_from_table(value)
    except PolicySpecError as error:
        raise ValueError(str(error)) from None


def _flag(text: str, _: Any) -> bool:
    if text.lower() not in _BOOLEANS:
        raise ValueError(f"{text!r} is not true or false")
    return _BOOLEANS[text.lower()]


def _number(text: str, annotation: type[int] | type[float]) -> int | float:
    try:
        number = annotation(text.replace("_", ""))
    except ValueError:
        raise ValueError(f"{text!r} is not {'a whole number' if annotation is int else 'a number'}") from None
    return cast(int | float, scalar(number, annotation))


def _table(text: object) -> object:
    if not isinstance(text, str) or not text.lstrip().startswith("{"):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{text!r} is no TOML table: {error}") from None


def _listed(text: object) -> object:
    return [word.strip() for word in text.split(",") if word.strip()] if isinstance(text, str) else text


def _none_or_text(text: object) -> object:
    return None if isinstance(text, str) and text.lower() in ("", "none") else text


_TOML, _TEXT = _toml_converter(), _text_converter()


def to_toml(annotation: Any, value: object) -> str:
    """The right-hand side of a TOML line that reads back as `value`, which is not None."""
    if annotation is Bytes or Bytes in get_args(annotation):
        return json.dumps(format_size(value)) if isinstance(value, int) and value else "0"
    return _toml(to_plain(value))


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml_key(name)} = {_toml(item)}" for name, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)
