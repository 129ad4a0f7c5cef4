"""`pageturner bench scheduler`: microseconds of one step in the core alone."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from pageturner.service.commands.output import write
from pageturner.service.commands.progress import progress
from pageturner.service.errors import ConfigError

EXAMPLE = "pageturner bench scheduler --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--most",
        type=int,
        default=4096,
        metavar="N",
        help="no more running requests than that (default 4096)",
    )
    parser.add_argument(
        "--vllm-python",
        type=Path,
        metavar="PYTHON",
        help="of an environment with vLLM: its v1 scheduler is measured in turns with ours, and nothing else",
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace) -> int:
    """Print the figures. Raises ConfigError where no batch is small enough to be measured."""
    if arguments.vllm_python is not None:
        return _beside_vllm(arguments)
    from pageturner.service.bench.block_operations import measure_block_operations, measure_long_queue
    from pageturner.service.bench.engine_step import measure_engine_steps
    from pageturner.service.bench.scheduler import (
        BATCH_SIZES,
        cache_microseconds,
        measure_scheduler,
        num_measurements,
    )

    sizes = tuple(size for size in BATCH_SIZES if size <= arguments.most)
    if not sizes:
        raise ConfigError(
            "--most", f"{arguments.most} is below {min(BATCH_SIZES)}, the fewest that are measured"
        )
    costs = []
    with progress(num_measurements(sizes)) as advance:
        for cost in measure_scheduler(sizes):
            costs.append(cost)
            what = f"{cost.num_running} running, {cost.num_waiting} waiting"
            advance(f"{what}: {cost.step_microseconds:.0f} us a step", 1)
    cache = cache_microseconds(costs)
    engine_steps = list(measure_engine_steps())
    operations = measure_block_operations() + measure_long_queue()
    if arguments.json:
        figures = {
            "steps": [dataclasses.asdict(cost) for cost in costs],
            "cache_microseconds": cache,
            "engine_steps": [dataclasses.asdict(cost) for cost in engine_steps],
            "operations": [dataclasses.asdict(operation) for operation in operations],
        }
        write(json.dumps(figures, indent=2))
        return 0
    write("running  waiting  prefix cache  schedule us  update us  step us  policies us  a look us")
    for cost in costs:
        write(
            f"{cost.num_running:7d}  {cost.num_waiting:7d}  {'on' if cost.caches_prefixes else 'off':>12}  "
            f"{cost.schedule_microseconds:11.1f}  {cost.update_microseconds:9.1f}  "
            f"{cost.step_microseconds:7.1f}  {cost.policy_microseconds:11.1f}  {cost.look_microseconds:9.1f}"
        )
    added = ", ".join(f"{microseconds:.1f} at {count} running" for count, microseconds in cache.items())
    write(f"a prefix cache that nothing hits adds, in microseconds a step: {added}")
    write("running  scheduler us  engine us  flight record us  batch arrays us: the engine thread's step")
    for step in engine_steps:
        write(
            f"{step.num_running:7d}  {step.scheduler_microseconds:12.1f}  {step.engine_microseconds:9.1f}  "
            f"{step.recorder_microseconds:16.1f}  {step.batch_microseconds:15.1f}"
        )
    for operation in operations:
        write(f"{operation.name}: {operation.nanoseconds:.0f} ns")
    return 0


def _beside_vllm(arguments: argparse.Namespace) -> int:
    from pageturner.service.bench.scheduler_peer import ROUNDS, SIZES, compare_with_vllm

    with progress(ROUNDS * len(SIZES)) as advance:
        costs = compare_with_vllm(arguments.vllm_python, lambda text: advance(text, 1))
    if arguments.json:
        write(json.dumps([dataclasses.asdict(cost) | {"ratio": cost.ratio} for cost in costs], indent=2))
        return 0
    write("running  step us  vLLM's us  ratio")
    for cost in costs:
        write(
            f"{cost.num_running:7d}  {cost.step_microseconds:7.0f}  {cost.vllm_microseconds:9.0f}  "
            f"{cost.ratio:5.2f}"
        )
    return 0
