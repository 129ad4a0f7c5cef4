"""The form of an answer as callers state it, to the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pageturner.service.client.messages import build, json_value
from pageturner.service.core.structured_output import OutputForm, StructuredOutput
from pageturner.v1 import generation_pb2

StructuredOutputLike = StructuredOutput | Mapping[str, object]
"""A mapping has one key, the name of a form: `json_schema` (a schema as a mapping or as JSON, or a class
with `model_json_schema`, as pydantic's have), `json_object` (True), `regex`, `choice` (a list of texts) or
`grammar`."""

_FORMS = tuple(form.value for form in OutputForm)
_PATH = "sampling.structured_output."


def to_structured_output(given: StructuredOutputLike) -> generation_pb2.StructuredOutput:
    """Raises TypeError for what is no form, InvalidArgument with the path of what the wire cannot carry."""
    name, value = _name_and_value(given)
    if name == OutputForm.CHOICE.value:
        value = build(generation_pb2.TextChoices, f"{_PATH}choice.", texts=value)
    elif name == OutputForm.JSON_SCHEMA.value and not isinstance(value, str):
        value = _schema_text(value)
    return build(generation_pb2.StructuredOutput, _PATH, **{name: value})


def _name_and_value(given: object) -> tuple[str, Any]:
    if isinstance(given, StructuredOutput):
        match given.form:
            case OutputForm.CHOICE:
                return given.form.value, given.choices
            case OutputForm.JSON_OBJECT:
                return given.form.value, True
        return given.form.value, given.source
    if not isinstance(given, Mapping):
        raise TypeError(f"structured_output is of type {type(given).__name__}, not a mapping")
    if len(given) != 1 or next(iter(given)) not in _FORMS:
        keys = sorted(map(str, given))
        raise TypeError(f"structured_output has the keys {keys}; it has one of {', '.join(_FORMS)}")
    ((name, value),) = given.items()
    return name, value


def _schema_text(schema: object) -> str:
    make = getattr(schema, "model_json_schema", None)
    return json_value(f"{_PATH}json_schema", make() if callable(make) else schema)
