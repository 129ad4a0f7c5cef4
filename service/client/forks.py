"""What a process had under way with gRPC when it forked, and whether its child can use gRPC all the same.

A child has none of its parent's threads. gRPC comes through that where no call was under way; its asyncio has
a polling thread while a channel is open, and hangs or crashes without it. So a child is refused, rather than
lost, where its copy of the books says that the fork came at such a moment.

Closing a channel does not end the polling thread, the channel's end as an object does. One that is closed,
and held by a circle of references (an exception and its frames, say), would have the child wait for ever for
a thread that its books know nothing of. So before a fork garbage is collected while there is such a thread,
and a child of a process where it stays is refused too.
"""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass, field
from typing import ClassVar
from weakref import WeakSet

from pageturner.service.errors import PageturnerError


class ForkedProcess(PageturnerError):
    """The parent was using gRPC when it forked, in a way that no child survives; says what to do instead."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class GrpcUse:
    """What one connection has under way in the process that it is used in.

    num_calls: of threads. num_channels: of asyncio. Changed by the connection alone.
    """

    num_calls: int = 0
    num_channels: int = 0
    _pid: int = field(default_factory=os.getpid)

    everyone: ClassVar[WeakSet[GrpcUse]] = WeakSet()
    """Of this process, and of its parent before the fork: gRPC is one in a process, whoever uses it."""
    polled: ClassVar[int | None] = None
    """The process, by its id, that polled when it forked: this one, or one that it comes from."""

    def __post_init__(self) -> None:
        self.everyone.add(self)

    def is_inherited(self) -> bool:
        """Whether this was the parent's."""
        return self._pid != os.getpid()

    def begin_anew(self) -> None:
        """In a child: nothing is under way yet."""
        self.num_calls, self.num_channels, self._pid = 0, 0, os.getpid()


def refuse_calls_in_a_child() -> None:
    """Raise ForkedProcess where a call of the parent was under way when it forked."""
    if any(use.num_calls for use in _inherited()):
        raise ForkedProcess(
            "this process was forked in the middle of a call of its parent, and gRPC can't be used in it: "
            "fork between calls, or start processes by 'spawn'"
        )


def refuse_asyncio_in_a_child() -> None:
    """The same, and where the parent had asyncio connections open."""
    refuse_calls_in_a_child()
    is_polled = GrpcUse.polled not in (None, os.getpid())
    if is_polled or any(use.num_channels for use in _inherited()):
        raise ForkedProcess(
            "this process was forked while its parent had asyncio connections open, and gRPC's asyncio can't "
            "be used in it: use SyncClient here, close every Client before forking, or start it by 'spawn'"
        )


def _inherited() -> list[GrpcUse]:
    return [use for use in tuple(GrpcUse.everyone) if use.is_inherited()]


def _note_polling() -> None:
    """Before this process forks."""
    if _is_polling():
        gc.collect()  # the end of the last channel waits for the thread's
    if _is_polling():
        GrpcUse.polled = os.getpid()
    elif GrpcUse.polled == os.getpid():
        GrpcUse.polled = None


def _is_polling() -> bool:
    """Whether the thread of gRPC's asyncio is there; it is named after its function."""
    return any("_poll_wrapper" in thread.name for thread in threading.enumerate())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_note_polling)
