"""Options that the server owns; `service/config.py` composes them with those of the other layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pageturner.service.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where to listen, and the bounds of a connection and of a shutdown. Raises ConfigError."""

    host: str = "127.0.0.1"
    """Where to listen: an address or name of this machine, or unix:PATH for a socket file, which every
    user reaches who may write to it."""
    port: int = 50051
    """Where to listen; 0 takes any free port."""
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
    log_prompts: bool = False
    """Prompts appear in the log; they are private, so off."""
    allow_policy_imports: bool = False
    """Clients may set policies as "module:Class", which imports that module here; names of built-ins
    and of installed entry points do without."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("server.port", f"{self.port} is not in [0, 65535]")
        if not self.host or self.host.rstrip("/") == "unix:":
            raise ConfigError("server.host", "is empty")
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
        if self.max_abort_ids < 1:
            raise ConfigError("server.max_abort_ids", f"{self.max_abort_ids} is not at least 1")

    @property
    def address(self) -> str:
        """What gRPC listens on."""
        return format_address(self.host, self.port)

    def channel_arguments(self) -> tuple[tuple[str, int], ...]:
        """What gRPC is told. Without so_reuseport a second server on a port fails instead of sharing it."""
        return (
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", self.max_request_bytes),
            ("grpc.max_send_message_length", self.max_response_bytes),
            ("grpc.keepalive_time_ms", round(self.keepalive_seconds * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.keepalive_timeout_seconds * 1000)),
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
