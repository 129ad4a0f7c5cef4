"""`pageturner bench memory`: the PagedAttention paper's study (Kwon et al., 2023) on this scheduler and pool.

reservation   how KV memory is used, and what batch and throughput that gives, when it is set aside in
              runs and when it is paged; same budget, same trace
sharing       the blocks that the choices of one prompt save
block size    what the last block of each sequence wastes
copies        a step in which many choices part at once (`copy_on_write`)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from pageturner.loadtest.workload.lengths import draw_pair
from pageturner.loadtest.workload.named import NAMED
from pageturner.service.bench.memory_study import (
    StepModel,
    StudyRun,
    StudySetting,
    TracedRequest,
    run_contender,
)
from pageturner.service.bench.reservations import DEMANDS

PAGING = "paging"
CHOICES = (2, 4, 6)
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """contenders: the contiguous ones, then paging. sharing: paging with n choices a request, by n.
    block_sizes: paging, by block size."""

    contenders: tuple[StudyRun, ...]
    sharing: dict[int, StudyRun]
    block_sizes: tuple[StudyRun, ...]

    @property
    def speedup(self) -> float:
        """Paging's throughput over that of reservation at the maximum length, while requests wait."""
        return self.contenders[-1].tokens_per_second / self.contenders[0].tokens_per_second

    @property
    def total_speedup(self) -> float:
        """The same to the end of the last request, as batches run empty."""
        return self.contenders[-1].total_tokens_per_second / self.contenders[0].total_tokens_per_second


def chat_trace(
    num_requests: int, seed: int, max_model_len: int, choices: int = 1
) -> tuple[TracedRequest, ...]:
    """First questions and answers of ShareGPT's lengths, cut to the longest sequence."""
    chat, rng = NAMED["chat"], random.Random(seed)
    trace = []
    for _ in range(num_requests):
        pairs = [
            draw_pair(rng, chat.prompt_lengths, chat.output_lengths, chat.correlation) for _ in range(choices)
        ]
        prompt = min(pairs[0][0], max_model_len - 1)
        trace.append(TracedRequest(prompt, tuple(min(max_model_len - prompt, answer) for _, answer in pairs)))
    return tuple(trace)


def num_runs() -> int:
    """How many runs `study_memory` reports."""
    return len(DEMANDS) + 1 + len(CHOICES) + len(BLOCK_SIZES)


def study_memory(
    setting: StudySetting,
    steps: StepModel,
    modelled: StepModel,
    seed: int,
    on_run: Callable[[StudyRun], object],
) -> MemoryReport:
    """setting: with the trace of one choice a request. steps: of the contenders. modelled: of sharing and
    block sizes, where time plays no part. seed: of the traces of several choices."""
    contenders = [*DEMANDS.items(), (PAGING, None)]
    runs = [
        _told(run_contender(name, setting, steps, demand, BLOCK_SIZE), on_run) for name, demand in contenders
    ]
    sharing: dict[int, StudyRun] = {}
    for choices in CHOICES:
        num_requests = max(1, len(setting.trace) // choices)
        trace = chat_trace(num_requests, seed, setting.limits.max_model_len, choices)
        run = run_contender(f"{choices} choices", replace(setting, trace=trace), modelled, None, BLOCK_SIZE)
        sharing[choices] = _told(run, on_run)
    block_sizes = tuple(
        _told(run_contender(f"blocks of {size}", setting, modelled, None, size), on_run)
        for size in BLOCK_SIZES
    )
    return MemoryReport(tuple(runs), sharing, block_sizes)


def _told(run: StudyRun, on_run: Callable[[StudyRun], object]) -> StudyRun:
    on_run(run)
    return run
