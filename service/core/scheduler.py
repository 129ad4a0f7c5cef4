"""The scheduler: accepts requests, plans steps, takes their results, and ends every request exactly once.

    schedule   decide one step on a scratch ledger (planner), then carry it out (committer)
    update     take a step's tokens: cache its blocks, stop what is done, emit events
    fail_step  take a step's failure: nothing of it counts, the culprit is searched by halves

There is no prefill phase and no decode phase: every sequence has `num_computed_tokens` and catches up
with its tokens. `schedule` may run one step ahead of `update` (depth 1).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Concatenate, ParamSpec, TypeAlias, TypeVar

from pageturner.policies import registry
from pageturner.policies.interfaces import PolicySet
from pageturner.policies.views import Rates
from pageturner.service.core.inspection import SchedulerInspection
from pageturner.service.core.listener import (
    AbortRequest,
    AddRequest,
    Answer,
    Call,
    CallOutcome,
    EndTransfers,
    Expire,
    FailStep,
    PauseRequest,
    Quarantine,
    ResumeRequest,
    Schedule,
    SchedulerListener,
    SetPolicies,
    Update,
)
from pageturner.service.core.memory.build import build_manager
from pageturner.service.core.memory.prefix_cache import PrefixHasher
from pageturner.service.core.memory.transfers import BlockDisk, Transfer, TransferEnd
from pageturner.service.core.options import NO_SPECULATION, CacheOptions, SchedulerOptions, SpeculationOptions
from pageturner.service.core.outputs import (
    Acceptance,
    Event,
    SampledSequence,
    SchedulerOutput,
    SchedulerStats,
    StopCondition,
)
from pageturner.service.core.request import NewRequest, Request, RequestStatus
from pageturner.service.core.scheduling.committer import Committer
from pageturner.service.core.scheduling.deadlines import Deadlines
from pageturner.service.core.scheduling.decode import plan_decodes
from pageturner.service.core.scheduling.fetching import Fetching
from pageturner.service.core.scheduling.finish import Finisher
from pageturner.service.core.scheduling.inspect import inspect
from pageturner.service.core.scheduling.intake import Intake
from pageturner.service.core.scheduling.pace import FOLD_SECONDS, Pace
from pageturner.service.core.scheduling.planner import Planner
from pageturner.service.core.scheduling.policy_events import StepTally, live_history
from pageturner.service.core.scheduling.process_outputs import OutputProcessor
from pageturner.service.core.scheduling.snapshot import SchedulerSnapshot, restore_snapshot, take_snapshot
from pageturner.service.core.scheduling.speculation import Drafter, make_speculation
from pageturner.service.core.scheduling.starvation_guard import choose_guarded, guard_note
from pageturner.service.core.scheduling.state import SchedulerState
from pageturner.service.core.scheduling.step_plan import StepPlan
from pageturner.service.core.scheduling.suspects import StepFailures
from pageturner.service.core.scheduling.tiered_step import TieredStep
from pageturner.service.core.scheduling.transitions import Transitions
from pageturner.service.core.scheduling.waiting_queue import QueueOrder, WaitingQueue
from pageturner.service.errors import PageturnerError
from pageturner.service.policy_host.active_policy import FaultLimits
from pageturner.service.policy_host.calls import CallWatch
from pageturner.service.policy_host.host import PolicyHost

P = ParamSpec("P")
R = TypeVar("R", bound=Answer)
_Method: TypeAlias = Callable[Concatenate["Scheduler", P], R]


def told(make_call: Callable[..., Call]) -> Callable[[_Method[P, R]], _Method[P, R]]:
    """Tell the listeners of each call of a method. make_call: of the method's own arguments."""

    def decorate(method: _Method[P, R]) -> _Method[P, R]:
        @functools.wraps(method)
        def call_and_tell(self: Scheduler, /, *arguments: P.args, **options: P.kwargs) -> R:
            if not self.listeners:
                return method(self, *arguments, **options)
            call = make_call(*arguments, **options)
            for listener in self.listeners:
                listener.before(call)
            try:
                answer = method(self, *arguments, **options)
            except Exception as error:
                self.tell(call, None, error)
                raise
            self.tell(call, answer, None)
            return answer

        return call_and_tell

    return decorate


class Scheduler:
    """One engine's scheduler; not thread-safe, one thread owns it.

    depth: how many steps may be scheduled before the first of them is updated, less one (0 or 1).
    hash_key: secret of the prefix cache's hashes. hasher: in place of one under that key.
    shadows: by axis, policies to ask and not to obey. watch: times the policies' calls.
    drafter: guesses in place of what the speculation's method would, at depth 0.
    disk: of the prefix cache, behind its host tier; of no use where that is off.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        cache: CacheOptions,
        policies: PolicySet,
        stop_condition: StopCondition,
        rates: Rates,
        *,
        depth: int = 0,
        hash_key: bytes = b"",
        hasher: PrefixHasher | None = None,
        shadows: Mapping[str, object] = MappingProxyType({}),
        watch: CallWatch | None = None,
        speculation: SpeculationOptions = NO_SPECULATION,
        drafter: Drafter | None = None,
        disk: BlockDisk | None = None,
    ) -> None:
        self.options = options
        self._depth = depth
        self._stop_condition = stop_condition
        self.policy_host = PolicyHost(
            policies,
            registry.default_policies(),
            shadows=shadows,
            limits=FaultLimits(options.max_policy_faults, options.max_policy_fault_share),
            watch=watch,
            budget_seconds=options.policy_budget_ms / 1000,
        )
        self.manager = build_manager(
            cache,
            hasher or PrefixHasher(hash_key),
            self.policy_host.eviction_score,
            lambda: self.state.now,
            disk,
        )
        tiers = self.manager.tiers
        order = QueueOrder(self.policy_host, self.manager, options.resort_interval_seconds)
        self._queue_order = order
        self.state = SchedulerState(
            options,
            self.manager,
            self.policy_host,
            rates,
            WaitingQueue(order.key, lambda: self.state.load(), is_key_fixed=order.is_fixed),
            watermark_blocks=math.ceil(options.watermark * cache.num_blocks),
            pace=Pace(rates, min(options.max_num_seqs, options.max_num_batched_tokens)),
        )
        self._planner = Planner(self.state)
        transitions = Transitions(self.state)
        self._committer = Committer(self.state, transitions)
        self._tiered_step = None if tiers is None else TieredStep(tiers, self.manager.device)
        self._fetching = None if tiers is None or disk is None else Fetching(self.state, tiers)
        self._finisher = Finisher(self.state, transitions, stop_condition)
        self._outputs = OutputProcessor(self.state, self._finisher, stop_condition)
        self._failures = StepFailures(self.state, transitions, self._finisher)
        self._deadlines = Deadlines(self.state)
        self._intake = Intake(self.state, self._deadlines, self._finisher, stop_condition)
        self._speculation = make_speculation(self.state, speculation, drafter, depth)
        self.listeners: tuple[SchedulerListener, ...] = ()

    # --- requests in and out ---------------------------------------------------------------

    @told(AddRequest)
    def add_request(self, new: NewRequest) -> Acceptance:
        """Queue a request. One that is resumed and lacks no token ends at once.

        Raises InvalidArgument for one that can never be served, DuplicateRequest, QueueFull, or TextFailed
        where its text can't be begun; nothing is changed then.
        """
        accepted = self._intake.accept(new)
        if self.options.share_between_tenants and self.state.num_live[new.tenant] == 1:
            self._queue_order.look_soon(self.state.now)
        return accepted

    @told(AbortRequest)
    def abort_request(self, request_id: str, error: PageturnerError) -> tuple[Event, ...]:
        """End a request with `error`; unknown ids are no error, they may have ended a moment ago."""
        request = self.state.requests.get(request_id)
        return () if request is None else (self._finisher.abort(request, error),)

    @told(Expire)
    def expire(self, now: float) -> tuple[Event, ...]:
        """End every request whose deadline has passed, and shed those that can no longer make it."""
        self.state.now = now
        return tuple(self._finisher.abort(request, error) for request, error in self._deadlines.missed(now))

    @told(PauseRequest)
    def pause_request(self, request_id: str) -> None:
        """Stop computing for a client that does not read; its blocks are the first to be taken."""
        if request_id in self.state.requests:
            self.state.requests[request_id].is_paused = True

    @told(ResumeRequest)
    def resume_request(self, request_id: str) -> None:
        """Compute for it again."""
        if request_id in self.state.requests:
            self.state.requests[request_id].is_paused = False

    def has_work(self) -> bool:
        """Whether any live request could be advanced by `schedule`, now or once a step in flight ends."""
        return any(not request.is_paused for request in self.state.requests.values())

    # --- who listens -----------------------------------------------------------------------

    def add_listener(self, listener: SchedulerListener) -> None:
        """From the next call on; listeners are told in the order in which they were added."""
        self.listeners = (*self.listeners, listener)
        if self.state.decisions is None:
            self.state.decisions = []

    def tell(self, call: Call, answer: Answer, error: Exception | None) -> None:
        """A call is over."""
        noted = self.state.decisions or ()
        outcome = CallOutcome(answer, error, tuple(noted))
        if noted:
            self.state.decisions = []
        for listener in self.listeners:
            listener.after(call, outcome)

    # --- one step --------------------------------------------------------------------------

    @told(Schedule)
    def schedule(self, now: float) -> SchedulerOutput:
        """Decide the next step and commit to it. Falsy if there is nothing to do now.

        Every truthy output must be answered by `update` or `fail_step`, in order.
        """
        assert len(self.state.unfinished_steps) <= self._depth, "schedule ran too far ahead of update"
        self.state.now = now
        self._renew_orders()
        if self._fetching is not None:
            self._fetching.begin(now)
        plan = plan_decodes(self.state, self.state.guarded) or self._plan_any(now)
        is_new, self.state.guarded = plan.guarded is not self.state.guarded, plan.guarded
        if self.state.decisions is not None:
            if is_new and plan.guarded is not None:
                self.state.decisions.append(guard_note(self.state, plan.guarded))
            self.state.decisions += plan.notes
        if self._tiered_step is not None:
            self._tiered_step.begin(plan, self.state.next_step_id, now)
        output = self._committer.commit(plan, self.state.next_step_id)
        if self._speculation is not None:
            output = self._speculation.add_drafts(output)
        if self._tiered_step is not None:
            output = self._tiered_step.end(output)
        if output:
            if not self.state.unfinished_steps:
                pace = self.state.pace  # the host's work between two steps counts up to a step's length
                pace.step_began = max(pace.last_end, now - pace.last_seconds)
            self.state.unfinished_steps.append(self.state.next_step_id)
            self.state.next_step_id += 1
            self.state.counters["steps"] += 1
        return output

    def _plan_any(self, now: float) -> StepPlan:
        self._failures.keep()
        self._queue_order.refresh(self.state.waiting, now)
        self.state.is_sweep_due = False
        plan = self._planner.plan(choose_guarded(self.state, self.state.guarded))
        num_left = len(self.state.waiting) - len(plan.admissions) - len(self.state.fetching)
        self.state.is_full = num_left > 0 and (self.state.is_full or not plan.admissions)
        return plan

    @told(Update)
    def update(
        self, output: SchedulerOutput, sampled: tuple[SampledSequence, ...], now: float
    ) -> tuple[Event, ...]:
        """Take the results of a step that succeeded. Results of an older epoch are dropped."""
        self._end_step(output, now, len(sampled))
        if self.state.suspects is not None:
            self._failures.clear(sampled)
        tally = StepTally(self.state, output) if self.policy_host.listens else None
        events = self._outputs.take(output, sampled)
        if tally is not None:
            self.policy_host.fold(tally.served(events))
        return tuple(events)

    @told(FailStep)
    def fail_step(self, output: SchedulerOutput, error: Exception, now: float) -> tuple[Event, ...]:
        """Take a step's failure: every request that it computed or copied for starts over, its tokens kept.

        The one that fails alone, found by halves over the steps that follow, ends with StepFailed.
        """
        self._end_step(output, now, 0)
        return self._failures.fail(output, error)

    def _end_step(self, output: SchedulerOutput, now: float, num_outputs: int) -> None:
        assert self.state.unfinished_steps, "no step is in flight"
        expected = self.state.unfinished_steps.popleft()
        assert output.step_id == expected, f"step {output.step_id} ended before step {expected}"
        self.state.now = now
        self.state.last_ended_step = output.step_id
        self.manager.device.complete(output.step_id)
        self.manager.host.complete(output.step_id)
        pace = self.state.pace
        pace.last_seconds, pace.step_began, pace.last_end = now - pace.step_began, now, now
        pace.new_seconds += pace.last_seconds
        pace.new_steps += 1
        if len(self.state.running) < len(self.state.requests):  # some wait
            pace.new_drain_seconds += pace.last_seconds
            pace.new_drained += num_outputs
        if pace.new_seconds >= FOLD_SECONDS:
            pace.fold()
            self.state.is_sweep_due = True

    # --- blocks on disk --------------------------------------------------------------------

    def take_transfers(self) -> tuple[Transfer, ...]:
        """After a step is scheduled: what is to move between host and disk, each once, in this order.

        Every Save and Load must be answered by `end_transfers`, in any order.
        """
        return () if self.manager.tiers is None else self.manager.tiers.take_transfers()

    @told(EndTransfers)
    def end_transfers(self, ended: tuple[TransferEnd, ...], now: float) -> None:
        """Between two steps: transfers that were taken are over, for good or not."""
        assert self._fetching is not None, "there is no disk to move blocks to"
        self._fetching.end(ended, now)

    # --- figures and proof -----------------------------------------------------------------

    def num_requests(self) -> tuple[int, int]:
        """Those that wait and those that run; costs nothing, so that a change can be noticed."""
        return len(self.state.waiting), len(self.state.running)

    def stats(self) -> SchedulerStats:
        """Gauges of this moment, and totals since start."""
        return self.state.stats()

    def inspect(self, now: float) -> SchedulerInspection:
        """The requests and block tables of this moment; nothing is changed, and no listener told."""
        return inspect(self.state, now)

    def check_integrity(self) -> None:
        """Raise AssertionError, naming the invariant, unless the whole state is consistent."""
        self.state.check_integrity()
        if self._fetching is not None:
            self._fetching.check_integrity()

    @property
    def guarded_id(self) -> str | None:
        """The request that no policy can hold back at present."""
        guarded = self.state.guarded
        return None if guarded is None or guarded.status is RequestStatus.FINISHED else guarded.request_id

    # --- as a value ------------------------------------------------------------------------

    def snapshot(self) -> SchedulerSnapshot | None:
        """All but the requests; None while a step is in flight."""
        return take_snapshot(self.state, self._failures.suspects, self._queue_order, self._fetching)

    def restore(self, snapshot: SchedulerSnapshot, requests: Iterable[Request]) -> None:
        """Bring a scheduler just made to a state that one with equal options, policies and hasher was in.

        requests: those that lived, in order of acceptance, as they were; their tables are restored apart
        (`BlockManager.restore_tables`).
        """
        live = list(requests)
        parts = self._failures.suspects, self._queue_order, self._fetching
        restore_snapshot(snapshot, live, self.state, *parts)
        for request in live:
            self._intake.restore(request)

    # --- policies --------------------------------------------------------------------------

    @told(SetPolicies)
    def set_policies(
        self, policies: PolicySet, now: float, *, shadows: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        """Between two steps: other policies decide from now on; nothing is dropped, what runs goes on.

        A policy that is the very object in force is left as it is, its memory, faults and quarantine
        included; so is a shadow. The queue is sorted by the new keys, cached blocks are scored anew.
        """
        self.state.now = now
        self.policy_host.set_policies(policies, shadows, live_history(self.state))
        self._renew_orders()

    @told(Quarantine)
    def quarantine(self, axis: str, reason: str, now: float) -> None:
        """Between two steps: the axis's default decides from now on, as after too many faults."""
        self.state.now = now
        self.policy_host.quarantine(axis, reason)
        self._renew_orders()

    def _renew_orders(self) -> None:
        """What was ordered by a policy that no longer decides is ordered by the one that does."""
        while stale := self.policy_host.take_stale_axes():
            if "queue" in stale:
                running = self.state.running.values()
                self.state.waiting.rekey(running, is_key_fixed=self._queue_order.is_fixed)
            if "eviction" in stale:
                self.manager.device.rescore()
