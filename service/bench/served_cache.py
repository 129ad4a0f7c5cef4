"""`pageturner bench cache`: what cached KV saves and what a small pool costs, through the service.

Each case is one load sent to two servers that differ in one setting, in turns, so that a busy minute hits
both. A server is started for each run: its cache is empty, and nothing is left of the run before.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pageturner.loadtest.client import Outcome, RequestRecord
from pageturner.loadtest.runner import Run, execute
from pageturner.loadtest.server import Target, discover
from pageturner.loadtest.statistics import RunSummary, summarize_run
from pageturner.loadtest.workload import Lengths, LoadtestWorkload
from pageturner.loadtest.workload.load import SystemPrompts
from pageturner.loadtest.workload.named import NAMED
from pageturner.service.client.server_process import running_server
from pageturner.service.errors import PageturnerError

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class CacheCase:
    """A load, and two servers by what sets them apart: the flags of the first are what is to win. goal: of
    `gains`, by name."""

    name: str
    summary: str
    workload: LoadtestWorkload
    concurrency: int
    flags: tuple[str, ...]
    other_flags: tuple[str, ...]
    goals: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ServedFigures:
    """Medians of a server's rounds. computed_prompt_tokens: those that no cached block covered."""

    num_requests: int
    prompt_tokens: float
    computed_prompt_tokens: float
    ttft_p50: float
    output_tokens_per_second: float
    num_preemptions: float


@dataclass(frozen=True, slots=True)
class CacheResult:
    """figures: of the server that is to win. other: of the one beside it."""

    case: CacheCase
    figures: ServedFigures
    other: ServedFigures

    @property
    def gains(self) -> dict[str, float]:
        """How many times better: fewer prompt tokens computed, sooner the first token, more output."""
        return {
            "computed_prompt_tokens": self.other.computed_prompt_tokens / self.figures.computed_prompt_tokens,
            "ttft_p50": self.other.ttft_p50 / self.figures.ttft_p50,
            "output_tokens_per_second": (
                self.figures.output_tokens_per_second / self.other.output_tokens_per_second
            ),
        }


def cache_cases(num_requests: int, system_tokens: int, seed: int) -> tuple[CacheCase, ...]:
    """prefix, chat and pressure; all of the first and the last come at once."""
    chat = NAMED["chat"]
    prefix = LoadtestWorkload(
        num_requests,
        Lengths(32, 96),
        Lengths(16, 16),
        seed=seed,
        system_prompts=SystemPrompts(1, Lengths(system_tokens, system_tokens)),
    )
    conversations = LoadtestWorkload(
        num_requests,
        chat.prompt_lengths,
        chat.output_lengths,
        correlation=chat.correlation,
        turns=chat.turns,
        seed=seed,
    )
    pressure = LoadtestWorkload(num_requests, Lengths(128, 128), Lengths(128, 128), seed=seed)
    demand = num_requests * (128 + 128) // BLOCK_SIZE
    return (
        CacheCase(
            "prefix",
            f"{num_requests} requests at once behind a common system prompt of {system_tokens} tokens; with "
            "the prefix cache, and without",
            prefix,
            num_requests,
            ("--enable-prefix-caching=true",),
            ("--enable-prefix-caching=false",),
            {"computed_prompt_tokens": 5.0, "ttft_p50": 4.0},
        ),
        CacheCase(
            "chat",
            f"{num_requests} turns of conversations of ShareGPT's lengths, 16 at once; with partial blocks "
            "reused, and without",
            conversations,
            16,
            ("--reuse-partial-blocks=true",),
            ("--reuse-partial-blocks=false",),
            {"computed_prompt_tokens": 1 / 0.95},
        ),
        CacheCase(
            "pressure",
            f"{num_requests} requests of 128 + 128 tokens at once; in a pool of a quarter of what they take "
            "together, and in one that holds them all",
            pressure,
            num_requests,
            (f"--num-blocks={max(32, demand // 4)}",),
            (f"--num-blocks={2 * demand}",),
            {"output_tokens_per_second": 0.8},
        ),
    )


def measure_case(
    case: CacheCase, rounds: int, arguments: Sequence[str], on_run: Callable[[str], object]
) -> CacheResult:
    """Both servers `rounds` times in turns. arguments: flags of both. on_run: told of each run. Raises
    PageturnerError if a request fails."""
    found: list[list[RunSummary]] = [[], []]
    for number in range(rounds):
        for side, flags in enumerate((case.flags, case.other_flags)):
            summary = _serve(case, [*arguments, *flags], number)
            found[side].append(summary)
            on_run(f"{case.name}, {flags[0]}: {_output_rate(summary):.0f} output tokens/s")
    return CacheResult(case, _medians(found[0]), _medians(found[1]))


def _serve(case: CacheCase, flags: Sequence[str], number: int) -> RunSummary:
    with running_server(flags) as server:
        target = Target(server.target)
        model = asyncio.run(discover(target, case.workload.seed))
        workload = replace(
            case.workload,
            token_ids=model.token_ids,
            max_context=model.max_model_len,
            seed=case.workload.seed + number,
        )
        records: list[RequestRecord] = execute(
            Run(target, workload, case.concurrency, warmup=4), lambda _: None
        )
    for record in records:
        if record.outcome is not Outcome.OK:
            raise PageturnerError(f"request {record.index} was {record.outcome.value}: {record.error}")
    return summarize_run(records)


def _output_rate(summary: RunSummary) -> float:
    return summary.num_output_tokens / summary.duration_seconds


def _medians(summaries: Sequence[RunSummary]) -> ServedFigures:
    def median(figure: Callable[[RunSummary], float]) -> float:
        return statistics.median(map(figure, summaries))

    return ServedFigures(
        num_requests=summaries[0].num_ok,
        prompt_tokens=median(lambda s: s.num_prompt_tokens),
        computed_prompt_tokens=median(lambda s: s.num_prompt_tokens - s.num_cached_prompt_tokens),
        ttft_p50=median(lambda s: s.time_to_first_token.p50 if s.time_to_first_token else 0.0),
        output_tokens_per_second=median(_output_rate),
        num_preemptions=median(lambda s: s.num_swaps + s.num_recomputes + s.num_tail_reclaims),
    )
