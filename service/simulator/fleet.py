"""Many servers behind routers, on one virtual clock.

A heap of events: a request arrives and is routed, a server begins a step and ends it, a server reports its
load. Of what happens at one moment steps end first, then requests arrive, then what servers sent each other,
then steps begin, as in the loop of one server; so a fleet of one gives the figures of `simulation`, to the
last digit.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable, Container, Sequence
from random import Random
from typing import Protocol

from pageturner.policies.interfaces import PolicySet, RoutingPolicy
from pageturner.service.routing.options import LoadReport, Replica, Routed
from pageturner.service.routing.router import Router
from pageturner.service.simulator.apart import servers_apart
from pageturner.service.simulator.arrivals import Arrivals
from pageturner.service.simulator.chunks import Chains
from pageturner.service.simulator.coarse import CoarseReplica
from pageturner.service.simulator.errors import WorkloadError
from pageturner.service.simulator.fleet_result import FleetResult, RequestTable
from pageturner.service.simulator.fleet_setup import FleetSetup
from pageturner.service.simulator.handing_over import HandoverCounts, Handovers
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.outcomes import Outcome, Progress
from pageturner.service.simulator.replica import SchedulerReplica
from pageturner.service.simulator.workload import SimulatedWorkload, WorkloadRequest

_FINISH, _ARRIVAL, _ACTION, _BEGIN, _REPORT = range(5)


class SimulatedReplica(Protocol):
    """A server of a fleet: `replica.SchedulerReplica` or `coarse.CoarseReplica`."""

    until: float | None
    num_scheduled_tokens: int

    @property
    def num_requests(self) -> int: ...
    @property
    def num_queued_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    def submit(self, index: int, at: float, now: float) -> None: ...
    def begin(self, now: float) -> Progress: ...
    def finish(self) -> Progress: ...
    def outcome(self, index: int) -> Outcome: ...


def simulate_fleet(
    workload: SimulatedWorkload,
    machine: SimulatedMachine,
    policies: PolicySet,
    setup: FleetSetup,
    routing: RoutingPolicy,
    seed: int = 0,
) -> FleetResult:
    """Run `workload` to its end. seed: of what the policy draws. Nothing but the arguments has a part in the
    result.

    Raises SimulationStuck as a scheduler does, and WorkloadError for what coarse replicas cannot run.
    """
    return FleetRun(workload, machine, policies, setup, routing, seed).run()


class FleetRun:
    """One run, of which `simulate_fleet` says what it takes. It is the stage of hand-overs too
    (`handing_over.Stage`).

    replicas, handovers: the servers by number, and what goes on between them, if some prefill; for who looks
    at them when it has ended.
    """

    def __init__(
        self,
        workload: SimulatedWorkload,
        machine: SimulatedMachine,
        policies: PolicySet,
        setup: FleetSetup,
        routing: RoutingPolicy,
        seed: int,
    ) -> None:
        requests = workload.requests
        if setup.is_coarse and machine.speculation.method != "none":
            raise WorkloadError("coarse replicas do not speculate")
        self._requests = requests
        self._late = machine.request_seconds
        self._setup = setup
        self._arrivals = Arrivals(workload, machine.request_seconds)
        self._chains = Chains(requests, setup.chunk_tokens)
        num_decode = setup.num_replicas - setup.num_prefill
        self.replicas: Sequence[SimulatedReplica]
        self.handovers: Handovers | None = None
        if setup.num_prefill:
            self.replicas, self.handovers = servers_apart(
                workload, machine, policies, setup.handover, num_decode, setup.num_prefill, self
            )
        elif setup.is_coarse:
            self.replicas = [CoarseReplica(requests, machine, self._chains) for _ in range(num_decode)]
        else:
            self.replicas = [SchedulerReplica(workload, machine, policies) for _ in range(num_decode)]
        self._names = [f"r{number}" for number in range(num_decode)]
        self._number_of = {name: number for number, name in enumerate(self._names)}
        self._routers = [self._router(machine, routing, f"{seed}/{k}") for k in range(setup.num_routers)]
        self._sessions = _first_of_each(requests)
        self._table = RequestTable(len(requests))
        self._routed: dict[int, tuple[Router, Routed]] = {}
        self._events: list[tuple[float, int, int]] = []
        self._actions: dict[int, Callable[[], None]] = {}
        self._num_actions = 0
        self._lost: Container[int] = ()
        self._now = self._seconds = 0.0

    def run(self) -> FleetResult:
        """To the end of the last request, and of what servers have yet to send each other."""
        arrivals, events, replicas = self._arrivals, self._events, self.replicas
        num_reports = 0
        if self._setup.report_seconds:
            period, num_reports = self._setup.report_seconds, len(self._names)
            events += [(period * (n + 1) / num_reports, _REPORT, n) for n in range(num_reports)]
        self._plan_loss()
        while arrivals.next_at < math.inf or len(events) > num_reports:
            if not events or (arrivals.next_at, _ARRIVAL) < events[0][:2]:
                at, index = arrivals.pop()
                self._now = max(self._now, at)
                self._arrive(at, index)
                continue
            self._now, kind, number = heapq.heappop(events)
            if kind == _ACTION:
                self._actions.pop(number)()
                continue
            replica = replicas[number]
            if kind == _REPORT:
                self._report(number, replica)
            elif number in self._lost:
                continue
            elif kind == _FINISH:
                if replica.until == self._now:  # else it was cut short, and another event says when
                    self._settle(number, replica.finish())
                    heapq.heappush(events, (self._now, _BEGIN, number))
            elif replica.until is None:
                self._settle(number, replica.begin(self._now))
                self._expect_end(number, replica)
        return self._result()

    # --- for hand-overs --------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The virtual clock."""
        return self._now

    def later(self, at: float, action: Callable[[], None]) -> None:
        """As of `handing_over.Stage`."""
        self._actions[self._num_actions] = action
        heapq.heappush(self._events, (at, _ACTION, self._num_actions))
        self._num_actions += 1

    def wake(self, number: int) -> None:
        """As of `handing_over.Stage`."""
        if self.replicas[number].until is None:
            heapq.heappush(self._events, (self._now, _BEGIN, number))

    def submit(self, index: int, at: float, number: int) -> None:
        """As of `handing_over.Stage`."""
        replica = self.replicas[number]
        before = replica.until
        replica.submit(index, at, self._now)
        if before is None:
            heapq.heappush(self._events, (self._now, _BEGIN, number))
        elif replica.until != before:
            self._expect_end(number, replica)

    # --- inside ----------------------------------------------------------------------------

    def _plan_loss(self) -> None:
        handovers, loses_at = self.handovers, self._setup.handover.loses_at
        if handovers is not None and loses_at is not None:
            self._lost = handovers.lost
            self.later(loses_at, lambda: handovers.lose(len(self._names)))

    def _router(self, machine: SimulatedMachine, routing: RoutingPolicy, seed: str) -> Router:
        router = Router(routing, Random(seed).randrange, self._setup.router)
        has_cache = machine.cache.enable_prefix_caching
        cache_tokens = machine.cache.num_blocks * machine.cache.block_size if has_cache else 0
        router.join(*(Replica(name, cache_tokens=cache_tokens) for name in self._names))
        return router

    def _arrive(self, at: float, index: int) -> None:
        planned, table = self._requests[index], self._table
        router = self._routers[index % len(self._routers)]
        chain = self._chains.of(index)
        routed = router.route(
            num_prompt_tokens=planned.num_prompt_tokens,
            digests=chain.digests[: chain.num_prompt],
            tokens_per_digest=self._chains.chunk_tokens,
            session=str(self._sessions[index]),
            priority=planned.priority,
            tenant=planned.tenant,
        )
        number = self._number_of[routed.replica_id]
        table.arrived_at[index] = at - self._late
        table.replica[index] = number
        self._routed[index] = router, routed
        if self.handovers is None:
            self.submit(index, at, number)
        else:
            self.handovers.take_in(index, at, number)

    def _expect_end(self, number: int, replica: SimulatedReplica) -> None:
        if replica.until is not None:
            heapq.heappush(self._events, (replica.until, _FINISH, number))

    def _settle(self, number: int, progress: Progress) -> None:
        replica = self.replicas[number]
        if self.handovers is not None and number >= len(self._names):
            for index in progress.ended:
                self.handovers.ended(number, index, has_failed=replica.outcome(index).has_failed)
            return
        now, first_at = self._now, self._table.first_at
        for index in progress.started:
            first_at[index] = now
            router, routed = self._routed[index]
            router.computed(routed)
        for index in progress.ended:
            self._end(index, replica)

    def _end(self, index: int, replica: SimulatedReplica) -> None:
        table, outcome = self._table, replica.outcome(index)
        self._seconds = table.ended_at[index] = self._now
        table.num_output[index] = outcome.num_output_tokens
        table.num_cached[index] = outcome.num_cached_tokens
        table.has_failed[index] = outcome.has_failed
        router, routed = self._routed.pop(index)
        router.ended(routed)
        self._arrivals.ended(index, self._now)

    def _report(self, number: int, replica: SimulatedReplica) -> None:
        report = LoadReport(replica.num_queued_tokens, replica.num_requests)
        for router in self._routers:
            router.report(self._names[number], report, router.mark())
        heapq.heappush(self._events, (self._now + self._setup.report_seconds, _REPORT, number))

    def _result(self) -> FleetResult:
        replicas, table = self.replicas, self._table
        exact = [replica for replica in replicas[: len(self._names)] if isinstance(replica, SchedulerReplica)]
        handovers = self.handovers
        return FleetResult(
            self._requests,
            table,
            self._seconds,
            tuple(replica.num_scheduled_tokens for replica in replicas),
            tuple(replica.num_preemptions for replica in replicas),
            sum(router.num_faults for router in self._routers),
            array("d", sorted(gap for replica in exact for gap in replica.gaps())),
            sum(replica.num_handed_tokens for replica in exact),
            0 if handovers is None else handovers.num_hit_tokens,
            HandoverCounts() if handovers is None else handovers.counts,
        )


def _first_of_each(requests: Sequence[WorkloadRequest]) -> array[int]:
    """For each request the index of the first of its conversation."""
    first = array("q", range(len(requests)))
    for index, request in enumerate(requests):
        if request.follows is not None:
            first[index] = first[request.follows]
    return first
