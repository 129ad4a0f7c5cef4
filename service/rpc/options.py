"""Options that the server owns; `service/config.py` composes them with those of the other layers."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from pageturner.service.errors import ConfigError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_ADMIN_PORT = 50052


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """An address to listen on. host_key, port_key: the options that say so, for errors."""

    host: str
    port: int
    host_key: str
    port_key: str

    @property
    def text(self) -> str:
        """As gRPC takes it."""
        return format_address(self.host, self.port)

    @property
    def socket_path(self) -> Path | None:
        """The socket file; None where the address is of a network."""
        return socket_path(self.host)

    @property
    def is_local(self) -> bool:
        """Whether no other machine reaches it, by the address alone: names but localhost count as
        reachable."""
        if self.socket_path is not None or self.host.lower().rstrip(".") == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """How connections are encrypted, and whose certificates are trusted; files in PEM form, read again when
    they change. Socket files are not encrypted. Raises ConfigError."""

    certificate: Path | None = None
    """The server's certificate and those between it and its authority; with key, connections are
    encrypted."""
    key: Path | None = None
    """The private key of the certificate."""
    client_ca: Path | None = None
    """The authorities that sign clients' certificates; auth.identities says whose certificate is which
    tenant."""
    require_client_certificate: bool | None = None
    """Whether a client without a certificate that client_ca has signed is refused; absent, if client_ca is
    given. gRPC asks each client for one or none at all."""

    def __post_init__(self) -> None:
        for name, other in (("certificate", "key"), ("key", "certificate"), ("client_ca", "certificate")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise ConfigError(f"tls.{name}", f"needs tls.{other} too")
        if self.require_client_certificate and self.client_ca is None:
            raise ConfigError("tls.require_client_certificate", "needs tls.client_ca")
        if self.require_client_certificate is False and self.client_ca is not None:
            reason = "gRPC cannot ask for a certificate and do without: leave tls.client_ca out as well"
            raise ConfigError("tls.require_client_certificate", reason)

    @property
    def is_on(self) -> bool:
        """Whether connections are encrypted."""
        return self.certificate is not None

    @property
    def wants_client_certificate(self) -> bool:
        """Whether clients must have one."""
        return self.client_ca is not None

    @property
    def files(self) -> tuple[Path, ...]:
        """All that are given."""
        return tuple(filter(None, (self.certificate, self.key, self.client_ca)))


MAX_PENDING_CALLS = 1 << 16
"""A bound for the worst, since each is begun in turn within a millisecond."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where to listen, and the bounds of a connection and of a shutdown. Raises ConfigError."""

    host: str = DEFAULT_HOST
    """Where to listen: an address or name of this machine, or unix:PATH for a socket file, which every
    user reaches who may write to it."""
    port: int = 50051
    """Where to listen; 0 takes any free port."""
    admin_host: str | None = None
    """Where AdminService, reflection and channelz listen, apart from all else: an address, a name, or
    unix:PATH for a socket file that only the server's own user may open, and who does is an admin."""
    admin_port: int | None = None
    """Their port; 0 takes any free one. With admin_host alone 50052. Without either they are on `port`."""
    enable_admin: bool = True
    """Whether AdminService is served: figures, policies, the flight record."""
    enable_reflection: bool = True
    """Whether tools may ask which services there are, and need no stubs."""
    enable_channelz: bool = False
    """Whether grpc.channelz.v1 tells admins of connections and calls."""
    max_request_bytes: int = 2 << 20
    """Of one message to the server. A request is parsed before its fields can be counted, which stops all
    streams meanwhile: 2 MiB take 0.15 s at worst, and hold 400,000 tokens of text."""
    max_response_bytes: int = 64 << 20
    """Of one message to a client."""
    keepalive_seconds: float = 30.0
    """How often a silent client is pinged."""
    keepalive_timeout_seconds: float = 10.0
    """How long the answer to a ping may take before the client's calls are cancelled."""
    min_ping_interval_seconds: float = 10.0
    """Clients that ping more often are disconnected."""
    max_connection_idle_seconds: float = 300.0
    """A connection without a call is closed after so long, so that forgotten ones don't use up the
    process's file descriptors; a client connects anew by itself."""
    max_connections: int | None = None
    """Connections of one listener at once; one too many is closed as it comes, which its client is told as
    UNAVAILABLE. Unset: as many as the process may open files, less those it needs itself."""
    max_streams_per_connection: int = 4096
    """Calls of one connection at once; gRPC refuses further ones, UNAVAILABLE. A call costs 20 KB before its
    caller is known: it may be one that sends no more than its name."""
    max_connection_age_seconds: float | None = None
    """A connection is told to leave after about so long (by a tenth sooner or later); its calls go on to
    their end, and the client connects anew: to other replicas, under the certificates in force then. Absent,
    never."""
    handshake_timeout_seconds: float = 20.0
    """How long a connection may take to speak HTTP/2."""
    drain_seconds: float = 30.0
    """How long a shutdown waits for what runs."""
    abort_seconds: float = 2.0
    """How long a shutdown waits for what it aborted after drain_seconds."""
    min_watch_seconds: float = 0.1
    """The shortest interval of WatchLoad."""
    max_watch_seconds: float = 3600.0
    """The longest interval of WatchLoad."""
    max_abort_ids: int = 1024
    """How many ids one Abort may name."""
    malloc_arenas: int = 2
    """Arenas of glibc's allocator that the process's threads share, so that memory which a burst freed in one
    is used again; 0 leaves the allocator, and MALLOC_ARENA_MAX, alone."""
    load_reports: bool = True
    """Answers of GenerationService carry the server's load in their trailers (ORCA), by which balancers in
    clients and proxies weigh servers."""
    log_prompts: bool = False
    """Prompts appear in the log; they are private, so off."""
    allow_policy_imports: bool = False
    """Clients may set policies as "module:Class", which imports that module here; names of built-ins
    and of installed entry points do without."""

    def __post_init__(self) -> None:
        for name in ("port", "admin_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise ConfigError(f"server.{name}", f"{port} is not in [0, 65535]")
        for name in ("host", "admin_host"):
            host = getattr(self, name)
            if host is not None and (not host or host.rstrip("/") == "unix:"):
                raise ConfigError(f"server.{name}", "is empty")
        admin = self.admin_address
        if admin is not None and admin.text == self.public_address.text and not admin.text.endswith(":0"):
            raise ConfigError(admin.host_key, f"{admin.text} is where the server itself listens")
        for name in ("max_request_bytes", "max_response_bytes"):
            if not 1024 <= getattr(self, name) < 1 << 31:
                raise ConfigError(
                    f"server.{name}", f"{getattr(self, name)} is not in [1024, {(1 << 31) - 1}]"
                )
        for name in (
            "keepalive_seconds",
            "keepalive_timeout_seconds",
            "min_ping_interval_seconds",
            "max_connection_idle_seconds",
            "handshake_timeout_seconds",
        ):
            if not 0 < getattr(self, name) < 86400:
                raise ConfigError(f"server.{name}", f"{getattr(self, name)} is not in (0, 86400)")
        if not 1 <= self.max_streams_per_connection < 1 << 31:
            reason = f"{self.max_streams_per_connection} is not in [1, {(1 << 31) - 1}]"
            raise ConfigError("server.max_streams_per_connection", reason)
        age = self.max_connection_age_seconds
        if age is not None and not 0 < age < 1e6:
            raise ConfigError("server.max_connection_age_seconds", f"{age} is not in (0, 1000000)")
        for name in ("drain_seconds", "abort_seconds"):
            if not 0 <= getattr(self, name) < 86400:
                raise ConfigError(f"server.{name}", f"{getattr(self, name)} is not in [0, 86400)")
        if not 0 < self.min_watch_seconds <= self.max_watch_seconds < 86400:
            raise ConfigError(
                "server.min_watch_seconds",
                f"{self.min_watch_seconds} is not in (0, max_watch_seconds = {self.max_watch_seconds}]",
            )
        if self.malloc_arenas < 0:
            raise ConfigError("server.malloc_arenas", f"{self.malloc_arenas} is below 0")
        if self.max_connections is not None and self.max_connections < 1:
            raise ConfigError("server.max_connections", f"{self.max_connections} is not at least 1")
        if self.max_abort_ids < 1:
            raise ConfigError("server.max_abort_ids", f"{self.max_abort_ids} is not at least 1")

    @property
    def public_address(self) -> ListenAddress:
        """Where requests come in."""
        return ListenAddress(self.host, self.port, "server.host", "server.port")

    @property
    def admin_address(self) -> ListenAddress | None:
        """Where AdminService is served, if apart from the rest."""
        if self.admin_host is None and self.admin_port is None:
            return None
        host = DEFAULT_HOST if self.admin_host is None else self.admin_host
        port = DEFAULT_ADMIN_PORT if self.admin_port is None else self.admin_port
        return ListenAddress(host, port, "server.admin_host", "server.admin_port")

    def channel_arguments(self) -> tuple[tuple[str, int], ...]:
        """What gRPC is told. Without so_reuseport a second server on a port fails instead of sharing it."""
        most, age = self.max_connections, self.max_connection_age_seconds
        return (
            *((("grpc.max_connection_age_ms", round(age * 1000)),) if age is not None else ()),
            *((("grpc.max_allowed_incoming_connections", most),) if most is not None else ()),
            # Calls that came and were not begun: by default, of those beyond a thousand gRPC cancels some at
            # random, and nobody learns why.
            ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
            ("grpc.max_concurrent_streams", self.max_streams_per_connection),
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", self.max_request_bytes),
            ("grpc.max_send_message_length", self.max_response_bytes),
            ("grpc.keepalive_time_ms", round(self.keepalive_seconds * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.keepalive_timeout_seconds * 1000)),
            # Of gRPC's own pings too, which measure bandwidth: while one is unanswered it sends no other, and
            # would wait for a minute.
            ("grpc.http2.ping_timeout_ms", round(self.keepalive_timeout_seconds * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            (
                "grpc.http2.min_ping_interval_without_data_ms",
                round(self.min_ping_interval_seconds * 1000),
            ),
            ("grpc.max_connection_idle_ms", round(self.max_connection_idle_seconds * 1000)),
            ("grpc.server_handshake_timeout_ms", round(self.handshake_timeout_seconds * 1000)),
        )


def format_address(host: str, port: int) -> str:
    """host:port, an IPv6 address in brackets; a socket file is its own address."""
    if socket_path(host) is not None:
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def socket_path(host: str) -> Path | None:
    """The socket file that `unix:PATH` (or unix:///PATH) names; None where host is of a network."""
    scheme, _, path = host.partition(":")
    return Path(path.removeprefix("//")) if scheme == "unix" else None
