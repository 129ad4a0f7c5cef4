"""`pageturner bench`: the project's own measurements of itself."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path

from pageturner.service.commands import (
    bench_accuracy,
    bench_beams,
    bench_cache,
    bench_fleet,
    bench_front,
    bench_handoff,
    bench_kernels,
    bench_lora,
    bench_memory,
    bench_monitoring,
    bench_neighbours,
    bench_overload,
    bench_products,
    bench_ranks,
    bench_resume,
    bench_scoring,
    bench_speculation,
    bench_steps,
    bench_streams,
    bench_structured,
    bench_tenants,
)
from pageturner.service.commands.flags import add_config_flags, config_arguments
from pageturner.service.commands.output import note, write
from pageturner.service.commands.progress import progress
from pageturner.service.config import cache_directory
from pageturner.service.errors import ConfigError

HELP = "measure start-up, throughput, preemption, memory, accuracy, the front, kernels or the scheduler"
EXAMPLE = "pageturner bench throughput --concurrency 16 --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", metavar="BENCH", required=True)
    startup = benches.add_parser(
        "startup",
        help="from process start to SERVING, the model converted before",
        epilog="example: pageturner bench startup --runs 5 --verbose",
    )
    startup.add_argument(
        "--runs", type=int, default=5, metavar="N", help="runs to take the median of (default 5)"
    )
    startup.add_argument("--verbose", action="store_true", help="the time of each part of the start too")
    startup.set_defaults(measure=_startup)
    throughput = benches.add_parser(
        "throughput",
        help="output tokens/s of the service and of transformers' generate(), in turns",
        epilog="example: pageturner bench throughput --concurrency 16 --dtype bfloat16 --json",
    )
    for name, default, doc in (
        ("concurrency", 16, "requests at once, and generate()'s batch"),
        ("prompt-tokens", 128, "tokens of each prompt"),
        ("output-tokens", 128, "tokens of each output"),
        ("rounds", 3, "rounds of each contender, in turns"),
    ):
        throughput.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{doc} (default {default})"
        )
    throughput.set_defaults(measure=_throughput)
    bench_steps.add_arguments(
        benches.add_parser(
            "steps",
            help="milliseconds of one step of a quantised decoder on this CPU, by what it computes",
            epilog=f"example: {bench_steps.EXAMPLE}",
        )
    )
    bench_monitoring.add_arguments(
        benches.add_parser(
            "monitoring",
            help="what counting, tracing and a scrape cost, per token and in all",
            epilog=f"example: {bench_monitoring.EXAMPLE}",
        )
    )
    bench_neighbours.add_arguments(
        benches.add_parser(
            "neighbours",
            help="output tokens/s alone and beside busy programs on the same cores; what idling costs",
            epilog=f"example: {bench_neighbours.EXAMPLE}",
        )
    )
    bench_resume.add_arguments(
        benches.add_parser(
            "resume",
            help="one of two servers is killed in the middle of many streams: what is lost, and for how long",
            epilog=f"example: {bench_resume.EXAMPLE}",
        )
    )
    bench_handoff.add_arguments(
        benches.add_parser(
            "handoff",
            help="answers beside long prompts: on one server, and with prefill in another process",
            epilog=f"example: {bench_handoff.EXAMPLE}",
        )
    )
    bench_tenants.add_arguments(
        benches.add_parser(
            "tenants",
            help="what a tenant that floods the service costs a quiet one",
            epilog=f"example: {bench_tenants.EXAMPLE}",
        )
    )
    bench_fleet.add_arguments(
        benches.add_parser(
            "fleet",
            help="coarse simulated servers beside the scheduler: how far, how fast",
            epilog=f"example: {bench_fleet.EXAMPLE}",
        )
    )
    preemption = benches.add_parser(
        "preemption",
        help="a pool far too small beside an ample one, for each reclaim policy: are the tokens the same?",
        epilog="example: pageturner bench preemption --dtype float32 --deterministic true --json",
    )
    for name, default, doc in (
        ("requests", 32, "requests at once"),
        ("prompt-tokens", 40, "tokens of each prompt"),
        ("output-tokens", 160, "tokens of each output"),
        ("tiny-blocks", 64, "blocks of the tiny pool"),
    ):
        preemption.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{doc} (default {default})"
        )
    preemption.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="of every request, seeded (default 0)"
    )
    preemption.set_defaults(measure=_preemption)
    fidelity = benches.add_parser(
        "fidelity",
        help="simulated against real servers, under several policy sets",
        epilog="example: pageturner bench fidelity --num-threads 1 --json",
    )
    fidelity.set_defaults(measure=_fidelity)
    simulator = benches.add_parser(
        "simulator",
        help="scheduled tokens a second that one core simulates",
        epilog="example: pageturner bench simulator --json",
    )
    simulator.add_argument("--json", action="store_true", help="the figures as JSON")
    simulator.set_defaults(measure=_simulator)
    scheduler = benches.add_parser(
        "scheduler",
        help="microseconds of one step in the core alone, by running decodes and waiting requests",
        epilog="example: pageturner bench scheduler --json",
    )
    scheduler.add_argument(
        "--most",
        type=int,
        default=4096,
        metavar="N",
        help="no more running requests than that (default 4096)",
    )
    scheduler.add_argument(
        "--vllm-python",
        type=Path,
        metavar="PYTHON",
        help="of an environment with vLLM: its v1 scheduler is measured in turns with ours, and nothing else",
    )
    scheduler.add_argument("--json", action="store_true", help="the figures as JSON")
    scheduler.set_defaults(measure=_scheduler)
    bench_front.add_arguments(
        benches.add_parser(
            "front",
            help="tokens/s and CPU a token of gRPC, prompts and text around a model that costs nothing",
            epilog=f"example: {bench_front.EXAMPLE}",
        )
    )
    bench_streams.add_arguments(
        benches.add_parser(
            "streams",
            help="thousands of streams open at once over real connections, and whether any is lost",
            epilog=f"example: {bench_streams.EXAMPLE}",
        )
    )
    bench_speculation.add_arguments(
        benches.add_parser(
            "speculation",
            help="tokens/s with guesses ahead and without, where answers repeat their prompts and where not",
            epilog=f"example: {bench_speculation.EXAMPLE}",
        )
    )
    bench_structured.add_arguments(
        benches.add_parser(
            "structured",
            help="tokens/s of answers of a form against answers of any, and what a mask costs",
            epilog=f"example: {bench_structured.EXAMPLE}",
        )
    )
    bench_beams.add_arguments(
        benches.add_parser(
            "beams",
            help="tokens/s of beam searches against as many samples, and what they share",
            epilog=f"example: {bench_beams.EXAMPLE}",
        )
    )
    bench_scoring.add_arguments(
        benches.add_parser(
            "scoring",
            help="what log-probabilities of prompts and continuations cost, alone and beside streams",
            epilog=f"example: {bench_scoring.EXAMPLE}",
        )
    )
    bench_overload.add_arguments(
        benches.add_parser(
            "overload",
            help="goodput, refusals and their advice at more load than there is capacity",
            epilog=f"example: {bench_overload.EXAMPLE}",
        )
    )
    bench_accuracy.add_arguments(
        benches.add_parser(
            "accuracy",
            help="perplexity, KL divergence and agreement with float32 of each kind of matrix product",
            epilog=f"example: {bench_accuracy.EXAMPLE}",
        )
    )
    bench_kernels.add_arguments(
        benches.add_parser(
            "kernels",
            help="attention beside torch's and what the GPU can do; without a GPU, on paper and on the CPU",
            epilog=f"example: {bench_kernels.EXAMPLE}",
        )
    )
    bench_products.add_arguments(
        benches.add_parser(
            "products",
            help="matrix products of one step on this CPU: quantised, in float32 and in bfloat16",
            epilog=f"example: {bench_products.EXAMPLE}",
        )
    )
    bench_ranks.add_arguments(
        benches.add_parser(
            "ranks",
            help="what several processes of one model cost a step, and output tokens/s of them beside one",
            epilog=f"example: {bench_ranks.EXAMPLE}",
        )
    )
    bench_lora.add_arguments(
        benches.add_parser(
            "lora",
            help="output tokens/s with LoRA adapters in the batch against none, in turns",
            epilog=f"example: {bench_lora.EXAMPLE}",
        )
    )
    bench_cache.add_arguments(
        benches.add_parser(
            "cache",
            help="shared prefixes, conversations and a pool too small, through the service",
            epilog=f"example: {bench_cache.EXAMPLE}",
        )
    )
    bench_memory.add_arguments(
        benches.add_parser(
            "memory",
            help="paging beside contiguous reservations; sharing, block sizes, copies",
            epilog=f"example: {bench_memory.EXAMPLE}",
        )
    )
    for bench in (startup, throughput, preemption, fidelity):
        bench.add_argument("--json", action="store_true", help="the figures as JSON")
        add_config_flags(bench)


def run(arguments: argparse.Namespace) -> int:
    measured: int = arguments.measure(arguments)
    return measured


def _check_counts(arguments: argparse.Namespace, *names: str) -> None:
    """Raises ConfigError for the first that is below 1."""
    for name in names:
        value = getattr(arguments, name)
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}", f"{value} is below 1")


def _startup(arguments: argparse.Namespace) -> int:
    from pageturner.service.bench.startup import measure_startup

    _check_counts(arguments, "runs")
    with progress(arguments.runs + 1) as advance:
        result = measure_startup(arguments.runs, config_arguments(arguments), lambda text: advance(text, 1))
    if arguments.json:
        medians = {"median_seconds": result.median_seconds, "median_parts": result.median_parts()}
        write(json.dumps({**dataclasses.asdict(result), **medians}, indent=2))
        return 0
    runs = ", ".join(f"{seconds:.2f}" for seconds in result.seconds)
    write(f"process start to SERVING: {result.median_seconds:.2f} s, the median of {runs}")
    write(f"(a first start, not counted, took {result.first_seconds:.2f} s)")
    if arguments.verbose:
        for name, seconds in result.median_parts().items():
            write(f"{seconds:7.3f} s  {name}")
    return 0


def _throughput(arguments: argparse.Namespace) -> int:
    from pageturner.service.bench.throughput import ThroughputLoad, measure_throughput
    from pageturner.service.commands.flags import load_from

    _check_counts(arguments, "concurrency", "prompt_tokens", "output_tokens", "rounds")
    workload = ThroughputLoad(arguments.concurrency, arguments.prompt_tokens, arguments.output_tokens)
    model = load_from(arguments).config.model
    with progress(arguments.rounds) as advance:
        result = measure_throughput(
            workload,
            arguments.rounds,
            model,
            cache_directory(),
            config_arguments(arguments),
            lambda text: advance(text, 1),
        )
    if arguments.json:
        write(json.dumps({**dataclasses.asdict(result), **result.medians()}, indent=2))
        return 0
    medians = result.medians()
    write(
        f"output tokens/s, median of {arguments.rounds} rounds in turns: "
        f"pageturner {medians['service_tokens_per_second']:.1f}, "
        f"transformers {medians['baseline_tokens_per_second']:.1f}, ratio {medians['ratio']:.2f}"
    )
    return 0


def _preemption(arguments: argparse.Namespace) -> int:
    from pageturner.service.bench.preemption import TOLERANCE, PreemptionLoad, compare_policies

    _check_counts(arguments, "requests", "prompt_tokens", "output_tokens", "tiny_blocks")
    if not 0 <= arguments.temperature < math.inf:
        raise ConfigError("--temperature", f"{arguments.temperature} is not a number from 0")
    workload = PreemptionLoad(
        arguments.requests, arguments.prompt_tokens, arguments.output_tokens, arguments.temperature
    )
    reclaims = ("always-swap", "always-recompute", "cost-model")
    with progress(1 + len(reclaims)) as advance:
        results = compare_policies(
            workload,
            reclaims,
            arguments.tiny_blocks,
            config_arguments(arguments),
            lambda text: advance(text, 1),
        )
    if arguments.json:
        write(json.dumps([dataclasses.asdict(result) for result in results], indent=2))
        return 0
    for result in results:
        write(
            f"{result.reclaim}: {result.num_equal} of {result.num_streams} streams equal, "
            f"{result.num_compatible} within {TOLERANCE} at the first difference "
            f"(largest {result.largest_gap:.3f}); {result.num_swaps} swaps, "
            f"{result.num_recomputes} recomputes, {result.num_tail_reclaims} tail reclaims; "
            f"{result.num_blocks_left} blocks left in use"
        )
    return 0


def _fidelity(arguments: argparse.Namespace) -> int:
    from pageturner.service.bench.fidelity import FIDELITY_WORK, measure_fidelity

    with progress(FIDELITY_WORK) as advance:
        report = measure_fidelity(config_arguments(arguments), advance)
    for text in report.calibration.warnings:
        note(f"warning: {text}")
    if arguments.json:
        document = {
            "fit_error": dataclasses.asdict(report.calibration.error),
            "results": [
                {**dataclasses.asdict(r), "errors": r.errors, "errors_at_speed": r.errors_at_speed}
                for r in report.results
            ],
            "mean_errors": report.mean_errors,
            "mean_errors_at_speed": report.mean_errors_at_speed,
        }
        write(json.dumps(document, indent=2))
        return 0
    for result in report.results:
        write(f"{result.policies}, {result.load.requests} requests, {result.load.concurrency} at once")
        sides = (("real", result.real), ("simulated", result.simulated), ("at speed", result.at_speed))
        for side, found in sides:
            write(
                f"  {side:<10}{found.throughput:8.1f} tokens/s, TTFT p50 {found.ttft_p50:.2f} s, "
                f"p99 {found.ttft_p99:.2f} s; {found.num_swaps} swaps, {found.num_recomputes} recomputes, "
                f"{found.num_tail_reclaims} tail reclaims"
            )
        write(f"  (its steps took {result.slowdown:.2f} times as long as when they were calibrated)")
    for title, errors in (("", report.mean_errors), (" at speed", report.mean_errors_at_speed)):
        write(f"mean errors{title}: " + ", ".join(f"{name} {error:.1%}" for name, error in errors.items()))
    return 0


def _simulator(arguments: argparse.Namespace) -> int:
    from pageturner.service.bench.simulator import MIXES, measure_simulator

    with progress(len(MIXES)) as advance:
        results = measure_simulator(lambda name: advance(f"simulated {name}", 1))
    if arguments.json:
        rows = [{**dataclasses.asdict(r), "tokens_per_second": r.tokens_per_second} for r in results]
        write(json.dumps(rows, indent=2))
        return 0
    for result in results:
        write(
            f"{result.mix:<9}{result.tokens_per_second:10,.0f} scheduled tokens/s of one core, "
            f"{result.num_running:.0f} requests running"
        )
    return 0


def _scheduler(arguments: argparse.Namespace) -> int:
    if arguments.vllm_python is not None:
        return _scheduler_beside_vllm(arguments)
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


def _scheduler_beside_vllm(arguments: argparse.Namespace) -> int:
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
