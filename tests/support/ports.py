"""Ports where nothing listens yet, and that nobody else is given meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of 127.0.0.1 that refuses connections until the test's own server listens there.

    The socket is bound and never listens: the system gives its port to nobody who asks for any, and lets who
    asks for this one, with SO_REUSEADDR as servers do, listen beside it: one server after another.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        yield port
