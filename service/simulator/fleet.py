"""Many servers behind routers, on one virtual clock.

A heap of events: a request arrives and is routed, a server begins a step and ends it, a server reports its
load. Of what happens at one moment steps end first, then requests arrive, then steps begin, as in the loop of
one server; so a fleet of one gives the figures of `simulation`, to the last digit.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from pageturner.policies.interfaces import PolicySet, RoutingPolicy
from pageturner.service.routing.options import LoadReport, Replica, Routed, RouterOptions
from pageturner.service.routing.router import Router
from pageturner.service.simulator.arrivals import Arrivals
from pageturner.service.simulator.chunks import Chains
from pageturner.service.simulator.coarse import CoarseReplica
from pageturner.service.simulator.errors import WorkloadError
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.outcomes import Outcome, Progress
from pageturner.service.simulator.replica import SchedulerReplica
from pageturner.service.simulator.workload import SimulatedWorkload, WorkloadRequest

_FINISH, _ARRIVAL, _BEGIN, _REPORT = range(4)


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


@dataclass(frozen=True, slots=True)
class FleetSetup:
    """The servers, and those who send to them.

    is_coarse: `coarse.CoarseReplica` in the place of the scheduler. num_routers: each knows what it sent
    itself, and of the rest what servers report. report_seconds: between two reports of one server; 0 for
    none, as where a lone router sees all. chunk_tokens: that a digest stands for. router: how each reckons.
    """

    num_replicas: int
    is_coarse: bool = False
    num_routers: int = 1
    report_seconds: float = 0.0
    chunk_tokens: int = 256
    router: RouterOptions = RouterOptions()

    def __post_init__(self) -> None:
        """Raises ValueError for what could not be run."""
        for name in ("num_replicas", "num_routers", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.report_seconds < math.inf:
            raise ValueError(f"report_seconds must be finite and at least 0, not {self.report_seconds}")


class RequestTable:
    """What became of each request, by its index. Times are virtual seconds, NaN where it did not happen."""

    def __init__(self, size: int) -> None:
        self.arrived_at = array("d", [math.nan]) * size
        self.first_at = array("d", [math.nan]) * size
        self.ended_at = array("d", [math.nan]) * size
        self.num_output = array("q", [0]) * size
        self.num_cached = array("q", [0]) * size
        self.replica = array("q", [-1]) * size
        self.has_failed = bytearray(size)

    def __len__(self) -> int:
        return len(self.arrived_at)


@dataclass(frozen=True, slots=True)
class FleetResult:
    """A whole run. num_scheduled_tokens, num_preemptions: by replica. num_faults: bad answers of the routing
    policy."""

    requests: Sequence[WorkloadRequest]
    table: RequestTable
    seconds: float
    num_scheduled_tokens: tuple[int, ...]
    num_preemptions: tuple[int, ...]
    num_faults: int


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
    return _FleetRun(workload, machine, policies, setup, routing, seed).run()


class _FleetRun:
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
        self._replicas: list[SimulatedReplica] = [
            CoarseReplica(requests, machine, self._chains)
            if setup.is_coarse
            else SchedulerReplica(workload, machine, policies)
            for _ in range(setup.num_replicas)
        ]
        self._names = [f"r{number}" for number in range(setup.num_replicas)]
        self._number_of = {name: number for number, name in enumerate(self._names)}
        self._routers = [self._router(machine, routing, f"{seed}/{k}") for k in range(setup.num_routers)]
        self._sessions = _first_of_each(requests)
        self._table = RequestTable(len(requests))
        self._routed: dict[int, tuple[Router, Routed]] = {}
        self._events: list[tuple[float, int, int]] = []
        self._now = 0.0

    def run(self) -> FleetResult:
        arrivals, events, replicas = self._arrivals, self._events, self._replicas
        if self._setup.report_seconds:
            period, count = self._setup.report_seconds, len(replicas)
            self._events += [(period * (n + 1) / count, _REPORT, n) for n in range(count)]
        seconds = 0.0
        while arrivals.next_at < math.inf or self._routed:
            if not events or (arrivals.next_at, _ARRIVAL) < events[0][:2]:
                at, index = arrivals.pop()
                self._now = max(self._now, at)
                self._arrive(at, index)
                continue
            self._now, kind, number = heapq.heappop(events)
            replica = replicas[number]
            if kind == _FINISH:
                if replica.until == self._now:  # else it was cut short, and another event says when
                    self._settle(replica, replica.finish())
                    heapq.heappush(events, (self._now, _BEGIN, number))
            elif kind == _BEGIN:
                if replica.until is None:
                    self._settle(replica, replica.begin(self._now))
                    self._expect_end(number, replica)
            else:
                self._report(number, replica)
                continue
            seconds = self._now
        return FleetResult(
            self._requests,
            self._table,
            seconds,
            tuple(replica.num_scheduled_tokens for replica in replicas),
            tuple(replica.num_preemptions for replica in replicas),
            sum(router.num_faults for router in self._routers),
        )

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
        replica = self._replicas[number]
        table.arrived_at[index] = at - self._late
        table.replica[index] = number
        self._routed[index] = router, routed
        before = replica.until
        replica.submit(index, at, self._now)
        if before is None:
            heapq.heappush(self._events, (self._now, _BEGIN, number))
        elif replica.until != before:
            self._expect_end(number, replica)

    def _expect_end(self, number: int, replica: SimulatedReplica) -> None:
        if replica.until is not None:
            heapq.heappush(self._events, (replica.until, _FINISH, number))

    def _settle(self, replica: SimulatedReplica, progress: Progress) -> None:
        now, first_at = self._now, self._table.first_at
        for index in progress.started:
            first_at[index] = now
            router, routed = self._routed[index]
            router.computed(routed)
        for index in progress.ended:
            self._end(index, replica)

    def _end(self, index: int, replica: SimulatedReplica) -> None:
        table, outcome = self._table, replica.outcome(index)
        table.ended_at[index] = self._now
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


def _first_of_each(requests: Sequence[WorkloadRequest]) -> array[int]:
    """For each request the index of the first of its conversation."""
    first = array("q", range(len(requests)))
    for index, request in enumerate(requests):
        if request.follows is not None:
            first[index] = first[request.follows]
    return first
