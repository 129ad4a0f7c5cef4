"""What can be chosen about a Ray application, and its arguments as `serve run` or a YAML file state them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pageturner.policies.spec import PolicySpec
from pageturner.service.config import LoadedConfig, load_config
from pageturner.service.errors import ConfigError
from pageturner.service.schema import from_text, from_toml, keys_of, to_plain


@dataclass(frozen=True, slots=True)
class ScaleOptions:
    """How many replicas there are, where requests go, how they end. Raises ConfigError."""

    min_replicas: int = 1
    """Replicas that are kept however little there is to do."""
    max_replicas: int = 1
    """Replicas at most; more than min_replicas lets Ray add and take away by queued tokens."""
    num_ingresses: int = 1
    """Processes that take calls in, route them, and carry answers over a replica's death."""
    num_cpus: float = 1.0
    """Cores that Ray sets aside for a replica; it computes with as many threads unless model.num_threads says
    otherwise."""
    num_gpus: float = 0.0
    """GPUs that Ray sets aside for a replica, and shows to it alone."""
    target_queued_tokens: int = 2048
    """Prompt tokens that may wait at a replica; so many more replicas are wanted as more wait on average."""
    target_busy: float = 0.8
    """Share of a replica's sequences in use, up to which those of one replica less must fit before one
    goes."""
    upscale_delay_seconds: float = 5.0
    """How long more replicas must have been wanted."""
    downscale_delay_seconds: float = 120.0
    """How long fewer replicas must have been wanted."""
    metrics_seconds: float = 2.0
    """Over how long the load is averaged that replicas are added and taken away by."""
    routing: PolicySpec = field(default_factory=lambda: PolicySpec("prefix-aware"))
    """The policy that chooses a request's replica: a name, "module:Class", or a table with options."""
    report_seconds: float = 1.0
    """How often replicas tell their load and what their prefix caches hold."""
    message_seconds: float = 0.05
    """Tokens of a stream that come within so long of the message before are one message: each passes through
    four processes. The first token waits for nothing."""
    surge_percent: int = 25
    """Replicas of a new version that may start beside those of the old one, in percent of these, rounded up:
    an old one goes once a new one serves, so that a version that fails to start takes nothing away. They need
    room of their own; where there is none, 0 ends old ones first."""
    drain_seconds: float = 60.0
    """How long a replica that is taken away or replaced may finish what it has; what is left goes on at
    others."""
    resume_seconds: float = 120.0
    """How long a request waits for a replica to come where there is none that could take it."""

    def __post_init__(self) -> None:
        if self.min_replicas < 1:
            raise ConfigError("scale.min_replicas", f"{self.min_replicas} is not at least 1")
        if self.max_replicas < self.min_replicas:
            reason = f"{self.max_replicas} is below scale.min_replicas = {self.min_replicas}"
            raise ConfigError("scale.max_replicas", reason)
        for name in ("num_ingresses", "target_queued_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"scale.{name}", f"{getattr(self, name)} is not at least 1")
        if not 0 <= self.surge_percent <= 100:
            raise ConfigError("scale.surge_percent", f"{self.surge_percent} is not in [0, 100]")
        if not 0 < self.target_busy <= 1:
            raise ConfigError("scale.target_busy", f"{self.target_busy} is not in (0, 1]")
        if not 0 < self.num_cpus < 1e6:
            raise ConfigError("scale.num_cpus", f"{self.num_cpus} is not in (0, 1000000)")
        if not 0 <= self.num_gpus < 1e6:
            raise ConfigError("scale.num_gpus", f"{self.num_gpus} is not in [0, 1000000)")
        for name in ("metrics_seconds", "report_seconds", "drain_seconds", "resume_seconds"):
            if not 0 < getattr(self, name) < 86400:  # also refuses NaN
                raise ConfigError(f"scale.{name}", f"{getattr(self, name)} is not in (0, 86400)")
        for name in ("upscale_delay_seconds", "downscale_delay_seconds", "message_seconds"):
            if not 0 <= getattr(self, name) < 86400:
                raise ConfigError(f"scale.{name}", f"{getattr(self, name)} is not in [0, 86400)")

    @property
    def is_fixed(self) -> bool:
        """Whether the number of replicas never changes."""
        return self.min_replicas == self.max_replicas


@dataclass(frozen=True, slots=True)
class _Sections:
    scale: ScaleOptions


_KEYS = keys_of(_Sections)


@dataclass(frozen=True, slots=True)
class Settings:
    """All that an application is built of; plain enough to be sent to other machines.

    service: the service's configuration as values of TOML by dotted key, of those that are not the defaults.
    """

    scale: ScaleOptions
    service: Mapping[str, object]

    @property
    def version(self) -> str:
        """Names what is stated of the service: of two versions of an application, which one a replica is
        of."""
        stated = json.dumps(self.service, sort_keys=True, default=str)
        return hashlib.sha256(stated.encode()).hexdigest()[:16]

    def load(self) -> LoadedConfig:
        """The service's configuration, the same on every machine: no environment goes over it."""
        return load_config(environ={}, given=self.service)


_NO_TLS = "connections end at Ray's proxies: let a balancer before them speak TLS"

_OF_ONE_SERVER: Mapping[str, str] = {
    "server.host": "Ray's proxies listen, where grpc_options says",
    "server.port": "Ray's proxies listen, at grpc_options.port",
    "server.admin_host": "an application of Ray has one port for all services",
    "server.admin_port": "an application of Ray has one port for all services",
    **dict.fromkeys(
        (
            "server.max_response_bytes",
            "server.keepalive_seconds",
            "server.keepalive_timeout_seconds",
            "server.min_ping_interval_seconds",
            "server.max_connection_idle_seconds",
            "server.max_connections",
            "server.max_streams_per_connection",
            "server.max_connection_age_seconds",
            "server.handshake_timeout_seconds",
            "server.load_reports",
        ),
        "connections end at Ray's proxies, which have bounds of their own",
    ),
    "server.enable_admin": "auth.identities says who may call AdminService",
    "server.enable_reflection": "Ray has it, as grpc_options.enable_reflection",
    "server.enable_channelz": "connections end at Ray's proxies",
    "server.drain_seconds": "replicas end as scale.drain_seconds says",
    "server.abort_seconds": "replicas end as scale.drain_seconds says",
    "server.min_watch_seconds": "WatchLoad is about one process",
    "server.max_watch_seconds": "WatchLoad is about one process",
    "tls.certificate": _NO_TLS,
    "tls.key": _NO_TLS,
    "tls.client_ca": "connections end at Ray's proxies, which pass no certificate on",
    "metrics.port": "replicas of one machine would want one port; Ray has metrics of its own",
    "traces.endpoint": "spans of replicas are not exported",
    "cache.disk_cache_folder": "replicas of one machine would want one folder",
    "cache.prefix_key_file": "replicas share a key that their coordinator draws",
    "handover.role": "servers that hand KV over know one another by address; replicas have none",
    "model.tensor_parallel_port": "replicas of one machine would want one port",
}
"""Keys that mean one process with a port of its own."""


def read_arguments(arguments: Mapping[str, object]) -> Settings:
    """The arguments of an application: sections as tables, keys as "section.key" with text (as
    `serve run ... scale.max_replicas=3` has them), and `config`, the path of a TOML file beneath them.

    Raises ConfigError, which names the argument.
    """
    path: Path | None = None
    scale: dict[str, Any] = {}
    given: dict[str, object] = {}
    flags: dict[str, str] = {}
    for name, value in arguments.items():
        if name == "config":
            path = _path(value)
        elif isinstance(value, Mapping):
            for key, one in value.items():
                if name == "scale":
                    scale[str(key)] = _scale_value(str(key), one)
                else:
                    given[f"{name}.{key}"] = one
        elif name.startswith("scale."):
            key = name.partition(".")[2]
            scale[key] = _scale_value(key, value)
        elif isinstance(value, str) and "." in name:
            flags[name] = value
        elif "." in name:
            given[name] = value
        else:
            raise ConfigError(name, f"is {value!r}, not a table of a section's keys")
    loaded = load_config(path, flags=flags, given=given)
    for key, reason in _OF_ONE_SERVER.items():
        if key in loaded.origins:
            raise ConfigError(key, f"{reason} (from {loaded.origins[key]})")
    options = ScaleOptions(**scale)
    return Settings(options, _service_values(loaded, options))


def _path(value: object) -> Path:
    if not isinstance(value, str) or not value:
        raise ConfigError("config", f"is {value!r}, not the path of a file")
    return Path(value)


def _scale_value(name: str, value: object) -> Any:
    key = _KEYS.get(f"scale.{name}")
    if key is None:
        known = ", ".join(each.name for each in _KEYS.values())
        raise ConfigError(f"scale.{name}", f"unknown key; there are {known}")
    try:
        if isinstance(value, str):
            return from_text(key.annotation, value)
        return from_toml(key.annotation, value)
    except ValueError as error:
        raise ConfigError(str(key), str(error)) from error


def _service_values(loaded: LoadedConfig, options: ScaleOptions) -> Mapping[str, object]:
    """What was stated, in values that every machine reads alike."""
    stated = {
        str(key): to_plain(value)
        for key, value in loaded.config
        if str(key) in loaded.origins and value is not None
    }
    source = loaded.config.model.source
    if "model.source" in stated and Path(source).exists():
        stated["model.source"] = str(Path(source).absolute())  # replicas run in folders of their own
    auth, adapters = loaded.config.auth, loaded.config.adapters
    for key, path in (("auth.identities", auth.identities), ("adapters.folder", adapters.folder)):
        if path is not None:
            stated[key] = str(path.absolute())
    if adapters.load:
        stated["adapters.load"] = {name: str(Path(path).absolute()) for name, path in adapters.load.items()}
    stated.setdefault("model.num_threads", max(1, int(options.num_cpus)))
    return stated
