"""Asks the policies, checks the answers, and falls back to an axis's default where one is no good.

The core survives any answer: an exception, a wrong type, an unknown id, an impossible choice. Each is
counted as a fault of its axis, and the last one is kept in words for the operator. Feasibility that only
the scheduler knows (is there host room?) is the scheduler's to check; it reports through `fault`.

A policy that offends too often is quarantined: its default decides from then on. Policies may be replaced
between any two steps. Either way the orders that were derived from the old answers are void, of which
`take_stale_axes` tells the scheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from pageturner.policies import registry
from pageturner.policies.events import PolicyEvent
from pageturner.policies.interfaces import (
    AXES,
    Admission,
    BatchSplit,
    KeyChange,
    PolicySet,
    Reclaim,
    SortKey,
)
from pageturner.policies.views import (
    AdmissionView,
    BatchView,
    BlockView,
    LoadView,
    Rates,
    RequestView,
    VictimView,
)
from pageturner.service.policy_host import answers
from pageturner.service.policy_host.active_policy import ActivePolicy
from pageturner.service.policy_host.caller import BadAnswer, PolicyCaller
from pageturner.service.policy_host.shadow import Shadow, ShadowReport
from pageturner.service.policy_host.snapshot import PolicyHostState


@dataclass(frozen=True, slots=True)
class AxisReport:
    """chosen: the policy that was asked for; while it is quarantined the default decides instead.

    num_faults: its bad answers since it was put in. last_fault: the last of them in words.
    """

    axis: str
    chosen: object
    is_quarantined: bool
    num_faults: int
    last_fault: str
    shadow: ShadowReport | None


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """All axes at one moment. revision: raised whenever a policy or a shadow comes or goes."""

    revision: int
    axes: tuple[AxisReport, ...]


class PolicyHost:
    """policies: in force at first. defaults: answer in their place when they fail; trusted.

    shadows: by axis, policies that are asked and not obeyed. max_faults: bad answers of one policy before
    it is quarantined. faults: by axis, bad answers since the start, of whichever policy. names: of the
    policies in force by axis; another object whenever another policy comes into force.
    """

    def __init__(
        self,
        policies: PolicySet,
        defaults: PolicySet,
        *,
        shadows: Mapping[str, object] = MappingProxyType({}),
        max_faults: int = 100,
    ) -> None:
        self.faults: Counter[str] = Counter()
        self.revision = 1
        self.names: Mapping[str, str] = {}
        self._max_faults = max_faults
        self._ranked_at = 0.0
        self._stale: set[str] = set()
        self._quarantined: list[str] = []
        self._active: dict[str, ActivePolicy] = {}
        self._shadows: dict[str, Shadow] = {}
        self._in_force: list[PolicyCaller] = []
        self._listeners: tuple[PolicyCaller, ...] = ()
        for axis in AXES:
            default = PolicyCaller(axis, getattr(defaults, axis), partial(self.fault, axis))
            self._active[axis] = self._activate(axis, getattr(policies, axis), default)
        for axis, policy in shadows.items():
            self._shadows[axis] = Shadow(axis, policy)
        self._refresh()

    # --- who decides -----------------------------------------------------------------------

    def set_policies(
        self, policies: PolicySet, shadows: Mapping[str, object], history: Sequence[PolicyEvent]
    ) -> None:
        """Put other policies in force, and other shadows beside them.

        Whoever is the very object that sits there already is left alone. Anybody else begins afresh: no
        fault counted, no quarantine, a memory by the rule of `policies.interfaces.Stateful`.
        history: the live requests, told to memories that begin anew.
        """
        active, watchers = dict(self._active), dict(self._shadows)
        for axis in AXES:
            old, chosen = self._active[axis], getattr(policies, axis)
            if chosen is not old.chosen.policy:
                active[axis] = self._activate(axis, chosen, old.default)
                active[axis].chosen.inherit(old.in_force, history)  # in quarantine nobody told it anything
                self._stale.add(axis)
                if axis in watchers:
                    watchers[axis].forget_ranks()
            watched, shadow = watchers.get(axis), shadows.get(axis)
            if shadow is None:
                watchers.pop(axis, None)
            elif watched is None or shadow is not watched.caller.policy:
                watchers[axis] = Shadow(axis, shadow)
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

    def take_stale_axes(self) -> frozenset[str]:
        """The axes where another policy came into force since this was last asked."""
        stale, self._stale = frozenset(self._stale), set()
        return stale

    def take_quarantined(self) -> tuple[AxisReport, ...]:
        """Those that were quarantined since this was last asked."""
        axes, self._quarantined = self._quarantined, []
        return tuple(self._report(axis) for axis in axes)

    def report(self) -> PolicyReport:
        return PolicyReport(self.revision, tuple(map(self._report, AXES)))

    @property
    def policies(self) -> PolicySet:
        """Those that were chosen, quarantined ones included."""
        return PolicySet(**{axis: active.chosen.policy for axis, active in self._active.items()})

    @property
    def shadows(self) -> Mapping[str, object]:
        return {axis: shadow.caller.policy for axis, shadow in self._shadows.items()}

    @property
    def last_fault(self) -> Mapping[str, str]:
        """By axis, the last bad answer in words; axes that never gave one are absent."""
        return {axis: active.last_fault for axis, active in self._active.items() if active.last_fault}

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

    # --- the six questions -----------------------------------------------------------------

    @property
    def key_change(self) -> KeyChange:
        return _key_change(self._active["queue"].in_force.policy)

    def queue_key(self, request: RequestView, load: LoadView) -> SortKey:
        key = self._active["queue"].ask(answers.sort_key, request, load)
        if "queue" in self._shadows:
            shadow = self._shadows["queue"]
            if load.now != self._ranked_at and KeyChange.WITH_TIME in (
                self.key_change,
                _key_change(shadow.caller.policy),
            ):
                shadow.forget_ranks()
            self._ranked_at = load.now
            rank = answers.comparable(key)
            shadow.compare_rank(request.request_id, rank, _comparable_key, (request, load))
        return key

    def admission(self, candidate: AdmissionView, load: LoadView) -> Admission:
        answer = self._active["admission"].ask(answers.admission, candidate, load)
        if "admission" in self._shadows:
            subject = candidate.request.request_id
            self._shadows["admission"].compare(subject, answer, answers.admission, (candidate, load))
        return answer

    def batch_split(self, batch: BatchView) -> BatchSplit:
        """A split that lets something advance if there is work and budget."""

        def parse(answer: Any) -> BatchSplit:
            return answers.batch_split(answer, batch)

        split = self._active["batch"].ask(parse, batch)
        if "batch" in self._shadows:
            self._shadows["batch"].compare("a step", split, parse, (batch,))
        return split

    def victim_order(
        self, candidates: Sequence[VictimView], claimant: RequestView, load: LoadView
    ) -> list[str]:
        """Every candidate exactly once. Strangers and doubles are dropped, those forgotten come last."""
        known = {view.request.request_id for view in candidates}
        understood: list[list[str]] = []

        def parse(answer: Any) -> list[str]:
            ranked = list(answer)
            order = [rid for rid in dict.fromkeys(ranked) if rid in known]
            understood.append(order)
            if len(order) == len(known) == len(ranked):
                return order
            raise BadAnswer(ranked)

        whole = self._active["victim"].ask(parse, candidates, claimant, load)
        head = set(understood[0])
        order = understood[0] + [rid for rid in whole if rid not in head]
        if "victim" in self._shadows and order:
            self._shadows["victim"].compare(
                claimant.request_id, order[0], lambda answer: parse(answer)[0], (candidates, claimant, load)
            )
        return order

    def reclaim(self, victim: VictimView, num_blocks_short: int, rates: Rates, load: LoadView) -> Reclaim:
        arguments = (victim, num_blocks_short, rates, load)
        answer = self._active["reclaim"].ask(answers.reclaim, *arguments)
        if "reclaim" in self._shadows:
            subject = victim.request.request_id
            self._shadows["reclaim"].compare(subject, answer, answers.reclaim, arguments)
        return answer

    def default_reclaim(
        self, victim: VictimView, num_blocks_short: int, rates: Rates, load: LoadView
    ) -> Reclaim:
        return answers.reclaim(self._active["reclaim"].default.ask(victim, num_blocks_short, rates, load))

    def eviction_score(self, block: BlockView) -> float:
        score = self._active["eviction"].ask(answers.score, block)
        if "eviction" in self._shadows:
            subject = f"block {block.block_id}"
            self._shadows["eviction"].compare_rank(subject, score, answers.score, (block,))
        return score

    # --- inside ----------------------------------------------------------------------------

    def _activate(self, axis: str, chosen: object, default: PolicyCaller) -> ActivePolicy:
        return ActivePolicy(
            axis,
            chosen,
            default,
            max_faults=self._max_faults,
            on_fault=self._count_fault,
            on_quarantine=self._quarantine,
        )

    def _count_fault(self, axis: str) -> None:
        self.faults[axis] += 1

    def _quarantine(self, axis: str) -> None:
        self._quarantined.append(axis)
        self._stale.add(axis)
        self.revision += 1
        if axis in self._shadows:
            self._shadows[axis].forget_ranks()
        self._refresh()

    def _refresh(self) -> None:
        """Derive what follows from who sits where."""
        in_force = [active.in_force for active in self._active.values()]
        if in_force != self._in_force:
            self._in_force = in_force
            self.names = MappingProxyType(
                {axis: registry.name_of(active.in_force.policy) for axis, active in self._active.items()}
            )
        callers = [active.chosen for active in self._active.values() if not active.is_quarantined]
        callers += [active.default for active in self._active.values()]
        callers += [shadow.caller for shadow in self._shadows.values()]
        self._listeners = tuple(caller for caller in callers if caller.has_memory)

    def _report(self, axis: str) -> AxisReport:
        active, shadow = self._active[axis], self._shadows.get(axis)
        return AxisReport(
            axis,
            active.chosen.policy,
            active.is_quarantined,
            active.num_faults,
            active.last_fault,
            None if shadow is None else shadow.report(),
        )


def _key_change(policy: object) -> KeyChange:
    change = getattr(policy, "key_change", None)
    return change if isinstance(change, KeyChange) else KeyChange.WITH_TIME


def _comparable_key(answer: Any) -> tuple[tuple[int, float | str], ...]:
    return answers.comparable(answers.sort_key(answer))
