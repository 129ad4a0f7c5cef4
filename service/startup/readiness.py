"""Tells systemd how far the service is, as a unit of Type=notify asks for (sd_notify(3))."""

from __future__ import annotations

import socket

READY = b"READY=1"
STOPPING = b"STOPPING=1"


class Readiness:
    """path: of the socket that hears it, `@` for an abstract one; None where nobody waits."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    def tell(self, state: bytes) -> bool:
        """Whether it was heard. Nothing depends on that: the service serves all the same."""
        if self._path is None:
            return False
        address = f"\0{self._path[1:]}" if self._path.startswith("@") else self._path
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.sendto(state, address)
        except OSError:
            return False
        return True
