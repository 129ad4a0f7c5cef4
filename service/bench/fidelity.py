"""`pageturner bench fidelity`: is a simulated server like a real one?

The step times are fitted on one load and judged on another, in a pool too small for it, under policy sets
that treat the shortage differently. The real server is a process, loaded over the wire.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pageturner.loadtest.client import RequestRecord
from pageturner.loadtest.statistics import summarize_run
from pageturner.service.bench.calibrate import Calibration, Load, calibrate, measure, to_workload
from pageturner.service.bench.server_process import running_server
from pageturner.service.simulator.contenders import Setup
from pageturner.service.simulator.figures import figures_of
from pageturner.service.simulator.machine import Machine
from pageturner.service.simulator.simulation import simulate

POLICY_SETS: tuple[dict[str, str], ...] = (
    {},
    {"reclaim": "always-swap", "victim": "last-arrived"},
    {"reclaim": "always-recompute", "victim": "last-arrived"},
    {"reclaim": "always-recompute", "admission": "first-chunk"},
    {"admission": "guaranteed-no-evict", "queue": "shortest-job-first"},
)
WORKLOADS: tuple[Load, ...] = (
    Load(48, 16, (16, 160), (16, 80), seed=100),
    Load(32, 12, (64, 256), (8, 48), shared_prefix_tokens=48, seed=200),
)
NUM_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class Side:
    """A server, real or simulated. throughput: output tokens a second; ttft: seconds, from being due."""

    throughput: float
    ttft_p50: float
    ttft_p99: float
    num_swaps: int
    num_recomputes: int
    num_tail_reclaims: int

    @property
    def num_preemptions(self) -> int:
        return self.num_swaps + self.num_recomputes + self.num_tail_reclaims


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One policy set on one load. errors: (simulated - real) / real."""

    policies: str
    load: Load
    real: Side
    simulated: Side

    @property
    def errors(self) -> dict[str, float]:
        names = ("throughput", "ttft_p50", "ttft_p99")
        return {name: getattr(self.simulated, name) / getattr(self.real, name) - 1 for name in names}


@dataclass(frozen=True, slots=True)
class FidelityReport:
    """calibration: on the other load. results: a policy set and load each."""

    calibration: Calibration
    results: tuple[Fidelity, ...]

    def mean_error(self, name: str) -> float:
        """Mean of the absolute errors of a figure."""
        return statistics.fmean(abs(result.errors[name]) for result in self.results)


def measure_fidelity(arguments: Sequence[str], say: Callable[[str], None]) -> FidelityReport:
    """arguments: further flags of every server. Raises PageturnerError if one fails."""
    calibration = calibrate(arguments, say)
    results = []
    for choices in POLICY_SETS:
        name = ";".join(f"{axis}={policy}" for axis, policy in choices.items()) or "defaults"
        flags = [f"--{axis}-policy={policy}" for axis, policy in choices.items()]
        with running_server(
            [*arguments, *flags, f"--num-blocks={NUM_BLOCKS}", "--swap-space=64MiB"]
        ) as server:
            measured = [(load, measure(load, server.target)) for load in WORKLOADS]
        machine = calibration.machine
        machine = replace(machine, cache=replace(machine.cache, num_blocks=NUM_BLOCKS))
        for load, records in measured:
            simulated = _simulated(load, machine, Setup(name, {a: (p, {}) for a, p in choices.items()}))
            results.append(Fidelity(name, load, _real(records), simulated))
            say(f"{name}: throughput off by {results[-1].errors['throughput']:+.1%}")
    return FidelityReport(calibration, tuple(results))


def _real(records: Sequence[RequestRecord]) -> Side:
    summary = summarize_run(records)
    ttft = summary.time_to_first_token
    assert ttft is not None, "every request ended well"
    return Side(
        summary.output_tokens_per_second,
        ttft.p50,
        ttft.p99,
        summary.num_swaps,
        summary.num_recomputes,
        summary.num_tail_reclaims,
    )


def _simulated(load: Load, machine: Machine, setup: Setup) -> Side:
    contender = setup.on(machine)
    result = simulate(to_workload(load), contender.machine, contender.policies)
    figures, stats = figures_of(result), result.stats
    return Side(
        figures["throughput"],
        figures["ttft_p50"],
        figures["ttft_p99"],
        stats.num_swap_preemptions_total,
        stats.num_recompute_preemptions_total,
        stats.num_tail_preemptions_total,
    )
