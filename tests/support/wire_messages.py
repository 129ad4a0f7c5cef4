"""Hypothesis strategies for protobuf messages, made from their descriptors alone.

A field that another adds to the contract is covered by being in it. Values lie at the edges of their types
and, by the field's name, among words that mean something to the service, so that what is behind the first
checks is reached as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]

MAX_DEPTH = 4
"""Of messages within messages; a message that holds itself ends here."""

JSON = (
    "null", "true", "0", "-1", "1.5", "1e999", "NaN", "-Infinity", '"x"', "[]", "{}", "[[1]]",
    '{"a": [1, null]}',
    "9" * 5000, "[" * 100_000, '{"a":' * 5000, "", " ", "{", '"\\ud800"', "\u0664",
)  # fmt: skip
"""Good, bad, and such as a parser may trip over."""

TEXTS = (
    "", "a", "the quick", "0", "-1", "a" * 257, "x" * 100_000, "\0", "\n\r\t", "é 你 🙂", "\u202e",
    "\ufeff", "\U0010ffff", "{{ 1/0 }}", "{% raw %}", "%s%n", "../../etc/passwd", "os:system", "a:b:c",
    "unix:x", "<|end|>", *JSON[:8],
)  # fmt: skip

DOUBLES = (
    0.0, -0.0, 1.0, -1.0, 0.5, 100.0, 2.0, -2.0, 1e-320, 5e-324, 1e308, -1e308, 1e19,
    math.nan, math.inf, -math.inf,
)  # fmt: skip

_BITS = {"INT32": 32, "SINT32": 32, "SFIXED32": 32, "INT64": 64, "SINT64": 64, "SFIXED64": 64}
_UNSIGNED_BITS = {"UINT32": 32, "FIXED32": 32, "UINT64": 64, "FIXED64": 64}
_TYPES = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_")
    for name in vars(FieldDescriptor)
    if name.startswith("TYPE_")
}

Words = Mapping[str, Sequence[Any]]
"""Field name -> values that the service knows: of a map field, of its keys; of its values under `name[]`."""


def integers(low: int, high: int) -> st.SearchStrategy[int]:
    """Within the bounds, mostly at an edge: of the type, of 32 bits, or of what the service takes."""
    inner = (-1, 0, 1, 2, 3, 7, 64, 257, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
    edges = (low, low + 1, *inner, high - 1, high)
    return st.one_of(
        st.integers(max(low, 0), 8),
        st.sampled_from([edge for edge in edges if low <= edge <= high]),
        st.integers(low, high),
    )


def scalars(field: FieldDescriptor, known: Sequence[Any] = ()) -> st.SearchStrategy[Any]:
    """Values of a scalar field, one of a repeated one; `known` is drawn as often as all others."""
    kind = _TYPES[field.type]
    anything: st.SearchStrategy[Any]
    if kind in _BITS:
        half = 1 << (_BITS[kind] - 1)
        anything = integers(-half, half - 1)
    elif kind in _UNSIGNED_BITS:
        anything = integers(0, (1 << _UNSIGNED_BITS[kind]) - 1)
    elif kind == "ENUM":
        anything = integers(-(1 << 31), (1 << 31) - 1)
    elif kind == "BOOL":
        anything = st.booleans()
    elif kind == "DOUBLE":
        anything = st.one_of(st.sampled_from(DOUBLES), st.floats())
    elif kind == "FLOAT":
        anything = st.floats(width=32)
    elif kind == "STRING":
        anything = st.one_of(st.sampled_from(TEXTS), st.text(max_size=20))
    else:
        assert kind == "BYTES", kind
        anything = st.one_of(st.binary(max_size=40), st.just(b"\xff" * 10_000))
    return st.one_of(st.sampled_from(known), anything) if known else anything


@st.composite
def messages(
    draw: Draw, kind: Descriptor, words: Words | None = None, base: Message | None = None
) -> Message:
    """A message of this kind: `base` but for one to three of its leaves, or filled anyhow."""
    words = words or {}
    message: Message = GetMessageClass(kind)()
    if base is None:
        _fill(draw, message, words, MAX_DEPTH)
        return message
    message.CopyFrom(base)
    paths = leaves(kind)
    for path in draw(st.lists(st.sampled_from(paths), max_size=3)) if paths else ():
        _set_leaf(draw, message, path, words)
    return message


@cache
def leaves(kind: Descriptor, depth: int = MAX_DEPTH) -> tuple[tuple[FieldDescriptor, ...], ...]:
    """The paths to its fields that hold no message, and to its maps and lists."""
    paths: list[tuple[FieldDescriptor, ...]] = []
    for field in kind.fields:
        inner = _inner(field)
        if inner is not None and depth > 1:
            paths += [(field, *rest) for rest in leaves(inner, depth - 1)]
        if inner is None or field.is_repeated:
            paths.append((field,))
    return tuple(paths)


def _inner(field: FieldDescriptor) -> Descriptor | None:
    """The message that a field holds, one of a list or a value of a map; None for scalars."""
    return _entry(field)[1].message_type if _is_map(field) else field.message_type


def _set_leaf(draw: Draw, message: Message, path: tuple[FieldDescriptor, ...], words: Words) -> None:
    """Set the field at the end of the path, by way of what is there already."""
    field, *rest = path
    if not rest:
        _set(draw, message, field, words, depth=1)
        return
    child = getattr(message, field.name)
    if _is_map(field):
        key_field, _ = _entry(field)
        keys = list(child) or [draw(scalars(key_field, words.get(field.name, ())))]
        child = child[keys[0]]
    elif field.is_repeated:
        child = child[0] if child else child.add()
    else:
        child.SetInParent()
    _set_leaf(draw, child, tuple(rest), words)


def _fill(draw: Draw, message: Message, words: Words, depth: int) -> None:
    """Set some of its fields; the last one of a oneof stays."""
    fields = list(message.DESCRIPTOR.fields)
    if not fields or depth == 0:
        return
    most = draw(st.sampled_from((0, 1, 2, 3, len(fields))))
    chosen = draw(st.lists(st.sampled_from(fields), max_size=most, unique_by=lambda field: field.number))
    for field in chosen:
        _set(draw, message, field, words, depth)


def _set(draw: Draw, message: Message, field: FieldDescriptor, words: Words, depth: int) -> None:
    if _is_map(field):
        _fill_map(draw, message, field, words, depth)
    elif field.is_repeated:
        _fill_list(draw, message, field, words, depth)
    elif field.message_type is not None:
        child = getattr(message, field.name)
        child.SetInParent()
        _fill(draw, child, words, depth - 1)
    else:
        setattr(message, field.name, draw(scalars(field, words.get(field.name, ()))))


def _fill_list(draw: Draw, message: Message, field: FieldDescriptor, words: Words, depth: int) -> None:
    """A few, or the same few thousands of times."""
    items = getattr(message, field.name)
    times = draw(st.sampled_from((1, 1, 1, 1, 3000)))
    if field.message_type is None:
        few = draw(st.lists(scalars(field, words.get(field.name, ())), max_size=4))
        if sum(len(item) if isinstance(item, str | bytes) else 8 for item in few) * times > 4 << 20:
            times = 1
        items.extend(few * times)
        return
    for _ in range(draw(st.integers(0, 3))):
        _fill(draw, items.add(), words, depth - 1)
    if items and sum(item.ByteSize() for item in items) * times <= 4 << 20:
        items.extend(list(items) * (times - 1))


def _fill_map(draw: Draw, message: Message, field: FieldDescriptor, words: Words, depth: int) -> None:
    """Some entries, or thousands under numbered keys."""
    entries = getattr(message, field.name)
    key_field, value_field = _entry(field)
    keys = draw(st.lists(scalars(key_field, words.get(field.name, ())), max_size=3))
    if draw(st.sampled_from((False, False, False, True))):
        as_key = str if _TYPES[key_field.type] == "STRING" else int
        keys += [as_key(number) for number in range(draw(st.sampled_from((20, 3000))))]
    value: Any = None
    for position, key in enumerate(keys):
        if value_field.message_type is not None:
            if position < 4:
                _fill(draw, entries[key], words, depth - 1)
            else:
                entries[key].SetInParent()
        else:
            if position < 4:
                value = draw(scalars(value_field, words.get(f"{field.name}[]", ())))
            entries[key] = value if len(str(value)) < 1000 or position < 4 else "x"


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _entry(field: FieldDescriptor) -> tuple[FieldDescriptor, FieldDescriptor]:
    """Key and value of a map field."""
    assert field.message_type is not None, "a map holds entries"
    return field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]


@st.composite
def bodies(draw: Draw, good: st.SearchStrategy[Message]) -> bytes:
    """What may arrive in place of a message: any bytes, or one that was cut, flipped, doubled or nested."""
    how = draw(st.sampled_from(("any", "cut", "flipped", "appended", "groups", "long varint", "claims")))
    tail: bytes = draw(st.binary(max_size=40))
    if how == "any":
        return tail
    if how == "groups":
        return b"\x0b" * int(draw(st.sampled_from((1, 99, 101, 50_000))))
    if how == "long varint":
        return b"\x08" + b"\xff" * int(draw(st.integers(1, 30))) + b"\x01"
    if how == "claims":
        tag = int(draw(st.integers(0, 15))) << 3 | 2  # of bytes as many as 2 GiB, of which a few come
        return bytes([tag]) + b"\xff\xff\xff\xff\x07" + tail
    whole: bytes = draw(good).SerializeToString()
    if how == "appended" or not whole:
        return whole + tail
    position = int(draw(st.integers(0, len(whole) - 1)))
    if how == "cut":
        return whole[:position]
    return (
        whole[:position]
        + bytes([whole[position] ^ 1 << int(draw(st.integers(0, 7)))])
        + whole[position + 1 :]
    )
