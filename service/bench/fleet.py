"""`pageturner bench fleet`: how far coarse servers are from the scheduler, and how fast they are simulated.

Both run the same requests through the same routing on a few servers. In chunks of a block they differ where
two requests compute one prefix at once and where blocks run short; in chunks of many tokens also by what of
a prefix is left over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pageturner.policies import registry
from pageturner.service.simulator.fleet import simulate_fleet
from pageturner.service.simulator.fleet_figures import figures_of_fleet
from pageturner.service.simulator.machine import load_machine
from pageturner.service.simulator.routing_cases import CASES, RoutingCase

NUM_SERVERS = 4
NUM_REQUESTS = 120
CHUNKS = (16, 256)
JUDGED = ("throughput", "ttft_mean", "ttft_p99", "e2e_mean", "e2e_p99", "prefix_hit_share")
COMPARED = ("chats", "agents, small pools", "system prompts", "unequal")
SPEED_SERVERS = 50
SPEED_REQUESTS = 5_000


@dataclass(frozen=True, slots=True)
class FleetSide:
    """One way to simulate. figures: those JUDGED. requests_per_second: of this processor's time."""

    figures: Mapping[str, float]
    requests_per_second: float


@dataclass(frozen=True, slots=True)
class FleetComparison:
    """One setting. scheduler, coarse: by tokens of a chunk, in which routers see prefixes either way."""

    setting: str
    num_requests: int
    scheduler: Mapping[int, FleetSide]
    coarse: Mapping[int, FleetSide]

    def errors(self, chunk_tokens: int) -> dict[str, float]:
        """(coarse - scheduler) / scheduler; of the hits, which are shares, the difference."""
        found, exact = self.coarse[chunk_tokens].figures, self.scheduler[chunk_tokens].figures
        return {
            name: found[name] - exact[name] if name == "prefix_hit_share" else found[name] / exact[name] - 1
            for name in JUDGED
        }


@dataclass(frozen=True, slots=True)
class FleetReport:
    """speed: requests a second of one core on SPEED_SERVERS coarse servers, by routing policy."""

    comparisons: tuple[FleetComparison, ...]
    speed: Mapping[str, float]


NUM_PARTS = len(COMPARED) + len(registry.BUILT_IN["routing"])
"""What `on_part` is told of, all in all."""


def measure_fleet(on_part: Callable[[str], None]) -> FleetReport:
    """Each setting by both, then the speed. on_part: told of each part."""
    comparisons = []
    for name in COMPARED:
        case = next(case for case in CASES if case.name == name)
        comparisons.append(compare(_of(case, NUM_SERVERS, NUM_REQUESTS)))
        on_part(name)
    speed = {}
    chats = _of(next(case for case in CASES if case.name == "chats"), SPEED_SERVERS, SPEED_REQUESTS)
    for policy in registry.BUILT_IN["routing"]:
        speed[policy.name] = _run(chats, policy.name, 256, is_coarse=True).requests_per_second
        on_part(policy.name)
    return FleetReport(tuple(comparisons), speed)


def compare(case: RoutingCase) -> FleetComparison:
    """The case by the scheduler and by coarse servers, sent to by prefix-aware."""
    policy = "prefix-aware"
    coarse = {chunk: _run(case, policy, chunk, is_coarse=True) for chunk in CHUNKS}
    exact = {chunk: _run(case, policy, chunk, is_coarse=False) for chunk in CHUNKS}
    return FleetComparison(case.name, _num_requests(case), exact, coarse)


def _of(case: RoutingCase, num_servers: int, num_requests: int) -> RoutingCase:
    """So many requests, the load a server as it was."""
    scaled = case.on(num_servers)
    num_starts = max(1, num_requests // scaled.recipe.turns)
    return replace(scaled, recipe=replace(scaled.recipe, requests=num_starts))


def _num_requests(case: RoutingCase) -> int:
    return case.recipe.requests * case.recipe.turns


def _run(case: RoutingCase, policy: str, chunk_tokens: int, *, is_coarse: bool) -> FleetSide:
    machine = load_machine("h100-8b")
    machine = replace(machine, cache=replace(machine.cache, num_blocks=case.num_blocks))
    workload = case.recipe.make("bench", 0)
    setup = replace(case.fleet, is_coarse=is_coarse, chunk_tokens=chunk_tokens)
    routing = registry.create("routing", policy)
    started = time.process_time()
    result = simulate_fleet(workload, machine, registry.default_policies(), setup, routing)
    seconds = time.process_time() - started
    figures = figures_of_fleet(result)
    return FleetSide({name: figures[name] for name in JUDGED}, len(workload.requests) / seconds)
