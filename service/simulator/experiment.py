"""Policy sets on the same workloads: a run for each set and seed, and what the runs say together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pageturner.policies.interfaces import PolicySet, RoutingPolicy
from pageturner.service.simulator.figures import (
    DEFAULT_SLO,
    METRICS,
    Figures,
    Interval,
    Slo,
    figures_of,
    interval,
)
from pageturner.service.simulator.fleet import simulate_fleet
from pageturner.service.simulator.fleet_figures import figures_of_fleet, ttfts_of
from pageturner.service.simulator.fleet_setup import FleetSetup
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.pool_samples import PoolSample
from pageturner.service.simulator.simulation import simulate
from pageturner.service.simulator.workload import SimulatedWorkload

WorkloadOfSeed = Callable[[int], SimulatedWorkload]


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy set on a machine, under the name that tables show.

    fleet, routing: where it is several of these machines, how they are sent to; both or neither.
    """

    name: str
    policies: PolicySet
    machine: SimulatedMachine
    fleet: FleetSetup | None = None
    routing: RoutingPolicy | None = None


@dataclass(frozen=True, slots=True)
class ContenderRuns:
    """All runs of one contender. figures: a run each. samples: of the pools, in the first seed's run; none
    of a fleet. ttfts: of every request of all seeds, sorted."""

    name: str
    figures: tuple[Figures, ...]
    samples: tuple[PoolSample, ...]
    ttfts: tuple[float, ...]

    @property
    def intervals(self) -> Mapping[str, Interval]:
        """Of every metric that each run has."""
        return {
            metric.name: interval([run[metric.name] for run in self.figures])
            for metric in METRICS
            if all(metric.name in run for run in self.figures)
        }


def distinct_workloads(workload_of: WorkloadOfSeed, seeds: Iterable[int]) -> dict[int, SimulatedWorkload]:
    """The workload of each seed that makes another one than the seeds before it.

    A whole trace is the same for every seed: runs of the same thing tell nothing of chance, and an interval
    over them would have no width.
    """
    found: dict[int, SimulatedWorkload] = {}
    for seed in seeds:
        workload = workload_of(seed)
        if not any(workload == other for other in found.values()):
            found[seed] = workload
    return found


def run_experiment(
    contenders: Sequence[Contender],
    workloads: Mapping[int, SimulatedWorkload],
    slo: Slo = DEFAULT_SLO,
    on_run: Callable[[str], None] = lambda _: None,
) -> tuple[ContenderRuns, ...]:
    """Seeds are paired: every contender meets the same workload in the run of a seed. workloads: by seed.
    on_run: told of each run that ended, in words."""
    outcomes = []
    for contender in contenders:
        figures: list[Figures] = []
        ttfts: list[float] = []
        samples: tuple[PoolSample, ...] = ()
        for seed, workload in workloads.items():
            run = _run(contender, workload, seed, slo)
            figures.append(run.figures)
            samples = samples or run.samples
            ttfts += run.ttfts
            on_run(f"{contender.name}, seed {seed}: {run.figures['seconds']:.1f} s of virtual time")
        outcomes.append(ContenderRuns(contender.name, tuple(figures), samples, tuple(sorted(ttfts))))
    return tuple(outcomes)


@dataclass(frozen=True, slots=True)
class _Run:
    figures: Figures
    samples: tuple[PoolSample, ...]
    ttfts: Sequence[float]


def _run(contender: Contender, workload: SimulatedWorkload, seed: int, slo: Slo) -> _Run:
    if contender.fleet is not None and contender.routing is not None:
        fleet = simulate_fleet(
            workload, contender.machine, contender.policies, contender.fleet, contender.routing, seed
        )
        return _Run(figures_of_fleet(fleet, slo), (), ttfts_of(fleet))
    result = simulate(workload, contender.machine, contender.policies)
    ttfts = [record.token_times[0] - record.arrived_at for record in result.requests if record.token_times]
    return _Run(figures_of(result, slo), result.samples, ttfts)


def differences(outcome: ContenderRuns, base: ContenderRuns) -> Mapping[str, Interval]:
    """`outcome` less `base`, seed by seed: what the workload does to both falls out."""
    return {
        metric.name: interval(
            [
                run[metric.name] - other[metric.name]
                for run, other in zip(outcome.figures, base.figures, strict=True)
            ]
        )
        for metric in METRICS
        if all(metric.name in run for run in (*outcome.figures, *base.figures))
    }
