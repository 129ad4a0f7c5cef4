"""Where a server is: the spellings of a target, and the channel to it."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pageturner.service.errors import InvalidArgument

DEFAULT_PORT = 50051
DEFAULT_TARGET = f"localhost:{DEFAULT_PORT}"
"""Where a server of this machine listens unless it is told otherwise."""

TARGET_FORMS = "HOST:PORT|unix:PATH"
"""How a target is written, for the help of commands."""

MAX_MESSAGE_BYTES = 64 << 20

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Of gRPC's own pings too, behind which it would hold a keepalive back for a minute.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
"""A server that is gone is noticed within 40 s of silence; servers of ours allow a ping every 10 s.

One that comes up is met within two seconds: gRPC would by itself wait up to two minutes between tries.
`min_reconnect_backoff` is, despite its name, how long one try may take where nothing answers at all.
"""

NAME_OPTIONS: tuple[tuple[str, int], ...] = (("grpc.dns_min_time_between_resolutions_ms", 1_000),)
"""Servers that came are met soon: gRPC would by itself ask for a name's addresses every half minute."""

PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""In the order in which gRPC reads them; it goes by the first that is set."""

_HAS_SCHEME = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock|xds|google-c2p):")
_MAX_SOCKET_PATH_BYTES = 107
"""Of a socket's address in Linux's `sockaddr_un`, without the final zero."""


@dataclass(frozen=True, slots=True)
class Target:
    """address: as gRPC takes it. host: empty for a socket file. is_local: certainly on this machine. policy:
    of gRPC's own, by which calls are spread over the addresses of a name; empty for the first that works."""

    address: str
    host: str
    is_local: bool
    policy: str = ""

    @property
    def is_name_of_many(self) -> bool:
        """Whether it may stand for several servers, as a headless service does: dns:///NAME:PORT."""
        return self.address.startswith("dns:")

    def channel_options(self) -> tuple[tuple[str, int | str], ...]:
        """A server of this machine is reached directly, whatever proxy the environment names."""
        options = (*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)) if self.is_local else CHANNEL_OPTIONS
        if not self.policy:
            return options
        service_config = json.dumps({"loadBalancingConfig": [{self.policy: {}}]})
        return (*options, ("grpc.service_config", service_config), *NAME_OPTIONS)

    def balanced_over_names(self, policy: str) -> Target:
        """The same, whose channel spreads calls over all addresses of its name by a policy of gRPC's own,
        which asks for them anew when one is lost."""
        return replace(self, policy=policy)

    def proxy_variable(self, environ: Mapping[str, str] | None = None) -> str:
        """The variable by which gRPC goes through a proxy to get here; empty if it does not.

        environ: that of the process, which is the one that gRPC itself reads, unless given.
        """
        environ = os.environ if environ is None else environ
        if self.is_local:
            return ""
        # Also where no_proxy exempts the host: how gRPC matches it is gRPC's to know.
        return next((name for name in PROXY_VARIABLES if environ.get(name)), "")


def parse_target(text: str) -> Target:
    """host:port, a host alone (port 50051), [IPv6]:port, unix:PATH, or another name that gRPC resolves.

    Raises InvalidArgument, saying what to write instead.
    """
    if not isinstance(text, str) or not text or text != text.strip():
        raise _bad(text, "write HOST:PORT or unix:PATH")
    if match := _HAS_SCHEME.match(text):
        return _with_scheme(text, match[1])
    if "://" in text:
        raise _bad(text, "gRPC has no URLs of this kind; write HOST:PORT")
    if "/" in text:
        raise _bad(text, "a socket file is unix:PATH, a server HOST:PORT")
    host, port = _host_and_port(text)
    return Target(f"{host}:{port}", host, _is_loopback(host))


def parse_targets(given: str | Sequence[str]) -> tuple[Target, ...]:
    """One target, or several servers that stand in for one another, each once. Raises InvalidArgument."""
    texts = (given,) if isinstance(given, str) else tuple(given)
    if not texts:
        raise InvalidArgument("target", "no server is named")
    return tuple(dict.fromkeys(map(parse_target, texts)))


def _with_scheme(text: str, scheme: str) -> Target:
    rest = text[len(scheme) + 1 :]
    if scheme == "unix":
        if rest.startswith("//") and not rest.startswith("///"):
            raise _bad(text, f"after unix:// comes an absolute path; this one is unix:{rest[2:]}")
        path = rest.removeprefix("//")
        if not path:
            raise _bad(text, "write unix:PATH")
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
            raise _bad(text, f"a socket's path has at most {_MAX_SOCKET_PATH_BYTES} bytes")
        return Target(text, "", is_local=True)
    if scheme == "unix-abstract":
        return Target(text, "", is_local=True)
    if scheme in ("dns", "ipv4", "ipv6") and "," not in rest:
        prefix, endpoint = re.fullmatch(r"((?://[^/]*/)?)(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr] # matches anything
        host, port = _host_and_port(endpoint, text)
        return Target(f"{scheme}:{prefix}{host}:{port}", host, _is_loopback(host))
    return Target(text, "", is_local=False)


def _host_and_port(endpoint: str, text: str | None = None) -> tuple[str, int]:
    """An IPv6 address in brackets. text: the whole target, for errors."""
    text = endpoint if text is None else text
    if _is_ipv6(endpoint):
        return f"[{endpoint}]", DEFAULT_PORT
    match = re.fullmatch(r"(\[[^\[\]]*\]|[^:\[\]\s]+)(?::(.*))?", endpoint, re.DOTALL)
    if match is None or (match[1].startswith("[") and not _is_ipv6(match[1][1:-1])):
        raise _bad(text, "write HOST:PORT, an IPv6 address in brackets")
    port = str(DEFAULT_PORT) if match[2] is None else match[2]
    if not (port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= 65535):
        raise _bad(text, f"{port!r} is not a port; it is a number in [1, 65535]")
    return match[1], int(port)


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _bad(text: str, reason: str) -> InvalidArgument:
    return InvalidArgument("target", f"{text!r}: {reason}")
