"""The standing of the six policies as plain values: faults, quarantines, memories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ActivePolicyState:
    """One axis, as `active_policy.ActivePolicy` has it.

    recent: a bit for each of the last answers. chosen_memory, default_memory: of stateful policies, else
    None.
    """

    num_faults: int
    num_offences: int
    recent: int = 0
    quarantine_reason: str = ""
    chosen_memory: object = None
    default_memory: object = None


@dataclass(frozen=True, slots=True)
class PolicyHostState:
    """axes, faults: by axis. stale: axes where another policy came into force since the last step."""

    axes: Mapping[str, ActivePolicyState]
    faults: Mapping[str, int]
    stale: tuple[str, ...]
