"""Policies by name become objects, and the core's report of them becomes names again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from pageturner.policies import presets, registry
from pageturner.policies.errors import PolicyError, PolicyOptionError
from pageturner.policies.interfaces import AXES
from pageturner.policies.spec import PolicySpec
from pageturner.service.engine.api import PoliciesInfo, PolicyChange, PolicyInfo, ShadowInfo
from pageturner.service.errors import InvalidArgument
from pageturner.service.policy_host.host import AxisReport, PolicyReport


def create_policies(change: PolicyChange) -> tuple[Mapping[str, object], Mapping[str, object | None]]:
    """The policies and the shadows that the change names, by axis; may import what others wrote.

    Raises InvalidArgument with the path of the culprit, such as `policies[reclaim].options[bias]`.
    """
    if not (change.policies or change.shadows or change.preset):
        raise InvalidArgument("policies", "neither an axis, a shadow nor a preset is named")
    policies = _preset(change.preset) if change.preset else {}
    policies |= {axis: _create("policies", axis, spec) for axis, spec in change.policies.items()}
    shadows = {axis: _create("shadows", axis, spec) for axis, spec in change.shadows.items()}
    return policies, shadows


def _preset(name: str) -> dict[str, object]:
    """Copies, since the core leaves alone what is the very object in force."""
    try:
        chosen = presets.find_preset(name).policies
    except PolicyError as error:
        raise InvalidArgument("preset", str(error)) from error
    return {axis: replace(getattr(chosen, axis)) for axis in AXES}


def _create(field: str, axis: str, spec: PolicySpec | None) -> Any:
    path = f"{field}[{axis}]"
    if axis not in AXES:
        raise InvalidArgument(path, f"no such axis; there are {', '.join(AXES)}")
    if spec is None:
        return None
    try:
        return registry.create(axis, spec.name, spec.options)
    except PolicyOptionError as error:
        raise InvalidArgument(f"{path}.options[{error.option}]", str(error)) from error
    except PolicyError as error:
        raise InvalidArgument(f"{path}.name", str(error)) from error


def describe(report: PolicyReport) -> PoliciesInfo:
    return PoliciesInfo(report.revision, tuple(map(_describe_axis, report.axes)))


def summarise(report: PolicyReport) -> dict[str, str]:
    """One line an axis, for the log: `reclaim` -> `cost-model(bias=2.0)`, a shadow behind it."""
    return {axis.axis: _summary(axis) for axis in report.axes}


def _describe_axis(axis: AxisReport) -> PolicyInfo:
    shadow = axis.shadow
    return PolicyInfo(
        axis.axis,
        registry.name_of(axis.chosen),
        registry.options_of(axis.chosen),
        _available(axis.axis),
        axis.is_quarantined,
        axis.num_faults,
        axis.last_fault,
        None
        if shadow is None
        else ShadowInfo(
            registry.name_of(shadow.policy),
            registry.options_of(shadow.policy),
            shadow.num_asked,
            shadow.num_disagreements,
            shadow.samples,
            shadow.num_faults,
            shadow.last_fault,
        ),
    )


@cache
def _available(axis: str) -> tuple[str, ...]:
    """What is installed does not change while the process runs, and looking costs milliseconds."""
    return registry.names(axis)


def _summary(axis: AxisReport) -> str:
    text = _text(axis.chosen) + (" (quarantined)" if axis.is_quarantined else "")
    return text if axis.shadow is None else f"{text}, shadow {_text(axis.shadow.policy)}"


def _text(policy: object) -> str:
    options = ", ".join(f"{name}={value!r}" for name, value in registry.options_of(policy).items())
    return f"{registry.name_of(policy)}({options})"
