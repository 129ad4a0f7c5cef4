"""Options of what is shown to operators; `service/config.py` composes them with those of other layers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pageturner.service.engine.metrics import DEFAULT_MAX_TENANTS
from pageturner.service.errors import ConfigError

MAX_TENANTS = 10_000


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """The HTTP port for Prometheus, probes and the live page. Raises ConfigError."""

    host: str = "127.0.0.1"
    """Where to listen: an address or name of this machine. There is no authentication: who reaches it
    reads counters, names of tenants and ids of requests, never a prompt or an answer."""
    port: int | None = None
    """Where to listen, such as 9464; 0 takes any free port. Unset: nothing is listened on, so that a second
    server of the same machine starts, too."""
    names: str = ""
    """Names, divided by commas, by which browsers and scrapes ask where the port is not on a loopback
    address. Addresses, this machine's name, names without a dot and those that nobody can register need not
    be listed. By any other name a request is answered with 421: a page of another site may lead here."""
    max_tenants: int = DEFAULT_MAX_TENANTS
    """Tenants that metrics tell apart, the first that come; the rest are counted together as "other"."""

    def __post_init__(self) -> None:
        if not self.host or ":/" in self.host or self.host.startswith("unix:"):
            raise ConfigError("metrics.host", f"{self.host!r} is not an address or a name")
        if self.port is not None and not 0 <= self.port <= 65535:
            raise ConfigError("metrics.port", f"{self.port} is not in [0, 65535]")
        if not 0 <= self.max_tenants <= MAX_TENANTS:
            raise ConfigError("metrics.max_tenants", f"{self.max_tenants} is not in [0, {MAX_TENANTS}]")


@dataclass(frozen=True, slots=True)
class TracesOptions:
    """Where spans of requests go; nothing is traced without an endpoint. Raises ConfigError."""

    endpoint: str | None = None
    """An OpenTelemetry collector that takes OTLP over gRPC, such as http://localhost:4317; https for TLS.
    Needs the extra pageturner[traces]. Spans tell ids, times and lengths, never text."""
    sample_ratio: float = 1.0
    """The share of traces that are recorded, of those that begin here. Where the caller's trace context says
    whether its trace is recorded, it decides."""
    service_name: str = "pageturner"
    """What the service is called in traces."""

    def __post_init__(self) -> None:
        if self.endpoint is not None and not re.fullmatch(r"https?://[^/\s@]+/?", self.endpoint):
            raise ConfigError("traces.endpoint", f"{self.endpoint!r} is not http://HOST:PORT or https://...")
        if not 0.0 <= self.sample_ratio <= 1.0:
            raise ConfigError("traces.sample_ratio", f"{self.sample_ratio} is not in [0, 1]")
        if not self.service_name:
            raise ConfigError("traces.service_name", "is empty")
