"""`pageturner bench simulator`: scheduled tokens a second that one core simulates, 256 requests running."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pageturner.policies import registry
from pageturner.service.simulator.machine import load_machine
from pageturner.service.simulator.simulation import simulate
from pageturner.service.simulator.synthetic import Synthetic

MIXES = {
    "decode": Synthetic(
        requests=1024, concurrency=256, prompt=64, prompt_sigma=0.3, output=256, output_sigma=0.3
    ),
    "chat": Synthetic(requests=1024, concurrency=256, prompt=256, output=256, output_sigma=0.3),
    "prefill": Synthetic(
        requests=512, concurrency=256, prompt=2048, prompt_sigma=0.3, output=128, output_sigma=0.3
    ),
}


@dataclass(frozen=True, slots=True)
class SimulatorSpeed:
    """One mix. num_running: requests running, mean of the middle half. seconds: of this processor."""

    mix: str
    num_scheduled_tokens: int
    num_steps: int
    num_running: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Scheduled tokens by seconds of this processor."""
        return self.num_scheduled_tokens / self.seconds


def measure_simulator(on_mix: Callable[[str], None] = lambda _: None) -> tuple[SimulatorSpeed, ...]:
    """Each of MIXES on the H100 in a closed loop of 256, in this thread alone. on_mix: told of each."""
    machine = load_machine("h100-8b")
    machine = replace(machine, scheduler=replace(machine.scheduler, max_num_batched_tokens=4096))
    results = []
    for name, recipe in MIXES.items():
        workload = recipe.make(name, 0)
        started = time.process_time()
        result = simulate(workload, machine, registry.default_policies())
        seconds = time.process_time() - started
        middle = result.samples[len(result.samples) // 4 : max(1, len(result.samples) * 3 // 4)]
        num_running = sum(sample.num_running for sample in middle) / len(middle)
        results.append(
            SimulatorSpeed(
                name, result.num_scheduled_tokens, result.stats.num_steps_total, num_running, seconds
            )
        )
        on_mix(name)
    return tuple(results)
