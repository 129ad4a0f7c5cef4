"""How the server under load is reached: as by the Python client, of which a load test imports nothing."""

from __future__ import annotations

import ipaddress
import re

_DIRECT = (("grpc.enable_http_proxy", 0),)
_HOST = re.compile(r"(?:(?:dns|ipv4|ipv6):(?://[^/]*/)?)?(\[[^\]]*\]|[^:,]+)(?::\d+)?")


def channel_options(address: str) -> tuple[tuple[str, int], ...]:
    """A server of this machine is reached directly, whatever proxy the environment names."""
    return _DIRECT if _is_local(address) else ()


def _is_local(address: str) -> bool:
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = match[1] if (match := _HOST.fullmatch(address)) else address
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
