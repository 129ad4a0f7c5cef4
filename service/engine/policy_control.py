"""The policies of a running engine: changed, quarantined and reported, all of it between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol

from structlog.typing import FilteringBoundLogger

from pageturner.policies.interfaces import PolicySet
from pageturner.service.core.clock import Clock
from pageturner.service.engine.thread_messages import (
    ChangePolicies,
    PoliciesAnswer,
    PoliciesChanged,
    PolicyChangeRefused,
)
from pageturner.service.errors import StaleRevision
from pageturner.service.policy_host.host import PolicyHost
from pageturner.service.policy_host.reports import Asking


class HostsPolicies(Protocol):
    """Of a scheduler what policies concern."""

    def set_policies(
        self, policies: PolicySet, now: float, *, shadows: Mapping[str, object] = ...
    ) -> None: ...
    def quarantine(self, axis: str, reason: str, now: float) -> None: ...
    @property
    def policy_host(self) -> PolicyHost: ...


class PolicyControl:
    """Bound to the engine's thread, but for `asking` and `info`.

    info: of the policies in force, frozen; read anew at each change and by `refresh`.
    """

    def __init__(self, scheduler: HostsPolicies, clock: Clock, logger: FilteringBoundLogger) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._logger = logger
        self.info = scheduler.policy_host.report()

    @property
    def asking(self) -> Asking | None:
        """The call of a policy that is under way. From any thread."""
        return self._scheduler.policy_host.asking()

    def refresh(self) -> None:
        """Read the counts of calls and faults anew."""
        self.info = self._scheduler.policy_host.report()

    def change(self, command: ChangePolicies) -> PoliciesAnswer:
        """Put others in force, all or none."""
        host = self._scheduler.policy_host
        old = host.report()
        expected = command.expected_revision
        if expected is not None and expected != old.revision:
            return PolicyChangeRefused(command.change_id, StaleRevision(expected, old.revision))
        chosen: Any = command.policies
        shadows = {**host.shadows, **command.shadows}
        watched = {axis: shadow for axis, shadow in shadows.items() if shadow is not None}
        self._scheduler.set_policies(replace(host.policies, **chosen), self._clock.now(), shadows=watched)
        self.info = host.report()
        return PoliciesChanged(command.change_id, old, self.info)

    def end_step(self) -> None:
        """Quarantine the policies that take too long, as a change of its own, so that a replay repeats it."""
        for late in self._scheduler.policy_host.end_step():
            self._scheduler.quarantine(late.axis, late.reason, self._clock.now())

    def log(self) -> None:
        """Log the faults that are due, and who was quarantined."""
        host = self._scheduler.policy_host
        for fault in host.take_faults():
            self._logger.warning("policy_fault", **asdict(fault))
        for policy in host.take_quarantined():
            self._logger.error(
                "policy_quarantined",
                axis=policy.axis,
                policy=policy.name,
                reason=policy.quarantine_reason,
                num_faults=policy.num_faults,
                last_fault=policy.last_fault,
            )
            self.refresh()
