"""`pageturner bench memory`: what paging makes of a KV budget, beside contiguous reservations."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pageturner.service.commands.counts import add_counts, check_counts
from pageturner.service.commands.flags import add_config_flags, config_flags
from pageturner.service.commands.output import note, write
from pageturner.service.commands.progress import Advance, progress
from pageturner.service.config import cache_directory, load_config
from pageturner.service.errors import ConfigError

if TYPE_CHECKING:
    from pageturner.service.bench.beam_sharing import BeamSharing
    from pageturner.service.bench.conversations import Reuse
    from pageturner.service.bench.copy_on_write import CopyCost
    from pageturner.service.bench.memory import MemoryReport
    from pageturner.service.bench.memory_study import StudyRun
    from pageturner.service.core.options import SchedulerOptions
    from pageturner.service.startup.loading import LoadedModel

EXAMPLE = "pageturner bench memory --plot memory.png"
THIS = "this"
NUM_COPIES = 16
NUM_ROUNDS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--machine",
        default="h100-8b",
        metavar="NAME",
        help="whose step times: a simulated machine, by name or file, or `this`, which computes every step "
        "with the model (default %(default)s)",
    )
    add_counts(
        parser,
        ("requests", 600, "requests of the trace"),
        ("kv-tokens", 32768, "tokens of the KV budget"),
        ("longest", 2048, "tokens of the longest sequence"),
        ("most", 256, "sequences that run at once at most"),
        ("seed", 0, "of the trace"),
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them (.png, .svg, .pdf)")
    parser.set_defaults(measure=run)
    add_config_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    from pageturner.service.bench import conversations
    from pageturner.service.bench.beam_sharing import WIDTHS, measure_sharing
    from pageturner.service.bench.copy_on_write import measure_copies
    from pageturner.service.bench.memory import BLOCK_SIZE, chat_trace, num_runs, study_memory
    from pageturner.service.bench.memory_study import ModelledSteps, RealSteps, StudySetting
    from pageturner.service.simulator.machine import load_machine

    _check(arguments)
    is_real = arguments.machine == THIS
    machine = load_machine("cpu-smollm2-135m" if is_real else arguments.machine)
    modelled = ModelledSteps(machine)
    with progress(num_runs() + 2 + len(conversations.BLOCK_SIZES) + len(WIDTHS)) as advance:
        model = _load(arguments, arguments.kv_tokens // BLOCK_SIZE)
        advance(f"loaded {model.artifacts.name}", 1)
        steps = RealSteps(model.kv_cache, model.runner, model.sampler)
        limits = model.limits if is_real else machine.scheduler
        setting = StudySetting(
            chat_trace(arguments.requests, arguments.seed, arguments.longest),
            arguments.kv_tokens,
            _unbounded(limits, arguments),
            model.rates if is_real else machine.step_time.rates(machine.block_bytes),
        )
        report = study_memory(
            setting, steps if is_real else modelled, modelled, arguments.seed, _teller(advance)
        )
        reuses = []
        for reuse in conversations.measure_reuse(load_machine("h100-8b"), arguments.requests, arguments.seed):
            reuses.append(reuse)
            advance(f"conversations, blocks of {reuse.block_size}: {reuse.saved:.1%} saved", 1)
        limits = replace(model.limits, max_num_seqs=4 * NUM_COPIES)
        copies = measure_copies(steps, limits, model.cache, NUM_COPIES, NUM_ROUNDS)
        advance(f"{NUM_COPIES} copies at once", 1)
        beams = []
        for width in WIDTHS if model.artifacts.tokenizer is not None else ():
            beams.append(measure_sharing(steps, _instructions(model), model.limits, model.cache, width))
            advance(f"{width} beams: {beams[-1].saved:.1%} saved", 1)
    if arguments.json:
        write(json.dumps(_document(arguments, report, reuses, copies, beams), indent=2))
    else:
        _print(arguments, report, reuses, copies, beams)
    if arguments.plot is not None:
        from pageturner.service.bench.memory_plot import write_plot

        write_plot(report, arguments.plot)
        note(f"wrote {arguments.plot}")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    check_counts(arguments, "requests", "kv_tokens", "longest", "most")
    if arguments.longest < 2:
        raise ConfigError("--longest", "a prompt and an answer are 2 tokens at least")
    if arguments.kv_tokens < arguments.longest:
        reason = f"{arguments.kv_tokens} do not hold one sequence of --longest {arguments.longest}"
        raise ConfigError("--kv-tokens", reason)
    if arguments.plot is not None:
        from pageturner.service.bench.memory_plot import check_plot

        check_plot(arguments.plot)  # measuring takes a minute


def _load(arguments: argparse.Namespace, num_blocks: int) -> LoadedModel:
    """The model with a pool of the study's budget."""
    from pageturner.service.bench.memory import BLOCK_SIZE
    from pageturner.service.logs.structured import warnings_on_standard_error
    from pageturner.service.startup.loading import load_model

    loaded = load_config(
        arguments.config,
        flags=config_flags(arguments),
        given={"cache.num_blocks": num_blocks, "cache.block_size": BLOCK_SIZE, "cache.swap_space": 0},
    )
    # In a thread that ends, with the OpenMP team that each thread has that ran torch.
    with ThreadPoolExecutor(1) as loader:
        return loader.submit(load_model, loaded, cache_directory(), warnings_on_standard_error()).result()


def _instructions(model: LoadedModel) -> list[tuple[tuple[int, ...], int]]:
    """Prompts of the searches, and the tokens of their answers."""
    from pageturner.service.bench.beam_sharing import INSTRUCTIONS

    tokenizer = model.artifacts.tokenizer
    assert tokenizer is not None
    return [(tuple(tokenizer.encode(text).ids), num_outputs) for text, num_outputs in INSTRUCTIONS]


def _unbounded(limits: SchedulerOptions, arguments: argparse.Namespace) -> SchedulerOptions:
    """The limits of the study: all of the trace may wait."""
    return replace(
        limits,
        max_model_len=arguments.longest,
        max_num_seqs=arguments.most,
        max_waiting=arguments.requests,
        max_queued_tokens=arguments.requests * arguments.longest,
        starvation_seconds=1e9,
    )


def _teller(advance: Advance) -> Callable[[StudyRun], None]:
    return lambda run: advance(f"{run.name}: {run.tokens_per_second:,.0f} tokens/s", 1)


def _document(
    arguments: argparse.Namespace,
    report: MemoryReport,
    reuses: Sequence[Reuse],
    copies: CopyCost,
    beams: Sequence[BeamSharing],
) -> dict[str, Any]:
    asked = ("machine", "requests", "kv_tokens", "longest", "most", "seed")
    return {
        "asked": {name: getattr(arguments, name) for name in asked},
        "contenders": [_run_document(run) for run in report.contenders],
        "speedup": report.speedup,
        "total_speedup": report.total_speedup,
        "sharing": {str(choices): _run_document(run) for choices, run in report.sharing.items()},
        "block_sizes": [_run_document(run) for run in report.block_sizes],
        "conversations": [{**asdict(reuse), "saved": reuse.saved} for reuse in reuses],
        "copies": asdict(copies),
        "beams": list(map(asdict, beams)),
    }


def _run_document(run: StudyRun) -> dict[str, Any]:
    return {**asdict(run), "useful": run.use.useful}


def _print(
    arguments: argparse.Namespace,
    report: MemoryReport,
    reuses: Sequence[Reuse],
    copies: CopyCost,
    beams: Sequence[BeamSharing],
) -> None:
    whose = "this machine" if arguments.machine == THIS else f"{arguments.machine}, simulated"
    write(
        f"{arguments.requests} requests of ShareGPT's lengths, {arguments.kv_tokens} tokens of KV, sequences "
        f"of at most {arguments.longest}; step times of {whose}"
    )
    write("While requests wait; useful: what holds tokens, of what is set aside; then shares of the pool:")
    titles = ("", "useful", "tokens", "reserved", "unused", "free", "batch", "tokens/s", "to the end")
    write("".join(f"{title:>12}" for title in titles))
    for run in report.contenders:
        use = run.use
        shares = (use.useful, use.tokens, use.reserved, use.unused, use.free)
        write(
            f"{run.name:>12}"
            + "".join(f"{share:12.1%}" for share in shares)
            + f"{run.batch:12.1f}{run.tokens_per_second:12,.0f}{run.total_tokens_per_second:12,.0f}"
        )
    write(
        f"paging has {report.speedup:.2f} x the throughput of max length, "
        f"{report.total_speedup:.2f} x to the end of the last request"
    )
    saved = ", ".join(f"{run.shared:.1%} at n = {choices}" for choices, run in report.sharing.items())
    write(f"blocks that the choices of a prompt save by sharing: {saved}")
    if beams:
        saved = ", ".join(f"{sharing.saved:.1%} at width {sharing.width}" for sharing in beams)
        write(f"blocks that beams save by sharing, on instructions of Alpaca's lengths: {saved}")
    wasted = ", ".join(f"{run.block_size}: {1 - run.use.useful:.1%}" for run in report.block_sizes)
    write(f"wasted of what is set aside, by block size: {wasted}")
    kept = ", ".join(f"{reuse.block_size}: {reuse.saved:.1%}" for reuse in reuses)
    write(f"prompt tokens that conversations save by answers' last, partial blocks, by block size: {kept}")
    write(
        f"a step in which {copies.num_copies} choices copy a block of {copies.block_bytes // 1024} KiB: "
        f"{copies.step_milliseconds:.2f} ms, {copies.copy_milliseconds:.2f} of them in the copies; "
        f"one of as many decodes without copies: {copies.plain_step_milliseconds:.2f} ms"
    )
