"""Sizes in bytes: "2GiB" read and written."""

from __future__ import annotations

import re
from typing import NewType

Bytes = NewType("Bytes", int)
"""A size: bytes, or text with a unit such as "2GiB"."""

_UNITS = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}
_SMALLEST_BARE_SIZE = 1 << 16


def parse_size(text: str) -> int:
    """Bytes of "2GiB", "500 MB" or "4096". Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or (match[2] and match[2].lower() not in _UNITS):
        raise ValueError(f"{text!r} is no size; write 512MiB or 2GiB")
    if not match[2]:
        return check_size(int(float(match[1])))
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_size(size: int) -> str:
    """The shortest exact form: 2GiB, else bytes."""
    for power, prefix in reversed(tuple(enumerate("KMGT", 1))):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{prefix}iB"
    return str(size)


def check_size(size: int) -> int:
    """The size, if it can be meant as one. Raises ValueError."""
    if size < 0:
        raise ValueError(f"{size} is negative")
    # vLLM counts swap space in GiB: a bare 4 means that, and must not become four bytes.
    if 0 < size < _SMALLEST_BARE_SIZE:
        raise ValueError(f"a size needs a unit: write {size}GiB, or bytes from {_SMALLEST_BARE_SIZE} up")
    return size
