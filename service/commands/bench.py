"""`pageturner bench`: the project's own measurements of itself."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Protocol

from pageturner.service.commands import (
    bench_accuracy,
    bench_beams,
    bench_cache,
    bench_fidelity,
    bench_fleet,
    bench_front,
    bench_handoff,
    bench_kernels,
    bench_lora,
    bench_memory,
    bench_monitoring,
    bench_neighbours,
    bench_overload,
    bench_preemption,
    bench_products,
    bench_ranks,
    bench_resume,
    bench_scheduler,
    bench_scoring,
    bench_simulator,
    bench_speculation,
    bench_startup,
    bench_steps,
    bench_streams,
    bench_structured,
    bench_tenants,
    bench_throughput,
)

HELP = "measure start-up, throughput, preemption, memory, accuracy, the front, kernels or the scheduler"
EXAMPLE = "pageturner bench throughput --concurrency 16 --json"


class Bench(Protocol):
    """A module of one benchmark. `add_arguments` sets `measure` among the parser's defaults, which prints the
    figures and returns the exit code."""

    EXAMPLE: str

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None: ...


BENCHES: Mapping[str, tuple[Bench, str]] = {
    "startup": (bench_startup, "from process start to SERVING, the model converted before"),
    "throughput": (
        bench_throughput,
        "output tokens/s of the service and of transformers' generate(), in turns",
    ),
    "steps": (
        bench_steps,
        "milliseconds of one step of a quantised decoder on this CPU, by what it computes",
    ),
    "monitoring": (bench_monitoring, "what counting, tracing and a scrape cost, per token and in all"),
    "neighbours": (
        bench_neighbours,
        "output tokens/s alone and beside busy programs on the same cores; what idling costs",
    ),
    "resume": (
        bench_resume,
        "one of two servers is killed in the middle of many streams: what is lost, and for how long",
    ),
    "handoff": (
        bench_handoff,
        "answers beside long prompts: on one server, and with prefill in another process",
    ),
    "tenants": (bench_tenants, "what a tenant that floods the service costs a quiet one"),
    "fleet": (bench_fleet, "coarse simulated servers beside the scheduler: how far, how fast"),
    "preemption": (
        bench_preemption,
        "a pool far too small beside an ample one, for each reclaim policy: are the tokens the same?",
    ),
    "fidelity": (bench_fidelity, "simulated against real servers, under several policy sets"),
    "simulator": (bench_simulator, "scheduled tokens a second that one core simulates"),
    "scheduler": (
        bench_scheduler,
        "microseconds of one step in the core alone, by running decodes and waiting requests",
    ),
    "front": (
        bench_front,
        "tokens/s and CPU a token of gRPC, prompts and text around a model that costs nothing",
    ),
    "streams": (
        bench_streams,
        "thousands of streams open at once over real connections, and whether any is lost",
    ),
    "speculation": (
        bench_speculation,
        "tokens/s with guesses ahead and without, where answers repeat their prompts and where not",
    ),
    "structured": (
        bench_structured,
        "tokens/s of answers of a form against answers of any, and what a mask costs",
    ),
    "beams": (bench_beams, "tokens/s of beam searches against as many samples, and what they share"),
    "scoring": (
        bench_scoring,
        "what log-probabilities of prompts and continuations cost, alone and beside streams",
    ),
    "overload": (bench_overload, "goodput, refusals and their advice at more load than there is capacity"),
    "accuracy": (
        bench_accuracy,
        "perplexity, KL divergence and agreement with float32 of each kind of matrix product",
    ),
    "kernels": (
        bench_kernels,
        "attention beside torch's and what the GPU can do; without a GPU, on paper and on the CPU",
    ),
    "products": (
        bench_products,
        "matrix products of one step on this CPU: quantised, in float32 and in bfloat16",
    ),
    "ranks": (
        bench_ranks,
        "what several processes of one model cost a step, and output tokens/s of them beside one",
    ),
    "lora": (bench_lora, "output tokens/s with LoRA adapters in the batch against none, in turns"),
    "cache": (bench_cache, "shared prefixes, conversations and a pool too small, through the service"),
    "memory": (bench_memory, "paging beside contiguous reservations; sharing, block sizes, copies"),
}
"""Each with its line of help, in the order of `bench --help`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", metavar="BENCH", required=True)
    for name, (bench, doc) in BENCHES.items():
        bench.add_arguments(benches.add_parser(name, help=doc, epilog=f"example: {bench.EXAMPLE}"))


def run(arguments: argparse.Namespace) -> int:
    measured: int = arguments.measure(arguments)
    return measured
