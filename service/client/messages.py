"""Messages made of what a caller gave; what the wire cannot carry is refused here, by the field's path."""

from __future__ import annotations

import json
import operator
import reprlib
from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pageturner.service.errors import InvalidArgument

_M = TypeVar("_M", bound=Message)

_Field = Any
"""A FieldDescriptor, of which protobuf has a class for each of its implementations."""

_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


def build(kind: type[_M], path: str = "", /, **values: object) -> _M:
    """A message with these fields; None leaves one out.

    A repeated field takes any iterable; one of texts takes a single text for a list of one. path: goes before
    the names of fields in errors, as "sampling.". Raises InvalidArgument naming the field and position of a
    value that is of the wrong type, out of the field's range, or text that is not Unicode.
    """
    empty: Any = kind()
    given = {name: _elements(empty, name, value, path) for name, value in values.items() if value is not None}
    try:
        return kind(**given)
    except (TypeError, ValueError, OverflowError) as error:
        # Only now, as a prompt may be of millions of ids.
        for name, value in given.items():
            _check_field(empty, name, value, f"{path}{name}")
        raise InvalidArgument(path.rstrip(".") or kind.DESCRIPTOR.name, str(error)) from error


def json_values(path: str, values: Mapping[str, object]) -> dict[str, str]:
    """By name, each value as JSON. Raises TypeError, or InvalidArgument for one that contains itself,
    naming a value that JSON has not."""
    return {name: json_value(f"{path}[{name}]", value) for name, value in values.items()}


def json_value(path: str, value: object) -> str:
    """A value as JSON. Raises as `json_values`."""
    try:
        return json.dumps(value)
    except TypeError as error:
        raise TypeError(f"{path}: {error}") from error
    except RecursionError as error:
        raise InvalidArgument(path, "is nested too deeply") from error
    except ValueError as error:
        reason = str(error).partition("; use sys.")[0]  # of an integer with more digits than Python writes
        is_circle = reason.startswith("Circular")
        raise InvalidArgument(path, "contains itself" if is_circle else f"is no JSON: {reason}") from error


def _elements(empty: Any, name: str, value: Any, path: str) -> Any:
    """A repeated field's values as a tuple, so that an iterator survives being looked at twice."""
    if not isinstance(getattr(empty, name), MutableSequence):
        return value
    if isinstance(value, str) and _field(empty, name).type == FieldDescriptor.TYPE_STRING:
        return (value,)
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Iterable):
        raise InvalidArgument(f"{path}{name}", f"{_shown(value)} is not a list")
    return tuple(value)


def _field(message: Message, name: str) -> _Field:
    return message.DESCRIPTOR.fields_by_name[name]


def _check_field(empty: Any, name: str, value: Any, path: str) -> None:
    field = _field(empty, name)
    kept = getattr(empty, name)
    if isinstance(kept, MutableMapping):
        if not isinstance(value, Mapping):
            raise InvalidArgument(path, f"{_shown(value)} is not a mapping")
        entry = field.message_type.fields_by_name
        for key, item in value.items():
            _check_value(entry["key"], key, f"{path}[{_shown(key)}]")
            _check_value(entry["value"], item, f"{path}[{_shown(key)}]")
    elif isinstance(kept, MutableSequence):
        for position, item in enumerate(value):
            _check_value(field, item, f"{path}[{position}]")
    else:
        _check_value(field, value, path)


def _check_value(field: _Field, value: Any, path: str) -> None:
    """Raise InvalidArgument if no field of this type can hold the value."""
    if field.cpp_type in _RANGES:
        _check_integer(value, path, *_RANGES[field.cpp_type])
    elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        _check_text(value, path)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        if not isinstance(value, bool | int):
            raise InvalidArgument(path, f"{_shown(value)} is not true or false")
    elif field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        check_number(value, path)


def _check_integer(value: Any, path: str, low: int, high: int) -> None:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise InvalidArgument(path, f"{_shown(value)} is not a whole number")
    if not low <= number <= high:
        raise InvalidArgument(path, f"{_shown(value)} is not in [{low}, {high}]")


def check_number(value: Any, path: str) -> float:
    """The value as a float. Raises InvalidArgument for what is no number."""
    try:
        if isinstance(value, str | bytes | bytearray):
            raise TypeError
        return float(value)
    except OverflowError as error:
        raise InvalidArgument(path, f"{_shown(value)} is beyond a double's range") from error
    except (TypeError, ValueError) as error:
        raise InvalidArgument(path, f"{_shown(value)} is not a number") from error


def _check_text(value: Any, path: str) -> None:
    if not isinstance(value, str):
        raise InvalidArgument(path, f"{_shown(value)} is not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        character = f"U+{ord(value[error.start]):04X}"
        raise InvalidArgument(path, f"character {error.start} is {character}, a lone surrogate") from error


def _shown(value: object) -> str:
    """Short, also for values that are not."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python writes no integer of over 4,300 digits
        return f"a number of {getattr(value, 'bit_length', int)()} bits"
