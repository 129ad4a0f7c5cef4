"""Addresses of servers as the command line takes them, those that the Python client takes. Pure."""

from __future__ import annotations

from pageturner.loadtest.errors import OptionError

DEFAULT_PORT = 50051

_SCHEMES = ("unix", "unix-abstract", "dns", "ipv4", "ipv6", "vsock", "xds")


def check_address(option: str, address: str) -> str:
    """The address for gRPC of HOST, HOST:PORT, [IPV6]:PORT, unix:PATH or another of its schemes; a port
    left out is DEFAULT_PORT. Raises OptionError."""
    scheme, colon, rest = address.partition(":")
    if colon and scheme in _SCHEMES:
        if rest.strip("/"):
            return address
        raise OptionError(option, f"{address!r} has nothing after {scheme}:")
    is_bare = ":" not in address or address.endswith("]")
    host, _, port = (address, "", str(DEFAULT_PORT)) if is_bare else address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise OptionError(option, f"{address!r} is neither HOST:PORT nor unix:PATH")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise OptionError(option, f"{address!r}: an IPv6 address goes into brackets, [{host}]:{port}")
    return f"{host}:{port}"
