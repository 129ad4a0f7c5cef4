"""`pageturner bench scheduler`: what one step costs in the core alone, with a model that takes no time.

Every running request decodes; with `num_waiting`, as many more wait behind a full batch. A figure is the
time of `schedule` and of `update` together, in microseconds, the median of the steps measured.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass

from pageturner.policies import registry
from pageturner.policies.views import Rates
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.outputs import SampledSequence, SampledToken, SchedulerOutput, TextDelta
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.scheduler import Scheduler

BATCH_SIZES = (1, 16, 64, 256, 1024)
NUM_WAITING = (0, 256)
BLOCK_SIZE = 16
PROMPT_TOKENS = 64
NO_TEXT = TextDelta("")


@dataclass(frozen=True, slots=True)
class StepCost:
    """Microseconds of one step with `num_running` decodes, and what each of its halves takes."""

    num_running: int
    num_waiting: int
    schedule_microseconds: float
    update_microseconds: float
    step_microseconds: float


class _NoText:
    """A stop condition for requests without text."""

    def start(self, seq_id: int, request: NewRequest) -> None:
        return None

    def append(self, seq_id: int, token_id: int, *, may_stop: bool, is_stop_token: bool) -> TextDelta:
        return NO_TEXT

    def finish(self, seq_id: int) -> str:
        return ""


def measure_scheduler(num_steps: int = 200) -> tuple[StepCost, ...]:
    """The cost of a step at each of BATCH_SIZES, with nobody waiting and with a queue behind."""
    return tuple(
        measure_step(num_running, num_waiting, num_steps)
        for num_waiting in NUM_WAITING
        for num_running in BATCH_SIZES
    )


def measure_step(num_running: int, num_waiting: int, num_steps: int) -> StepCost:
    """Median over `num_steps` steps, after as many tokens as a block holds to warm up."""
    warmup = BLOCK_SIZE
    max_tokens = warmup + num_steps + 2
    blocks_each = -(-(PROMPT_TOKENS + max_tokens) // BLOCK_SIZE)
    scheduler = _loaded_scheduler(num_running, num_waiting, max_tokens, num_running * blocks_each)
    now = 0.0
    while len(scheduler.state.running) < num_running or now < warmup:
        now += 1.0
        output = scheduler.schedule(now)
        scheduler.update(output, _null_model(output), now)
    schedule_seconds, update_seconds = [], []
    gc.collect()
    gc.disable()
    try:
        for _ in range(num_steps - warmup):
            now += 1.0
            started = time.perf_counter()
            output = scheduler.schedule(now)
            scheduled = time.perf_counter()
            sampled = _null_model(output)
            computed = time.perf_counter()
            scheduler.update(output, sampled, now)
            updated = time.perf_counter()
            schedule_seconds.append(scheduled - started)
            update_seconds.append(updated - computed)
            assert len(output.scheduled) == num_running
    finally:
        gc.enable()
    schedule, update = statistics.median(schedule_seconds) * 1e6, statistics.median(update_seconds) * 1e6
    return StepCost(num_running, num_waiting, schedule, update, schedule + update)


def _loaded_scheduler(num_running: int, num_waiting: int, max_tokens: int, num_blocks: int) -> Scheduler:
    options = SchedulerOptions(
        max_model_len=PROMPT_TOKENS + max_tokens,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(4096, num_running),
        max_waiting=num_running + num_waiting,
        watermark=0.0,
        starvation_seconds=1e9,
    )
    scheduler = Scheduler(
        options, CacheOptions(num_blocks, BLOCK_SIZE), registry.default_policies(), _NoText(), Rates()
    )
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for number in range(num_running + num_waiting):
        prompt = tuple(number * PROMPT_TOKENS + position for position in range(PROMPT_TOKENS))
        scheduler.add_request(NewRequest(f"request-{number}", prompt, params, number, 0.0))
    return scheduler


def _null_model(output: SchedulerOutput) -> tuple[SampledSequence, ...]:
    token = (SampledToken(7),)
    return tuple(
        SampledSequence(row.seq_id, row.epoch, token) for part in output.scheduled for row in part.samples
    )
