"""How the server under load is reached: as by the Python client, of which a load test imports nothing."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

_DIRECT = (("grpc.enable_http_proxy", 0),)
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
TOKEN_FILE_VARIABLE = "PAGETURNER_TOKEN_FILE"  # noqa: S105  # its name
_HOST = re.compile(r"(?:(?:dns|ipv4|ipv6):(?://[^/]*/)?)?(\[[^\]]*\]|[^:,]+)(?::\d+)?")


@dataclass(frozen=True, slots=True)
class Access:
    """Who the load test is, and whom it trusts. token: of each call. ca, certificate, key: PEM; with any of
    them, or with tls, connections are encrypted."""

    token: str = field(default="", repr=False)
    tls: bool = False
    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def open_channel(self, address: str) -> grpc.aio.Channel:
        """A channel for the running loop."""
        credentials, options = self._credentials(address), channel_options(address)
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, credentials, options=options)

    def open_blocking_channel(self, address: str) -> grpc.Channel:
        """A channel for threads."""
        credentials, options = self._credentials(address), channel_options(address)
        if credentials is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, credentials, options=options)

    def _credentials(self, address: str) -> grpc.ChannelCredentials | None:
        """None for plain text, as on every socket file: admin-target may be one beside an encrypted port."""
        if _is_socket_file(address) or not (self.tls or self.ca or self.certificate):
            return None
        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)


OPEN = Access()
"""To a server that serves every caller, in plain text."""


def channel_options(address: str) -> tuple[tuple[str, int], ...]:
    """A server of this machine is reached directly, whatever proxy the environment names."""
    return _DIRECT if _is_local(address) else ()


def proxy_hint(address: str, environ: Mapping[str, str] | None = None) -> str:
    """What to say of a proxy where a server was not reached. environ: that of the process unless given."""
    environ = os.environ if environ is None else environ
    variable = next((name for name in _PROXY_VARIABLES if environ.get(name)), "")
    if not variable or _is_local(address):
        return ""
    return f" ({variable} is set: gRPC goes through that proxy unless no_proxy names the host)"


def _is_socket_file(address: str) -> bool:
    return address.startswith(("unix:", "unix-abstract:"))


def _is_local(address: str) -> bool:
    if _is_socket_file(address):
        return True
    host = match[1] if (match := _HOST.fullmatch(address)) else address
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def named_token_file() -> Path | None:
    """The file with a caller's token that the environment names, as for the service's own commands."""
    name = os.environ.get(TOKEN_FILE_VARIABLE)
    return Path(name).expanduser() if name else None
