"""Policies by name become objects, and the core's report of them becomes names again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pageturner.policies import presets, registry
from pageturner.policies.errors import PolicyError, PolicyOptionError
from pageturner.policies.interfaces import AXES
from pageturner.policies.spec import PolicySpec
from pageturner.service.engine.api import PolicyChange
from pageturner.service.errors import InvalidArgument
from pageturner.service.policy_host.reports import PoliciesInfo, PolicyInfo


def create_policies(change: PolicyChange) -> tuple[Mapping[str, object], Mapping[str, object | None]]:
    """The policies and the shadows that the change names, by axis; may import what others wrote.

    Call it in a worker thread: an import may take its time, and whatever it raises is caught.

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
    except BaseException as error:  # no signal reaches this thread: the policy's module or class raised it
        raise InvalidArgument(f"{path}.name", f"raised {type(error).__name__}") from error


def summarise(info: PoliciesInfo) -> dict[str, str]:
    """One line an axis, for the log: `reclaim` -> `cost-model(bias=2.0)`, a shadow behind it."""
    return {policy.axis: _summary(policy) for policy in info.axes}


def _summary(policy: PolicyInfo) -> str:
    text = str(policy.spec) + (" (quarantined)" if policy.is_quarantined else "")
    shadow = policy.shadow
    return text if shadow is None else f"{text}, shadow {PolicySpec(shadow.name, shadow.options)}"
