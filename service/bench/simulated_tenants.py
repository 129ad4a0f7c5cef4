"""`pageturner bench tenants --machine`: the two tenants on a virtual clock, with equal shares and without.

No program beside it changes these figures; a step takes as long as on the machine that is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from pageturner.policies import registry
from pageturner.service.bench.tenants import FLOOD, QUIET, Answers, TenantsLoad, TenantsResult
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.outcomes import SimulatedRequest
from pageturner.service.simulator.simulation import simulate
from pageturner.service.simulator.workload import Segment, SimulatedWorkload, WorkloadRequest

SETTLE_SECONDS = 5.0
FLOOD_SECONDS = 10.0
"""At the least for which the flood goes on after the last quiet request: late answers are late beside it."""


def simulate_tenants(load: TenantsLoad, machine: SimulatedMachine, *, shares: bool) -> TenantsResult:
    """shares: as where authentication is on by default; else first come first served, as without."""
    chosen = {"queue": "virtual-token-counter", "victim": "most-over-served"} if shares else {}
    options = replace(machine.scheduler, share_between_tenants=shares)
    machine = replace(machine, scheduler=options)

    def run(requests: tuple[WorkloadRequest, ...]) -> tuple[SimulatedRequest, ...]:
        return simulate(SimulatedWorkload("tenants", requests), machine, registry.create_set(chosen)).requests

    quiet = tuple(_quiet(load))
    alone = run(quiet)
    end = quiet[-1].at_seconds + FLOOD_SECONDS
    num_rounds = math.ceil(end / load.flood_output_tokens / machine.step_time.a_step)
    beside = run((*quiet, *_flood(load, len(quiet), num_rounds)))
    flood = [request for request in beside if request.tenant == FLOOD]
    tokens = sum(at <= end for request in flood for at in request.token_times)
    return TenantsResult(load, _answers(alone), _answers(beside), tokens / end, 0)


def _quiet(load: TenantsLoad) -> Iterator[WorkloadRequest]:
    for number in range(load.num_requests):
        at = SETTLE_SECONDS + number * load.interval_seconds
        yield _request(number, at, load.prompt_tokens, load.output_tokens, QUIET)


def _flood(load: TenantsLoad, first: int, num_rounds: int) -> Iterator[WorkloadRequest]:
    """Each open request is followed by another at its end, so many times as its answers could end at the most
    meanwhile."""
    for number in range(load.num_open * num_rounds):
        follows = None if number < load.num_open else first + number - load.num_open
        yield replace(
            _request(first + number, 0.0, load.flood_prompt_tokens, load.flood_output_tokens, FLOOD),
            follows=follows,
        )


def _request(number: int, at: float, num_prompt: int, num_output: int, tenant: str) -> WorkloadRequest:
    prompt, output = Segment(2 * number + 1, num_prompt), Segment(2 * number + 2, num_output)
    return WorkloadRequest(at, (prompt,), output, tenant)


def _answers(requests: tuple[SimulatedRequest, ...]) -> Answers:
    quiet = [request for request in requests if request.tenant == QUIET]
    return Answers(tuple(map(_first_token, quiet)), tuple(map(_end, quiet)))


def _first_token(request: SimulatedRequest) -> float:
    return request.token_times[0] - request.arrived_at if request.token_times else math.inf


def _end(request: SimulatedRequest) -> float:
    if request.error is not None or request.ended_at is None:
        return math.inf
    return request.ended_at - request.arrived_at
