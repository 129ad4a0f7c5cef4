"""Policy sets and sweeps as the command line writes them.

victim=last-arrived;reclaim=always-swap        the other axes keep their defaults
queue=priority:aging_seconds=5                 options after a colon, as in `policies set`
queue={name="priority",aging_seconds=5}        or as an inline table, as in the configuration
preset=vllm-v1;victim=least-computed           a preset, and what differs from it
--sweep reclaim=always-swap,always-recompute   each set once with each value
--sweep cache.num_blocks=512,1024              a bound of the machine
--sweep queue.aging_seconds=1,10               an option of the policy that the set has
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pageturner.policies import registry
from pageturner.policies.errors import PolicyError
from pageturner.policies.interfaces import AXES
from pageturner.policies.presets import find_preset
from pageturner.service.errors import ConfigError
from pageturner.service.simulator.experiment import Contender
from pageturner.service.simulator.machine import SimulatedMachine

_SECTIONS = ("cache", "scheduler", "step_time")


@dataclass(frozen=True, slots=True)
class Setup:
    """What is written down of a contender. choices: axis -> (name, options). bounds: dotted key -> value."""

    name: str
    choices: Mapping[str, tuple[str, Mapping[str, object]]] = field(default_factory=dict)
    bounds: Mapping[str, Any] = field(default_factory=dict)

    def on(self, machine: SimulatedMachine) -> Contender:
        """Raises ConfigError for a policy or a bound that does not exist."""
        try:
            policies = registry.create_set(self.choices)
        except PolicyError as error:
            raise ConfigError("--policies", str(error)) from error
        for key, value in self.bounds.items():
            section, _, name = key.partition(".")
            options = getattr(machine, section)
            kind = next(
                (type(getattr(options, f.name)) for f in dataclasses.fields(options) if f.name == name), None
            )
            if kind is None:
                raise ConfigError("--sweep", f"{section} has no {name!r}")
            try:
                machine = replace(machine, **{section: replace(options, **{name: kind(value)})})
            except ValueError as error:
                raise ConfigError("--sweep", f"{key}: {error}") from error
        return Contender(self.name, policies, machine)


def parse_policies(text: str) -> Setup:
    """Raises ConfigError."""
    choices: dict[str, tuple[str, Mapping[str, object]]] = {}
    bounds: dict[str, object] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        axis, _, value = part.partition("=")
        axis, value = axis.strip(), value.strip()
        if axis == "preset":
            preset_choices, preset_bounds = _preset(value)
            choices, bounds = {**preset_choices, **choices}, {**preset_bounds, **bounds}
        elif axis in AXES:
            choices[axis] = _choice(value)
        else:
            raise ConfigError("--policies", f"no policy axis {axis!r}; there are preset, {', '.join(AXES)}")
    return Setup(text.strip("; ") or "defaults", choices, bounds)


def _preset(name: str) -> tuple[dict[str, tuple[str, Mapping[str, object]]], dict[str, object]]:
    """A preset's policies by axis, and the bounds of the scheduler that belong to its rule."""
    try:
        preset = find_preset(name)
    except PolicyError as error:
        raise ConfigError("--policies", str(error)) from error
    policies = {axis: getattr(preset.policies, axis) for axis in AXES}
    choices: dict[str, tuple[str, Mapping[str, object]]] = {
        axis: (registry.name_of(policy), registry.options_of(policy)) for axis, policy in policies.items()
    }
    return choices, {f"scheduler.{option}": value for option, value in preset.core_options.items()}


def sweep(setups: Sequence[Setup], text: str) -> tuple[Setup, ...]:
    """Each setup once with each value of `text`. Raises ConfigError."""
    key, found, values = text.partition("=")
    if not found:
        raise ConfigError("--sweep", f"{text!r} is not KEY=VALUE,VALUE")
    # A comma inside braces belongs to an inline table.
    return tuple(
        _with(setup, key.strip(), value.strip())
        for setup in setups
        for value in re.split(r",(?![^{]*\})", values)
    )


def _with(setup: Setup, key: str, value: str) -> Setup:
    name = f"{key}={value}" if setup.name == "defaults" else f"{setup.name};{key}={value}"
    section, _, option = key.partition(".")
    if key in AXES:
        return Setup(name, {**setup.choices, key: _choice(value)}, setup.bounds)
    if section in AXES and option:
        policy, options = setup.choices.get(section, (registry.DEFAULTS[section], {}))
        changed = {**options, option: _toml(value)}
        return Setup(name, {**setup.choices, section: (policy, changed)}, setup.bounds)
    if section in _SECTIONS and option:
        return Setup(name, setup.choices, {**setup.bounds, key: _toml(value)})
    raise ConfigError("--sweep", f"{key!r} is no axis, no axis.option, and in none of {', '.join(_SECTIONS)}")


def _choice(text: str) -> tuple[str, Mapping[str, object]]:
    if not text.startswith("{"):
        name, _, options = text.rpartition(":")
        if "=" not in options:
            return text, {}
        pairs = (pair.partition("=") for pair in options.split(","))
        return name, {option.strip(): _toml(value.strip()) for option, _, value in pairs}
    table = _toml(text)
    if not isinstance(table, dict) or not isinstance(table.get("name"), str):
        raise ConfigError("--policies", f"{text} has no name")
    return table["name"], {option: value for option, value in table.items() if option != "name"}


def _toml(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
