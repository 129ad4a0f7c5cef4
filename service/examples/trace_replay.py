"""A trace of real traffic against the scheduler on a virtual clock, under two presets.

    pageturner serve --record day.jsonl                     # your own: lengths and arrivals, never text
    python -m pageturner.service.examples.trace_replay day.jsonl [LIMIT]

The published formats serve as well (BurstGPT, Azure LLM, Mooncake, Qwen-Bailian).
"""

from __future__ import annotations

import sys
from pathlib import Path

from pageturner.policies.presets import find_preset
from pageturner.service.simulator.experiment import Contender, run_experiment
from pageturner.service.simulator.machine import load_machine
from pageturner.service.simulator.traces import read_trace


def main(path: str, limit: str = "200") -> None:
    trace = read_trace(Path(path))
    for note in trace.source.notes:
        print(note)
    workload = trace.window(int(limit), seed=0)
    prompt_tokens = sum(request.num_prompt_tokens for request in workload.requests)
    print(f"{len(workload.requests)} requests of {trace.source.format}, {prompt_tokens} prompt tokens")

    machine = load_machine("h100-8b")
    contenders = [
        Contender(name, find_preset(name).policies, machine) for name in ("pageturner", "sglang-lpm")
    ]
    for outcome in run_experiment(contenders, {0: workload}):
        (figures,) = outcome.figures
        print(
            f"{outcome.name:12} first token mean {figures['ttft_mean']:.3f} s, "
            f"{figures['prefix_hit_share']:.0%} of prompt tokens from the cache"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
