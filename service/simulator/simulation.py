"""One run of one server on a virtual clock.

The loop is the engine's, with the clock set forward in the place of the forward: take what has arrived,
expire, schedule, let the step's time pass, update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pageturner.policies.interfaces import PolicySet
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.simulator.arrivals import Arrivals
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.outcomes import SimulatedRequest
from pageturner.service.simulator.pool_samples import PoolSample
from pageturner.service.simulator.replica import SchedulerReplica
from pageturner.service.simulator.tenancy import TenantLedger
from pageturner.service.simulator.workload import SimulatedWorkload


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """A whole run. num_recomputed_tokens: scheduled tokens at positions computed before."""

    requests: tuple[SimulatedRequest, ...]
    samples: tuple[PoolSample, ...]
    stats: SchedulerStats
    seconds: float
    num_scheduled_tokens: int
    num_recomputed_tokens: int
    fairness_gap: float


def simulate(workload: SimulatedWorkload, machine: SimulatedMachine, policies: PolicySet) -> SimulationResult:
    """Run `workload` to its end. Nothing but the arguments has a part in the result.

    Raises SimulationStuck if the scheduler does not advance what it holds.
    """
    tenants = sorted({request.tenant for request in workload.requests})
    ledger = TenantLedger(tenants) if len(tenants) > 1 else None
    replica = SchedulerReplica(workload, machine, policies, ledger)
    arrivals = Arrivals(workload, machine.request_seconds)
    now = 0.0
    while True:
        while arrivals.next_at <= now:
            at, index = arrivals.pop()
            if not replica.accept(index, at, now):
                arrivals.ended(index, now)
        for index in replica.begin(now).ended:
            arrivals.ended(index, now)
        if replica.until is not None:
            now = replica.until
            for index in replica.finish().ended:
                arrivals.ended(index, now)
        elif arrivals.next_at < math.inf:
            now = max(now, arrivals.next_at)
        else:
            break
    replica.samples.take(replica.stats(), now)
    return SimulationResult(
        requests=tuple(replica.records[index] for index in range(len(workload.requests))),
        samples=tuple(replica.samples.taken),
        stats=replica.stats(),
        seconds=now,
        num_scheduled_tokens=replica.num_scheduled_tokens,
        num_recomputed_tokens=replica.num_recomputed_tokens,
        fairness_gap=ledger.largest_gap if ledger else 0.0,
    )
