"""What a flight record says of policies: which were chosen, which erred and which took another's place."""

from __future__ import annotations

from pageturner.policies import registry
from pageturner.policies.interfaces import AXES, PolicySet
from pageturner.policies.spec import PolicySpec
from pageturner.service.core.decisions import Decision, PolicyFault, PolicyReplaced
from pageturner.service.flight.plain import Malformed, to_plain
from pageturner.service.flight.records import PolicySpecs
from pageturner.service.policy_host.host import PolicyHost


def policy_specs(policies: PolicySet, axes: tuple[str, ...] = AXES) -> PolicySpecs:
    """The names and options of these axes' policies; an option with no plain form as its repr."""
    chosen = {axis: getattr(policies, axis) for axis in axes}
    return {
        axis: PolicySpec(
            registry.name_of(policy),
            {name: _plain_or_repr(value) for name, value in registry.options_of(policy).items()},
        )
        for axis, policy in chosen.items()
    }


def _plain_or_repr(value: object) -> object:
    try:
        return to_plain(value)
    except Malformed:
        return repr(value)


class PolicyStanding:
    """The policies in force and the faults of each axis, at the moment this is made."""

    __slots__ = ("_faults", "_names", "_policy_host")

    def __init__(self, host: PolicyHost) -> None:
        self._policy_host = host
        self._names = host.names
        self._faults = dict(host.faults)

    def changes(self) -> tuple[Decision, ...]:
        """Faults of policies since then, and those that another one replaced."""
        host, names, faults = self._policy_host, self._names, self._faults
        if host.names is names and host.faults == faults:
            return ()
        counts = ((axis, host.faults[axis] - faults.get(axis, 0)) for axis in AXES)
        return (
            *(PolicyFault(axis, names[axis], count) for axis, count in counts if count),
            *(
                PolicyReplaced(axis, names[axis], host.names[axis])
                for axis in AXES
                if names[axis] != host.names[axis]
            ),
        )
