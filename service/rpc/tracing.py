"""The trace that a call belongs to: read from its metadata (W3C Trace Context), told to logs and spans."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Protocol

from pageturner.service import trace_context
from pageturner.service.engine.metrics import Method
from pageturner.service.trace_context import HEADER

Metadata = Iterable[tuple[str, str | bytes]]

_trace_parent: ContextVar[str] = ContextVar("trace_parent", default="")


class CallTrace(Protocol):
    """A call that is traced, from its beginning to `end`."""

    @property
    def trace_parent(self) -> str:
        """Of the call itself, for what it causes: as the header has it."""
        ...

    def end(self, code: str, *, request_id: str, tenant: str) -> None:
        """code: the name of the status. request_id, tenant: empty where the call had none."""
        ...


class CallTracer(Protocol):
    """Makes a span of each call."""

    def begin(self, method: Method, metadata: Metadata) -> CallTrace:
        """Neither waits nor raises, whatever the metadata are."""
        ...


def current_trace_parent() -> str:
    """Of the call that this task serves; empty where none is traced."""
    return _trace_parent.get()


def bind_trace_parent(trace_parent: str) -> None:
    """Until the end of this task, which is one call's."""
    _trace_parent.set(trace_parent)


def trace_parent_of(metadata: Metadata) -> str:
    """The caller's own; empty where it sent none, or one of another form."""
    return next((trace_context.checked(value) for key, value in metadata if key == HEADER), "")
