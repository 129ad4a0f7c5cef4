"""The trace that a request belongs to, as the `traceparent` header of W3C Trace Context has it."""

from __future__ import annotations

import re

HEADER = "traceparent"
"""https://www.w3.org/TR/trace-context/#traceparent-header"""

_FORM = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_SAMPLED = 0x01


def checked(value: str | bytes) -> str:
    """The header's value, or nothing: one of another form is as good as none."""
    return value if isinstance(value, str) and _FORM.fullmatch(value) else ""


def trace_id_of(trace_parent: str) -> str:
    """Its 32 digits; empty for none."""
    return trace_parent[3:35]


def is_sampled(trace_parent: str) -> bool:
    """Whether the trace is recorded."""
    return bool(trace_parent) and bool(int(trace_parent[-2:], 16) & _SAMPLED)
