"""Policy sets and sweeps as the command line writes them.

victim=last-arrived;reclaim=always-swap        the other axes keep their defaults
queue=priority:aging_seconds=5                 options after a colon, as in `policies set`
queue={name="priority",aging_seconds=5}        or as an inline table, as in the configuration
preset=vllm-v1;victim=least-computed           a preset, and what differs from it
fair: queue=virtual-token-counter              under a name of one's own, which tables and plots show
--sweep reclaim=always-swap,always-recompute   each set once with each value
--sweep cache.num_blocks=512,1024              a bound of the machine
--sweep speculation.method=none,ngram          without drafts and with them
--sweep queue.aging_seconds=1,10               an option of the policy that the set has

Where there are several servers, `routing` is an axis like the others, and `fleet.report_seconds` a bound; so
are `fleet.num_prefill`, of servers that prefill for the others, and `handover.link_gbs`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pageturner.policies import registry
from pageturner.policies.errors import PolicyError
from pageturner.policies.interfaces import ALL_AXES, AXES, FLEET_AXES
from pageturner.policies.presets import find_preset
from pageturner.policies.spec import PolicySpec, parse_spec, parse_value, split_outside
from pageturner.service.errors import ConfigError
from pageturner.service.simulator.experiment import Contender
from pageturner.service.simulator.fleet_setup import FleetSetup
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.tables import read_table

_SECTIONS = ("cache", "scheduler", "step_time", "speculation", "fleet", "handover")

_NAMED = re.compile(r"(?P<name>[^=;:{]*[^=;:{\s]\s*):(?P<set>.*)", re.DOTALL)
"""A name ends at a colon that comes before any `=`; the colon of an option comes after one."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is written down of a contender. policies: by axis. bounds: dotted key -> value."""

    name: str
    policies: Mapping[str, PolicySpec] = field(default_factory=dict)
    bounds: Mapping[str, Any] = field(default_factory=dict)

    def on(self, machine: SimulatedMachine, fleet: FleetSetup | None = None) -> Contender:
        """fleet: where there are several of the machine. Raises ConfigError for a policy or a bound that does
        not exist, or that there is no use for."""
        own = {axis: spec for axis, spec in self.policies.items() if axis not in FLEET_AXES}
        routing_spec = self.policies.get("routing", PolicySpec(registry.DEFAULTS["routing"]))
        try:
            policies = registry.create_set(own)
            routing = registry.create("routing", routing_spec.name, routing_spec.options)
        except PolicyError as error:
            raise ConfigError("--policies", str(error)) from error
        for key, value in self.bounds.items():
            section, _, name = key.partition(".")
            if section == "fleet":
                fleet = _changed(_several(fleet, key), name, value, "fleet.")
            elif section == "handover":
                fleet = _several(fleet, key)
                handover = _changed(fleet.handover, name, value, "handover.")
                fleet = replace(fleet, handover=handover)
            else:
                changed = _changed(getattr(machine, section), name, value, f"{section}.")
                try:
                    machine = replace(machine, **{section: changed})
                except ValueError as error:
                    raise ConfigError("--sweep", str(error)) from error
        if fleet is None:
            if own.keys() != self.policies.keys():
                _several(None, "routing")
            return Contender(self.name, policies, machine)
        if fleet.is_coarse and policies != registry.default_policies():
            raise ConfigError(
                "--policies", f"{self.name!r}: coarse servers run the defaults only; add --servers scheduler"
            )
        return Contender(self.name, policies, machine, fleet, routing)


def _several(fleet: FleetSetup | None, key: str) -> FleetSetup:
    if fleet is None:
        raise ConfigError(key, "is of several servers: say how many with --replicas N")
    return fleet


def _changed(options: Any, name: str, value: object, path: str) -> Any:
    """Options with another value of one of them. Raises ConfigError."""
    try:
        return read_table(type(options), {**asdict(options), name: value}, path)
    except ValueError as error:
        raise ConfigError("--sweep", str(error)) from error


def parse_policies(text: str) -> Setup:
    """Raises ConfigError."""
    specs: dict[str, PolicySpec] = {}
    bounds: dict[str, object] = {}
    named = _NAMED.fullmatch(text)
    name, text = (named["name"].strip(), named["set"]) if named else ("", text)
    for part in filter(None, (part.strip() for part in split_outside(text, ";"))):
        axis, _, value = part.partition("=")
        if axis.strip() == "preset":
            preset_specs, preset_bounds = _preset(value.strip())
            specs, bounds = {**preset_specs, **specs}, {**preset_bounds, **bounds}
        elif axis.strip() not in ALL_AXES:
            raise ConfigError(
                "--policies", f"no policy axis {axis.strip()!r}; there are preset, {', '.join(ALL_AXES)}"
            )
        else:
            specs[axis.strip()] = _spec("--policies", value)
    return Setup(name or text.strip("; ") or "defaults", specs, bounds)


def _preset(name: str) -> tuple[dict[str, PolicySpec], dict[str, object]]:
    """A preset's policies by axis, and the bounds of the scheduler that belong to its rule."""
    try:
        preset = find_preset(name)
    except PolicyError as error:
        raise ConfigError("--policies", str(error)) from error
    specs = {axis: registry.spec_of(getattr(preset.policies, axis)) for axis in AXES}
    return specs, {f"scheduler.{option}": value for option, value in preset.core_options.items()}


def sweep(setups: Sequence[Setup], text: str) -> tuple[Setup, ...]:
    """Each setup once with each value of `text`. Raises ConfigError."""
    key, found, values = text.partition("=")
    if not found:
        raise ConfigError("--sweep", f"{text!r} is not KEY=VALUE,VALUE")
    return tuple(
        _with(setup, key.strip(), value.strip()) for setup in setups for value in split_outside(values, ",")
    )


def check_names(setups: Sequence[Setup]) -> None:
    """Raises ConfigError where two sets have one name, so that no table or plot could tell them apart."""
    seen: set[str] = set()
    for setup in setups:
        if setup.name in seen:
            raise ConfigError("--policies", f"two sets are called {setup.name!r}; write NAME: before one")
        seen.add(setup.name)


def _with(setup: Setup, key: str, value: str) -> Setup:
    name = f"{key}={value}" if setup.name == "defaults" else f"{setup.name};{key}={value}"
    section, _, option = key.partition(".")
    if key in ALL_AXES:
        return Setup(name, {**setup.policies, key: _spec("--sweep", value)}, setup.bounds)
    if section in ALL_AXES and option:
        spec = setup.policies.get(section, PolicySpec(registry.DEFAULTS[section]))
        spec = PolicySpec(spec.name, {**spec.options, option: parse_value(value)})
        return Setup(name, {**setup.policies, section: spec}, setup.bounds)
    if section in _SECTIONS and option:
        return Setup(name, setup.policies, {**setup.bounds, key: parse_value(value)})
    raise ConfigError("--sweep", f"{key!r} is no axis, no axis.option, and in none of {', '.join(_SECTIONS)}")


def _spec(flag: str, text: str) -> PolicySpec:
    try:
        return parse_spec(text)
    except PolicyError as error:
        raise ConfigError(flag, str(error)) from error
