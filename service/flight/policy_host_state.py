"""The standing of the six policies as plain values: faults, quarantines, memories. See `checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pageturner.service.flight.plain import Malformed, from_plain, to_plain
from pageturner.service.policy_host.caller import PolicyCaller
from pageturner.service.policy_host.host import PolicyHost


@dataclass(frozen=True, slots=True)
class ActivePolicyState:
    """One axis. chosen_memory, default_memory: of stateful policies, else None."""

    num_faults: int
    num_offences: int
    is_quarantined: bool
    chosen_memory: object = None
    default_memory: object = None


@dataclass(frozen=True, slots=True)
class PolicyHostState:
    """axes, faults: by axis. stale: axes where another policy came into force since the last step."""

    axes: Mapping[str, ActivePolicyState]
    faults: Mapping[str, int]
    stale: tuple[str, ...]


def take_policy_host(host: PolicyHost) -> PolicyHostState:
    """Raises Malformed where a third party's memory is not made of plain values."""
    axes = {
        axis: ActivePolicyState(
            active.num_faults,
            active._num_offences,
            active.is_quarantined,
            _memory(active.chosen),
            _memory(active.default),
        )
        for axis, active in host._active.items()
    }
    return PolicyHostState(axes, dict(host.faults), tuple(sorted(host._stale)))


def restore_policy_host(host: PolicyHost, recorded: PolicyHostState) -> None:
    """host: just made, of the same policies."""
    for axis, part in recorded.axes.items():
        active = host._active[axis]
        active.num_faults = part.num_faults
        active._num_offences = part.num_offences
        active.is_quarantined = part.is_quarantined
        _remember(active.chosen, part.chosen_memory)
        _remember(active.default, part.default_memory)
    host.faults.clear()
    host.faults.update(recorded.faults)
    host._stale = set(recorded.stale)
    host._refresh()


def _memory(caller: PolicyCaller) -> object:
    if not caller.has_memory:
        return None
    plain = to_plain(caller.state)
    if from_plain(type(caller.state), plain) != caller.state:
        raise Malformed(f"the state of {caller.policy!r} is not made of plain values")
    return plain


def _remember(caller: PolicyCaller, memory: object) -> None:
    if caller.has_memory:
        caller.state = from_plain(type(caller.state), memory)
