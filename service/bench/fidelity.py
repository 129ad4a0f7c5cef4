"""`pageturner bench fidelity`: is a simulated server like a real one?

The step times are fitted on one load and judged on another, in a pool too small for it, under policy sets
that treat the shortage differently. The real server is a process, loaded over the wire.

A shared machine is not as fast in one minute as in the next, and no scheduler can be blamed for that. So the
judged server records its steps as well, and each result is given twice: with the step times as they were
calibrated, and with all of them scaled by the one factor by which the machine had slowed down.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pageturner.loadtest.client import RequestRecord
from pageturner.loadtest.statistics import summarize_run
from pageturner.policies.spec import PolicySpec
from pageturner.service.bench.calibrate import CALIBRATION_WORK, Load, calibrate, measure, to_workload
from pageturner.service.client.server_process import running_server
from pageturner.service.simulator.contenders import Setup
from pageturner.service.simulator.figures import figures_of
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.recordings import MachineFit, read_steps
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
JUDGED = ("throughput", "ttft_p50", "ttft_p99")


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
        """Of every kind."""
        return self.num_swaps + self.num_recomputes + self.num_tail_reclaims


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One policy set on one load. slowdown: seconds that its steps took over those calibrated.
    at_speed: simulated on the machine slowed down by that."""

    policies: str
    load: Load
    real: Side
    simulated: Side
    slowdown: float
    at_speed: Side

    @property
    def errors(self) -> dict[str, float]:
        """(simulated - real) / real"""
        return _errors(self.simulated, self.real)

    @property
    def errors_at_speed(self) -> dict[str, float]:
        """As `errors`, at the machine's speed meanwhile."""
        return _errors(self.at_speed, self.real)


def _errors(simulated: Side, real: Side) -> dict[str, float]:
    return {name: getattr(simulated, name) / getattr(real, name) - 1 for name in JUDGED}


@dataclass(frozen=True, slots=True)
class FidelityReport:
    """calibration: on the other load. results: a policy set and load each."""

    calibration: MachineFit
    results: tuple[Fidelity, ...]

    @property
    def mean_errors(self) -> dict[str, float]:
        """Mean of the absolute errors of each figure."""
        return {name: statistics.fmean(abs(r.errors[name]) for r in self.results) for name in JUDGED}

    @property
    def mean_errors_at_speed(self) -> dict[str, float]:
        """As `mean_errors`, at the machine's speed meanwhile."""
        return {name: statistics.fmean(abs(r.errors_at_speed[name]) for r in self.results) for name in JUDGED}


FIDELITY_WORK = CALIBRATION_WORK + len(POLICY_SETS) * sum(load.work for load in WORKLOADS)
"""What `measure_fidelity` reports as done, all in all."""


def measure_fidelity(arguments: Sequence[str], on_work: Callable[[str, float], None]) -> FidelityReport:
    """arguments: further flags of every server. on_work: told what was done, and how much of FIDELITY_WORK
    that is. Raises PageturnerError if a server fails."""
    calibration = calibrate(arguments, on_work)
    machine = calibration.machine
    machine = replace(machine, cache=replace(machine.cache, num_blocks=NUM_BLOCKS))
    results = []
    for choices in POLICY_SETS:
        name = ";".join(f"{axis}={policy}" for axis, policy in choices.items()) or "defaults"
        setup = Setup(name, {axis: PolicySpec(policy) for axis, policy in choices.items()})
        flags = [*arguments, *(f"--{axis}-policy={policy}" for axis, policy in choices.items())]
        for load, records, slowdown in _measure_all(flags, machine):
            slower = replace(machine, step_time=machine.step_time.scaled(slowdown))
            sides = [_simulated(load, each, setup) for each in (machine, slower)]
            results.append(Fidelity(name, load, _real(records), sides[0], slowdown, sides[1]))
            found = results[-1]
            on_work(
                f"{name}: throughput off by {found.errors['throughput']:+.1%}, "
                f"at the machine's speed ({slowdown:.2f} x) by {found.errors_at_speed['throughput']:+.1%}",
                load.work,
            )
    return FidelityReport(calibration, tuple(results))


def _measure_all(
    flags: Sequence[str], machine: SimulatedMachine
) -> list[tuple[Load, list[RequestRecord], float]]:
    """Every load on one server, with the slowdown of its steps."""
    measured, num_seen = [], 0
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "recording.jsonl"
        sizes = (f"--num-blocks={NUM_BLOCKS}", "--swap-space=64MiB", f"--record={recording}")
        with running_server([*flags, *sizes]) as server:
            for load in WORKLOADS:
                records = measure(load, server.target)
                steps = read_steps(recording).steps[num_seen:]
                num_seen += len(steps)
                expected = sum(machine.step_time.seconds(step.work) for step in steps)
                measured.append((load, records, sum(step.seconds for step in steps) / expected))
    return measured


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


def _simulated(load: Load, machine: SimulatedMachine, setup: Setup) -> Side:
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
