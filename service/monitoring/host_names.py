"""By which names the monitoring port may be asked, told by the Host header of a request.

A page of another site may lead a browser here by a name of its own that resolves to this machine ("DNS
rebinding"), and then read what is shown: to the browser both are one site. It cannot make an address its own,
nor a name that the public DNS does not give out.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass

_UNREGISTRABLE = (".localhost", ".local", ".internal", ".home.arpa", ".svc")
"""Names that nobody can register: RFC 6761, RFC 6762, ICANN's resolution of July 2024, RFC 8375, and those of
services in Kubernetes without the cluster's domain, which is `.local` by default."""


@dataclass(frozen=True, slots=True)
class HostNames:
    """own: names that this port is known by beside those that no stranger can have.

    On a loopback address only this machine itself can ask, and addresses and `localhost` are enough.
    """

    own: frozenset[str] = frozenset()

    @classmethod
    def of(cls, host: str, stated: Iterable[str]) -> HostNames:
        """host: what is listened on. stated: further names; those of this machine are added."""
        names = (host, socket.gethostname(), *stated)
        return cls(frozenset(filter(None, (name.strip().rstrip(".").lower() for name in names))))

    def is_right(self, header: str, *, is_local: bool) -> bool:
        """Whether a Host header, with its port or without, names this machine. Browsers always send one."""
        name = header.rpartition(":")[0] if not header.endswith("]") and ":" in header else header
        name = name.rstrip(".").lower()
        if name in ("", "localhost") or _is_address(name):
            return True
        if is_local:
            return False
        return "." not in name or name.endswith(_UNREGISTRABLE) or name in self.own


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
