"""Which policy decides on each axis: the one that was chosen, or its default once it is quarantined.

A policy that offends too often (`FaultLimits`) or takes too long (`end_step`) is quarantined: its default
decides from then on. Policies may be replaced between any two steps. Either way the orders that were derived
from the old answers are void, of which `take_stale_axes` tells the scheduler.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType

from pageturner.policies import registry
from pageturner.policies.events import PolicyEvent
from pageturner.policies.interfaces import (
    AXES,
    PolicySet,
)
from pageturner.service.policy_host.active_policy import ActivePolicy, FaultLimits
from pageturner.service.policy_host.calls import NUM_AVERAGED_STEPS, CallWatch, PolicyCaller, PolicyCallFailed
from pageturner.service.policy_host.reports import (
    Asking,
    FaultNote,
    OverBudget,
    PoliciesInfo,
    PolicyInfo,
)
from pageturner.service.policy_host.shadow import Shadow
from pageturner.service.policy_host.snapshot import PolicyHostState

_MAX_NOTES = 64
"""Fault notes that are kept until they are taken; older ones are dropped."""


class PolicyRoster:
    """The six policies in force, their defaults and their shadows; bound to the thread of its scheduler.

    policies: in force at first. defaults: answer in their place when they fail; trusted.
    shadows: by axis, policies that are asked and not obeyed. limits: when faults end in quarantine.
    watch: times the calls. budget_seconds: what one policy may take a step on average; 0 for any time.
    faults: by axis, bad answers since the start, of whichever policy. names: of the policies in force by
    axis; another object whenever another policy comes into force.
    """

    def __init__(
        self,
        policies: PolicySet,
        defaults: PolicySet,
        *,
        shadows: Mapping[str, object] = MappingProxyType({}),
        limits: FaultLimits | None = None,
        watch: CallWatch | None = None,
        budget_seconds: float = 0.0,
    ) -> None:
        self.faults: Counter[str] = Counter()
        self.revision = 1
        self.names: Mapping[str, str] = {}
        self._limits = limits or FaultLimits()
        self._watch = watch or CallWatch()
        self._budget_seconds = budget_seconds or float("inf")
        self._stale: set[str] = set()
        self._quarantined: list[str] = []
        self._notes: deque[FaultNote] = deque(maxlen=_MAX_NOTES)
        self._active: dict[str, ActivePolicy] = {}
        self._shadows: dict[str, Shadow] = {}
        self._in_force: list[PolicyCaller] = []
        self._listeners: tuple[PolicyCaller, ...] = ()
        for axis in AXES:
            report = partial(self._default_failed, axis)
            default = PolicyCaller(axis, getattr(defaults, axis), self._watch, report)
            self._active[axis] = self._activate(axis, getattr(policies, axis), default)
            default.start_memory()
        for axis, policy in shadows.items():
            self._shadows[axis] = self._shadow(axis, policy)
        self._refresh()

    # --- who decides -----------------------------------------------------------------------

    def set_policies(
        self, policies: PolicySet, shadows: Mapping[str, object], history: Sequence[PolicyEvent]
    ) -> None:
        """Put other policies in force, and other shadows beside them.

        A policy that is the very object in force is left alone. Any other begins afresh: no fault counted,
        no quarantine, a memory by the rule of `policies.interfaces.Stateful`.
        history: the live requests, told to memories that begin anew.
        """
        active, watchers = dict(self._active), dict(self._shadows)
        for axis in AXES:
            old, chosen = self._active[axis], getattr(policies, axis)
            if chosen is not old.chosen.policy:
                active[axis] = self._activate(axis, chosen, old.default)
                active[axis].chosen.inherit(old.in_force, history)  # in quarantine it got no events
                self._stale.add(axis)
                if axis in watchers:
                    watchers[axis].forget_ranks()
            watched, shadow = watchers.get(axis), shadows.get(axis)
            if shadow is None:
                watchers.pop(axis, None)
            elif watched is None or shadow is not watched.caller.policy:
                watchers[axis] = self._shadow(axis, shadow)
                watchers[axis].caller.inherit(old.default if watched is None else watched.caller, history)
        if watchers != self._shadows or active != self._active:
            self._active, self._shadows = active, watchers
            self.revision += 1
            self._refresh()

    def snapshot(self) -> PolicyHostState:
        """The standing of the policies at this moment."""
        axes = {axis: active.snapshot() for axis, active in self._active.items()}
        return PolicyHostState(axes, dict(self.faults), tuple(sorted(self._stale)))

    def restore(self, state: PolicyHostState) -> None:
        """Bring a host just made, of the same policies, to this standing."""
        for axis, part in state.axes.items():
            self._active[axis].restore(part)
        self.faults.clear()
        self.faults.update(state.faults)
        self._stale = set(state.stale)
        self._refresh()

    def quarantine(self, axis: str, reason: str) -> None:
        """The default of the axis decides from now on; nothing happens if it does already."""
        self._active[axis].quarantine(reason)

    def end_step(self) -> tuple[OverBudget, ...]:
        """A step has ended: the policies that took longer than they may, for `quarantine`.

        Over budget are those whose last NUM_AVERAGED_STEPS took more than so many budgets together, one step
        counting for at most 16. A shadow that does is asked no more; it decides nothing, so no more is due.
        """
        for shadow in self._shadows.values():
            if shadow.caller.times.end_step(self._budget_seconds) and not shadow.is_stopped:
                shadow.stop(self._over(shadow.caller))
                self._refresh()
        late = [
            active
            for active in self._active.values()
            if active.chosen.times.end_step(self._budget_seconds) and not active.is_quarantined
        ]
        return tuple(OverBudget(active.axis, self._over(active.chosen)) for active in late)

    def take_stale_axes(self) -> frozenset[str]:
        """The axes where another policy came into force since this was last asked."""
        stale, self._stale = frozenset(self._stale), set()
        return stale

    # --- what is told of it ----------------------------------------------------------------

    def take_quarantined(self) -> tuple[PolicyInfo, ...]:
        """Those that were quarantined since this was last asked."""
        axes, self._quarantined = self._quarantined, []
        return tuple(self._report(axis) for axis in axes)

    def take_faults(self) -> tuple[FaultNote, ...]:
        """The faults to be logged since this was last asked: of each policy its 1st, 2nd, 4th, 8th, ..."""
        notes = tuple(self._notes)
        self._notes.clear()
        return notes

    def report(self) -> PoliciesInfo:
        """Every axis at this moment."""
        return PoliciesInfo(self.revision, tuple(map(self._report, AXES)))

    def asking(self) -> Asking | None:
        """The call of a policy that is under way. From any thread."""
        return self._watch.asking()

    @property
    def policies(self) -> PolicySet:
        """Those that were chosen, quarantined ones included."""
        return PolicySet(**{axis: active.chosen.policy for axis, active in self._active.items()})

    @property
    def shadows(self) -> Mapping[str, object]:
        return {axis: shadow.caller.policy for axis, shadow in self._shadows.items()}

    @property
    def states(self) -> Mapping[str, object]:
        """By axis, the memory of the policy in force; axes without one are absent."""
        callers = {axis: active.in_force for axis, active in self._active.items()}
        return {axis: caller.state for axis, caller in callers.items() if caller.has_memory}

    @property
    def shadow_states(self) -> Mapping[str, object]:
        """By axis, the memory of the shadow; axes without one are absent."""
        callers = {axis: shadow.caller for axis, shadow in self._shadows.items()}
        return {axis: caller.state for axis, caller in callers.items() if caller.has_memory}

    def fault(self, axis: str, what: str) -> None:
        """Count an answer that only the moment made impossible."""
        self._active[axis].note_fault(what)

    # --- memories --------------------------------------------------------------------------

    @property
    def listens(self) -> bool:
        """Whether any policy remembers events."""
        return bool(self._listeners)

    def fold(self, event: PolicyEvent) -> None:
        """Tell every memory."""
        for caller in self._listeners:
            caller.fold(event)

    # --- inside ----------------------------------------------------------------------------

    def _activate(self, axis: str, chosen: object, default: PolicyCaller) -> ActivePolicy:
        return ActivePolicy(
            axis,
            chosen,
            default,
            self._watch,
            self._limits,
            on_fault=self._count_fault,
            on_quarantine=self._on_quarantine,
        )

    def _shadow(self, axis: str, policy: object) -> Shadow:
        return Shadow(axis, policy, self._watch, self._notes.append)

    def _count_fault(self, axis: str, note: FaultNote | None) -> None:
        self.faults[axis] += 1
        if note is not None:
            self._notes.append(note)

    def _default_failed(self, axis: str, fault: PolicyCallFailed) -> None:
        self.fault(axis, fault.what)

    def _on_quarantine(self, axis: str) -> None:
        self._quarantined.append(axis)
        self._stale.add(axis)
        self.revision += 1
        if axis in self._shadows:
            self._shadows[axis].forget_ranks()
        self._refresh()

    def _over(self, caller: PolicyCaller) -> str:
        took, may = 1000 * caller.times.step_seconds, 1000 * self._budget_seconds
        return f"took {took:.3g} ms a step over the last {NUM_AVERAGED_STEPS} steps; {may:.3g} ms are allowed"

    def _refresh(self) -> None:
        """Derive what follows from which policies are in force."""
        in_force = [active.in_force for active in self._active.values()]
        if in_force != self._in_force:
            self._in_force = in_force
            self.names = MappingProxyType(
                {axis: active.in_force.spec.name for axis, active in self._active.items()}
            )
        callers = [active.chosen for active in self._active.values() if not active.is_quarantined]
        callers += [active.default for active in self._active.values()]
        callers += [shadow.caller for shadow in self._shadows.values() if not shadow.is_stopped]
        self._listeners = tuple(caller for caller in callers if caller.has_memory)

    def _report(self, axis: str) -> PolicyInfo:
        active, shadow = self._active[axis], self._shadows.get(axis)
        spec, times = active.chosen.spec, active.chosen.times
        return PolicyInfo(
            axis,
            spec.name,
            spec.options,
            _available(axis),
            active.is_quarantined,
            active.num_faults,
            active.last_fault,
            None if shadow is None else shadow.report(),
            active.quarantine_reason,
            times.num_calls,
            times.seconds,
            times.step_seconds,
        )


@cache
def _available(axis: str) -> tuple[str, ...]:
    """What is installed does not change while the process runs, and looking costs milliseconds."""
    return registry.names(axis)
