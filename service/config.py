"""All configuration, and every read of the environment.

One TOML file, environment variables (PAGETURNER_SECTION_KEY) over it, flags over those. Each section is
the frozen options of the layer that obeys them; whatever is wrong is a ConfigError that names its key.
Commands and `service.startup` import this; every other layer is handed its own options.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from pageturner.policies import presets, registry
from pageturner.policies.errors import PolicyError
from pageturner.policies.interfaces import AXES, PolicySet
from pageturner.policies.spec import PolicySpec
from pageturner.service.auth.options import AuthOptions
from pageturner.service.core.options import SchedulerOptions, SpeculationOptions
from pageturner.service.engine.adapter_options import AdapterOptions
from pageturner.service.engine.handover import HandoverOptions
from pageturner.service.engine.options import EngineOptions
from pageturner.service.errors import ConfigError
from pageturner.service.grammars.options import GrammarOptions
from pageturner.service.logs.structured import LogOptions
from pageturner.service.model.options import ModelOptions
from pageturner.service.monitoring.options import MetricsOptions, TracesOptions
from pageturner.service.rpc.options import ServerOptions, TlsOptions
from pageturner.service.schema import Key, from_text, from_toml, keys_of, to_plain, to_toml
from pageturner.service.sizes import Bytes

ENV_PREFIX = "PAGETURNER_"
CONFIG_VARIABLE = f"{ENV_PREFIX}CONFIG"
TOKEN_FILE_VARIABLE = f"{ENV_PREFIX}TOKEN_FILE"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
OPENMP_SPINS = 2000
"""Some 40 us: longer than the gaps between a step's operations, a fraction of a busy neighbour's turn."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache, in the operator's units; `service.startup.sizing` turns bytes into blocks."""

    block_size: int = 16
    """Tokens of one block."""
    num_blocks: int | None = None
    """Blocks on the device; absent, a memory budget decides."""
    kv_cache_memory: Bytes | None = None
    """Memory of the device blocks, such as "2GiB"; absent on a GPU, gpu_memory_utilization of its memory less
    weights and activations; absent on a CPU, a quarter of the machine's memory and at most 1 GiB."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that may be in use, weights included."""
    swap_space: Bytes = Bytes(1 << 30)
    """Host memory for the KV of requests swapped out, pinned where there is a GPU; 0 for none. The default
    shrinks to what weights and pool leave of the memory; a stated size that does not fit is refused."""
    host_cache_memory: Bytes = Bytes(0)
    """Host memory, beside the swap space, in which cached blocks live on that the device evicts, such as
    "4GiB"; 0 for none. They take what of the swap space is free, too, and a swap takes their place."""
    disk_cache_folder: Path | None = None
    """Where cached blocks are kept on disk as well, through restarts. What prompts said can be told from it:
    the folder is made for its owner alone. It needs host_cache_memory, through which its blocks pass."""
    disk_cache_size: Bytes = Bytes(16 << 30)
    """What the folder may hold, blocks of other models that were served from it included."""
    enable_prefix_caching: bool = True
    """Whether finished blocks are kept for later prompts that start alike."""
    reuse_partial_blocks: bool = True
    """Whether the last block of an ended answer is kept too, though it is not full: the next turn of a
    conversation then computes from the answer's end. Without enable_prefix_caching of no effect."""
    prefix_key_file: Path | None = None
    """A file of at least 16 secret bytes, under which cached blocks are named: give replicas one and the
    same, and a router that has it too finds which of them holds a prompt's beginning (GetPrefixSummary).
    Unset: a key of each process's own, or of the folder of its blocks, whose names mean nothing elsewhere."""
    share_prefixes_between_tenants: bool = False
    """Whether tenants that authentication proved find one another's cached blocks: then each can learn from
    its cached_prompt_tokens, and from the time to its first token, how others' prompts begin."""

    def __post_init__(self) -> None:
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigError("cache.num_blocks", "cache.kv_cache_memory is given too; give one of them")
        if self.host_cache_memory and not self.enable_prefix_caching:
            raise ConfigError("cache.host_cache_memory", "needs cache.enable_prefix_caching")
        if self.disk_cache_folder is not None and not self.host_cache_memory:
            reason = "needs cache.host_cache_memory, through which its blocks pass"
            raise ConfigError("cache.disk_cache_folder", reason)


def _default(axis: str) -> PolicySpec:
    return PolicySpec(registry.DEFAULTS[axis])


@dataclass(frozen=True, slots=True)
class PoliciesConfig:
    """The policy of each axis: a name, "module:Class", or a table { name = ..., option = ... }."""

    queue: PolicySpec = field(default_factory=lambda: _default("queue"))
    """The order of waiting, preempted and swapped requests."""
    admission: PolicySpec = field(default_factory=lambda: _default("admission"))
    """Whether the next may start."""
    batch: PolicySpec = field(default_factory=lambda: _default("batch"))
    """How a step's token budget is split."""
    victim: PolicySpec = field(default_factory=lambda: _default("victim"))
    """Who yields when blocks or slots run out."""
    reclaim: PolicySpec = field(default_factory=lambda: _default("reclaim"))
    """How a victim yields."""
    eviction: PolicySpec = field(default_factory=lambda: _default("eviction"))
    """Which cached block is overwritten first."""
    preset: str | None = None
    """A named set, such as "vllm-v1", for the axes (and the options of the scheduler that belong to it)
    that are not given."""
    shadow: Mapping[str, PolicySpec] = field(default_factory=dict)
    """By axis, policies that are asked and not obeyed."""

    def create(self) -> PolicySet:
        """The six policies. Raises ConfigError naming the axis of an unknown name or a bad option."""
        return PolicySet(**{axis: _create(f"policies.{axis}", axis, getattr(self, axis)) for axis in AXES})

    def create_shadows(self) -> dict[str, object]:
        """The shadows by axis. Raises ConfigError as `create` does."""
        return {
            axis: _create(f"policies.shadow.{axis}", axis, choice) for axis, choice in self.shadow.items()
        }


def _create(key: str, axis: str, choice: PolicySpec) -> Any:
    try:
        return registry.create(axis, choice.name, choice.options)
    except PolicyError as error:
        raise ConfigError(key, str(error)) from error


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Everything that can be chosen about a server."""

    model: ModelOptions
    cache: CacheConfig
    scheduler: SchedulerOptions
    speculation: SpeculationOptions
    policies: PoliciesConfig
    engine: EngineOptions
    grammars: GrammarOptions
    adapters: AdapterOptions
    handover: HandoverOptions
    server: ServerOptions
    tls: TlsOptions
    auth: AuthOptions
    metrics: MetricsOptions
    traces: TracesOptions
    log: LogOptions

    def __iter__(self) -> Iterator[tuple[Key, Any]]:
        """Every key with its effective value."""
        for key in KEYS.values():
            yield key, getattr(getattr(self, key.section), key.name)

    def flat(self) -> dict[str, str]:
        """Every dotted key with its value as text, for display."""
        return {str(key): "none" if value is None else str(to_plain(value)) for key, value in self}


_SECTION_TYPES: Mapping[str, type] = get_type_hints(ServiceConfig)
SECTIONS: tuple[str, ...] = tuple(_SECTION_TYPES)
KEYS: Mapping[str, Key] = keys_of(ServiceConfig)

_MAX_COUNT = (1 << 31) - 1  # what GetServerInfo and GetModel can state of them

# What the layers' own options leave unchecked: inclusive bounds, None for none.
_BOUNDS: Mapping[str, tuple[float | None, float | None]] = {
    "cache.block_size": (1, 4096),
    "cache.num_blocks": (1, None),
    "cache.kv_cache_memory": (1, None),
    "cache.gpu_memory_utilization": (0.01, 1.0),
    "cache.swap_space": (0, None),
    "cache.host_cache_memory": (0, None),
    "cache.disk_cache_size": (1, None),
    "scheduler.max_model_len": (2, _MAX_COUNT),
    "scheduler.max_num_seqs": (1, _MAX_COUNT),
    "scheduler.max_num_batched_tokens": (1, _MAX_COUNT),
    "scheduler.watermark": (0.0, 0.9),
    "scheduler.max_waiting": (1, None),
    "scheduler.max_queued_tokens": (1, None),
    "scheduler.max_n": (1, None),
    "scheduler.max_bypasses": (0, None),
    "scheduler.max_preemptions": (0, None),
    "scheduler.max_skips": (0, None),
    "scheduler.starvation_seconds": (0.0, None),
    "scheduler.resort_interval_seconds": (0.0, None),
    "scheduler.max_step_failures": (0, None),
    "scheduler.max_policy_faults": (1, None),
    "scheduler.max_policy_fault_share": (0.01, 1.0),
    "scheduler.policy_budget_ms": (0.0, None),
}


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, and where each of its values that is no default came from.

    path: the file, if any. service_variables: variables of the environment that were left alone, since
    Kubernetes sets them for a Service of such a name.
    """

    config: ServiceConfig
    origins: Mapping[str, str]
    path: Path | None = None
    service_variables: tuple[str, ...] = ()

    def to_toml(self) -> str:
        """A file that reads back as this configuration; keys without a value are comments."""
        lines = [f"# {ENV_PREFIX}SECTION_KEY in the environment goes over this file, a flag over both."]
        section = ""
        for key, value in self.config:
            if key.section != section:
                section = key.section
                lines += ["", f"[{section}]"]
            origin = self.origins.get(str(key))
            note = f"  # from {origin}" if origin else ""
            if value is None:
                lines.append(f"# {key.name} is not set{note}")
            else:
                lines.append(f"{key.name} = {to_toml(key.annotation, value)}{note}")
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Dotted key -> value, default, origin, doc."""
        return {
            str(key): {
                "value": to_plain(value),
                "default": None if key.default is dataclasses.MISSING else to_plain(key.default),
                "origin": self.origins.get(str(key), "default"),
                "doc": key.doc,
            }
            for key, value in self.config
        }


def load_config(
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    given: Mapping[str, object] | None = None,
) -> LoadedConfig:
    """Read, compose and check. flags: text by dotted key. environ: that of the process unless given.

    given: by dotted key, values of the types that TOML has; they go over all else.
    path: the file; else the one that PAGETURNER_CONFIG names; else none. Raises ConfigError.
    """
    environ = os.environ if environ is None else environ
    if path is None and environ.get(CONFIG_VARIABLE):
        path = Path(environ[CONFIG_VARIABLE])
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def take(key: Key, origin: str, read: Any, raw: object) -> None:
        try:
            _check_text(raw)
            values[str(key)] = _in_bounds(key, read(key.annotation, raw))
        except ValueError as error:
            raise ConfigError(str(key), f"{error} (from {origin})") from None
        origins[str(key)] = origin

    if path is not None:
        in_file = list(_file_values(path))
        _search_beside(path)
        for key, raw in in_file:
            take(key, str(path), from_toml, raw)
    for key, variable, text in _environment_values(environ):
        take(key, f"environment {variable}", from_text, text)
    for name, text in (flags or {}).items():
        take(_find_key(name), "the command line", from_text, text)
    for name, value in (given or {}).items():
        take(_find_key(name, "the caller"), "the caller", from_toml, value)

    if values.get("policies.preset"):
        _take_preset(values, origins)
    if values.get("auth.identities") is not None:
        _take_tenancy(values, origins)
    if "model.source" in values:
        # Shells leave ~ alone in files, and in some flags; the loader may not ask where home is.
        values["model.source"] = os.path.expanduser(values["model.source"])
    if values.get("cache.disk_cache_folder") is not None:
        values["cache.disk_cache_folder"] = values["cache.disk_cache_folder"].expanduser()
    if "adapters.load" in values:
        folders = values["adapters.load"].items()
        values["adapters.load"] = {name: os.path.expanduser(folder) for name, folder in folders}
    if values.get("adapters.folder") is not None:
        values["adapters.folder"] = values["adapters.folder"].expanduser()
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in values.items():
        sections[KEYS[name].section][KEYS[name].name] = value
    config = ServiceConfig(**{name: _build(name, options) for name, options in sections.items()})
    config.policies.create()
    config.policies.create_shadows()
    if config.speculation.method != "none" and config.engine.steps_ahead == 1:
        reason = "drafts follow a token that a step ahead does not know; engine.steps_ahead is 1"
        raise ConfigError("speculation.method", reason)
    if config.model.tensor_parallel_size > 1 and config.cache.disk_cache_folder is not None:
        reason = f"would hold the KV of one rank of {config.model.tensor_parallel_size}"
        raise ConfigError(
            "cache.disk_cache_folder", f"{reason}; model.tensor_parallel_size = 1 has all of it"
        )
    left_alone = (name for name, text in _own_variables(environ) if _is_service_variable(name, text))
    return LoadedConfig(config, origins, path, tuple(left_alone))


def _search_beside(path: Path) -> None:
    """Let the configuration name a policy whose module lies beside it; Python's own path goes first."""
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.append(folder)


def _take_preset(values: dict[str, Any], origins: dict[str, str]) -> None:
    """What a preset says goes under whatever was given."""
    try:
        preset = presets.find_preset(values["policies.preset"])
    except PolicyError as error:
        raise ConfigError("policies.preset", f"{error} (from {origins['policies.preset']})") from error
    policies = {f"policies.{axis}": getattr(preset.policies, axis) for axis in AXES}
    implied: dict[str, object] = {key: registry.spec_of(policy) for key, policy in policies.items()}
    implied |= {f"scheduler.{name}": value for name, value in preset.core_options.items()}
    for key, value in implied.items():
        if key not in values:
            values[key], origins[key] = value, f"preset {preset.name}"


_OF_TENANCY: Mapping[str, object] = {
    "policies.queue": PolicySpec("virtual-token-counter"),
    "policies.victim": PolicySpec("most-over-served"),
    "scheduler.share_between_tenants": True,
}
"""Defaults where tenants are known, so that none is held up by another's flood."""


def _take_tenancy(values: dict[str, Any], origins: dict[str, str]) -> None:
    """What is better with known tenants goes under whatever was given."""
    for key, value in _OF_TENANCY.items():
        if key not in values:
            values[key], origins[key] = value, "auth.identities"


def _build(section: str, options: Mapping[str, Any]) -> Any:
    try:
        return _SECTION_TYPES[section](**options)
    except ValueError as error:
        raise ConfigError(section, str(error)) from error


def _check_text(raw: object) -> None:
    """Raise ValueError where the system handed over bytes that the locale does not know as text."""
    if isinstance(raw, str) and any("\ud800" <= character <= "\udfff" for character in raw):
        shown = os.fsencode(raw).decode("utf-8", "backslashreplace")
        raise ValueError(
            f"'{shown}' is not text in this locale, whose encoding is {sys.getfilesystemencoding()}"
        )


def _in_bounds(key: Key, value: Any) -> Any:
    low, high = _BOUNDS.get(str(key), (None, None))
    if value is not None and ((low is not None and value < low) or (high is not None and value > high)):
        raise ValueError(f"{value} is not {f'at least {low}' if high is None else f'in [{low}, {high}]'}")
    return value


def _file_values(path: Path) -> Iterator[tuple[Key, object]]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # of tomllib: a number too long, tables too deep
        raise ConfigError(str(path), f"is not TOML: {error}") from error
    for section, table in document.items():
        if section in SECTIONS and not isinstance(table, dict):
            raise ConfigError(section, f"is a section, [{section}], not a value (from {path})")
        if section not in SECTIONS:
            raise ConfigError(section, f"unknown section{_did_you_mean(section, section)} (from {path})")
        for name, value in table.items():
            yield _find_key(f"{section}.{name}", str(path)), value


def _environment_values(environ: Mapping[str, str]) -> Iterator[tuple[Key, str, str]]:
    for variable, text in _own_variables(environ):
        if not _is_service_variable(variable, text):
            section, _, name = variable.removeprefix(ENV_PREFIX).lower().partition("_")
            yield _find_key(f"{section}.{name}", f"environment {variable}"), variable, text


def _own_variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The variables whose name begins with that of a section."""
    for variable, text in sorted(environ.items()):
        section = variable.removeprefix(ENV_PREFIX).lower().partition("_")[0]
        if variable.startswith(ENV_PREFIX) and section in SECTIONS:
            yield variable, text


def _is_service_variable(variable: str, text: str) -> bool:
    """Whether Kubernetes set it in each pod for a Service, such as one named `pageturner-server`."""
    if re.search(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$", variable):
        return True
    return variable.endswith("_PORT") and text.startswith(("tcp://", "udp://", "sctp://"))


def _find_key(name: str, origin: str = "the command line") -> Key:
    if name not in KEYS:
        raise ConfigError(name, f"unknown key{_did_you_mean(name, name.rpartition('.')[2])} (from {origin})")
    return KEYS[name]


def _did_you_mean(name: str, last: str) -> str:
    """A hint at the key that was meant: one of that name in another section, else the nearest spelling."""
    same = [str(key) for key in KEYS.values() if key.name == last]
    near = same or difflib.get_close_matches(name, (*KEYS, *SECTIONS), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def notify_socket(environ: Mapping[str, str] | None = None) -> str | None:
    """Where systemd waits to hear that the service is ready; None where nobody does."""
    environ = os.environ if environ is None else environ
    return environ.get("NOTIFY_SOCKET") or None


def calm_openmp(environ: MutableMapping[str, str] | None = None) -> None:
    """Have waiting threads of OpenMP sleep after OPENMP_SPINS turns, unless the environment says when.

    By default they spin for milliseconds on a core that another program wants. Of use before torch is
    imported: GNU's OpenMP reads its variables when it is loaded.
    """
    environ = os.environ if environ is None else environ
    if not any(name in environ for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")):
        environ["GOMP_SPINCOUNT"] = str(OPENMP_SPINS)


@contextmanager
def local_gloo(environ: MutableMapping[str, str] | None = None) -> Iterator[None]:
    """Meanwhile ranks that form a group on CPUs listen for each other on the loopback interface, unless the
    environment says where.

    By default gloo listens on the address of the machine's name, and it asks the environment alone.
    """
    environ = os.environ if environ is None else environ
    if _GLOO_INTERFACE in environ:
        yield
        return
    environ[_GLOO_INTERFACE] = "lo" if sys.platform == "linux" else "lo0"
    try:
        yield
    finally:
        environ.pop(_GLOO_INTERFACE, None)


def token_file(environ: Mapping[str, str] | None = None) -> Path | None:
    """The file with a client's own token that PAGETURNER_TOKEN_FILE names, for commands that call a
    server."""
    environ = os.environ if environ is None else environ
    name = environ.get(TOKEN_FILE_VARIABLE)
    return Path(name).expanduser() if name else None


def quiet_grpc(environ: MutableMapping[str, str] | None = None) -> None:
    """Have gRPC write errors alone on standard error, unless the environment says how much.

    By default it writes a line of its own, in no form of the log's, for each connection that fails to speak
    TLS, and any stranger may make those. Of use before grpc is imported.
    """
    environ = os.environ if environ is None else environ
    environ.setdefault("GRPC_VERBOSITY", "ERROR")


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where converted models are kept: XDG_CACHE_HOME/pageturner, by default ~/.cache/pageturner.

    Whether it can be written is for its users to find out: a container's arbitrary user has no home folder,
    and that of one without is /, as most containers set HOME.
    """
    environ = os.environ if environ is None else environ
    if base := environ.get("XDG_CACHE_HOME"):
        return Path(base) / "pageturner"
    try:
        home = Path.home()
    except RuntimeError:
        home = Path("/")
    return home / ".cache" / "pageturner"
