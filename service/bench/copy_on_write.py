"""What copy-on-write costs a step: all of a batch's choices part at once, on the real model and pool."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

from pageturner.policies import registry
from pageturner.policies.views import Rates
from pageturner.service.bench.memory_study import RealSteps
from pageturner.service.bench.scheduler import NullText
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.outputs import BlockCopies, SchedulerOutput
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.scheduler import Scheduler

NUM_DECODES = 6
"""Tokens of each answer: one with the prompt, one in the step that copies, the rest in steps that do not."""


@dataclass(frozen=True, slots=True)
class CopyCost:
    """Milliseconds, medians. copy: of the block copies alone, within the step that makes them. plain_step: of
    the steps that follow, which decode as many sequences."""

    num_copies: int
    num_sequences: int
    block_bytes: int
    copy_milliseconds: float
    step_milliseconds: float
    plain_step_milliseconds: float


def measure_copies(
    steps: RealSteps, limits: SchedulerOptions, cache: CacheOptions, num_copies: int, num_rounds: int
) -> CopyCost:
    """`num_copies` requests of two choices whose prompts end in the middle of a block: the first write of
    either choice copies it. limits, cache: of the model; they must allow so many sequences at once, and
    their prompts in one step."""
    num_prompt = cache.block_size + max(1, cache.block_size // 2)
    copying: list[tuple[float, float]] = []
    plain: list[float] = []
    for round_number in range(num_rounds + 1):
        scheduler = Scheduler(limits, cache, registry.default_policies(), NullText(), Rates())
        for index in range(num_copies):
            prompt = tuple(100 + (index + 7 * position) % 500 for position in range(num_prompt))
            params = SamplingParams(n=2, max_tokens=NUM_DECODES, ignore_eos=True, temperature=1.0)
            scheduler.add_request(NewRequest(f"{index}", prompt, params, seed=index, arrival_time=0.0))
        while output := scheduler.schedule(0.0):
            copied, seconds = _run(steps, scheduler, output)
            if round_number == 0:
                continue  # the first round warms up
            if len(output.block_copies.copies) == num_copies:
                copying.append((copied, seconds))
            elif all(part.start > num_prompt for part in output.scheduled):
                plain.append(seconds)
    return CopyCost(
        num_copies,
        2 * num_copies,
        steps.kv_cache.layout.block_bytes,
        copy_milliseconds=1e3 * statistics.median(copied for copied, _ in copying),
        step_milliseconds=1e3 * statistics.median(seconds for _, seconds in copying),
        plain_step_milliseconds=1e3 * statistics.median(plain),
    )


def _run(steps: RealSteps, scheduler: Scheduler, output: SchedulerOutput) -> tuple[float, float]:
    """Seconds of the step's copies, and of the step with them."""
    started = time.perf_counter()
    steps.kv_cache.apply(output.block_copies)
    copied = time.perf_counter() - started
    sampled, seconds = steps.run(replace(output, block_copies=BlockCopies()))
    scheduler.update(output, sampled, 0.0)
    return copied, copied + seconds
