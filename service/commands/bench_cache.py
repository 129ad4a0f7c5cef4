"""`pageturner bench cache`: what cached KV saves and what a small pool costs, through the service."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pageturner.service.commands.counts import add_counts, check_counts
from pageturner.service.commands.flags import add_config_flags, config_arguments
from pageturner.service.commands.output import write
from pageturner.service.commands.progress import progress

if TYPE_CHECKING:
    from pageturner.service.bench.served_cache import CacheResult, ServedFigures
    from pageturner.service.bench.served_tiers import TierFigures, TierLoad

EXAMPLE = "pageturner bench cache --only prefix --dtype bfloat16"
CASES = ("prefix", "chat", "pressure", "tiers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", choices=CASES, action="append", help="one of the cases; may be given again (default all)"
    )
    add_counts(
        parser,
        ("requests", 64, "requests of each case"),
        (
            "system-tokens",
            1024,
            "tokens of the common system prompt, or of a conversation's history",
        ),
        ("rounds", 1, "runs of either server, in turns; figures are their medians"),
        ("seed", 0, "of the first round's prompts"),
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    parser.set_defaults(measure=run)
    add_config_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    from pageturner.service.bench.served_cache import cache_cases, measure_case
    from pageturner.service.bench.served_tiers import NUM_SERVERS, TierLoad, measure_tiers

    check_counts(arguments, "requests", "system_tokens", "rounds")
    chosen = arguments.only or CASES
    cases = [
        case
        for case in cache_cases(arguments.requests, arguments.system_tokens, arguments.seed)
        if case.name in chosen
    ]
    flags = config_arguments(arguments)
    load = TierLoad(history_tokens=arguments.system_tokens, seed=arguments.seed)
    with progress(2 * arguments.rounds * len(cases) + NUM_SERVERS * ("tiers" in chosen)) as advance:
        results = [
            measure_case(case, arguments.rounds, flags, lambda text: advance(text, 1)) for case in cases
        ]
        tiers = measure_tiers(load, flags, lambda text: advance(text, 1)) if "tiers" in chosen else ()
    if arguments.json:
        documents = [_document(result) for result in results]
        if tiers:
            documents.append(_tiers_document(load, tiers))
        write(json.dumps(documents, indent=2))
        return 0
    for result in results:
        _print(result)
    if tiers:
        _print_tiers(load, tiers)
    return 0


def _document(result: CacheResult) -> dict[str, Any]:
    case = result.case
    return {
        "case": case.name,
        "summary": case.summary,
        "flags": case.flags,
        "other_flags": case.other_flags,
        "figures": asdict(result.figures),
        "other": asdict(result.other),
        "gains": result.gains,
        "goals": dict(case.goals),
    }


def _print(result: CacheResult) -> None:
    case = result.case
    write(f"{case.name}: {case.summary}")
    _print_side(case.flags, result.figures)
    _print_side(case.other_flags, result.other)
    shown = {
        "computed_prompt_tokens": "fewer prompt tokens computed",
        "ttft_p50": "sooner the first token",
        "output_tokens_per_second": "the throughput",
    }
    gains = ", ".join(
        f"{gain:.2f} x {shown[name]}" + (f" (goal {case.goals[name]:.2f})" if name in case.goals else "")
        for name, gain in result.gains.items()
    )
    write(f"  {gains}")


def _print_side(flags: tuple[str, ...], figures: ServedFigures) -> None:
    computed = f"{figures.computed_prompt_tokens:,.0f} of {figures.prompt_tokens:,.0f} prompt tokens computed"
    write(
        f"  {flags[0]:<32}{computed}, TTFT p50 {figures.ttft_p50:.2f} s, "
        f"{figures.output_tokens_per_second:.1f} output tokens/s, {figures.num_preemptions:.0f} preemptions"
    )


def _tiers_document(load: TierLoad, tiers: tuple[TierFigures, ...]) -> dict[str, Any]:
    return {
        "case": "tiers",
        "load": asdict(load),
        "num_blocks": load.num_blocks,
        "servers": [asdict(figures) for figures in tiers],
        "gains": {figures.name: tiers[0].ttft_p50 / figures.ttft_p50 for figures in tiers[1:]},
    }


def _print_tiers(load: TierLoad, tiers: tuple[TierFigures, ...]) -> None:
    write(
        f"tiers: {load.num_conversations} conversations of {load.history_tokens:,} tokens and "
        f"{load.num_turns} turns, one after the other, in a pool of {load.num_blocks} blocks; behind the "
        "first turns"
    )
    for figures in tiers:
        gain = tiers[0].ttft_p50 / figures.ttft_p50
        write(
            f"  {figures.name:<24}TTFT p50 {figures.ttft_p50:.3f} s ({gain:.1f} x sooner; first turns "
            f"{figures.ttft_first:.3f} s), {figures.cached_share:.0%} of the prompts cached, "
            f"{figures.host_hit_tokens:,} tokens from the host, {figures.disk_hit_tokens:,} of those from "
            f"disk, {figures.num_damaged} blocks damaged"
        )
