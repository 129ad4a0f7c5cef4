"""How the server under load is reached: as by the Python client, of which a load test imports nothing."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping

_DIRECT = (("grpc.enable_http_proxy", 0),)
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
_HOST = re.compile(r"(?:(?:dns|ipv4|ipv6):(?://[^/]*/)?)?(\[[^\]]*\]|[^:,]+)(?::\d+)?")


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


def _is_local(address: str) -> bool:
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = match[1] if (match := _HOST.fullmatch(address)) else address
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
