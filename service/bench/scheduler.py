"""`pageturner bench scheduler`: what one step costs in the core alone, with a model that takes no time.

Every running request decodes; with `num_waiting`, as many more wait behind a full batch. A figure is the
time of `schedule` and of `update` together, in microseconds, the median of the steps measured; the policies'
share of it includes the core's checks of their answers.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from pageturner.policies import registry
from pageturner.policies.views import Rates
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.outputs import SampledSequence, SampledToken, SchedulerOutput, TextDelta
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.scheduler import Scheduler

BATCH_SIZES = (1, 16, 64, 256, 1024, 4096)
WAITING_FOR_EACH = (0, 10)
NUM_STEPS = 200
NUM_LOOKS = 11
QUESTIONS = ("queue_key", "admission", "batch_split", "victim_order", "reclaim", "eviction_score")
BLOCK_SIZE = 16
PROMPT_TOKENS = 64
NO_TEXT = TextDelta("")

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StepCost:
    """Microseconds of one step with `num_running` decodes, and what each of its halves takes: medians, but
    mean_step_microseconds is the mean over whole blocks of steps, the rare ones that end a block included.
    look_microseconds: of telling requests and tables to a live view between two steps, at the least."""

    num_running: int
    num_waiting: int
    caches_prefixes: bool
    schedule_microseconds: float
    update_microseconds: float
    step_microseconds: float
    policy_microseconds: float
    mean_step_microseconds: float
    look_microseconds: float


class NullText:
    """A stop condition for requests without text."""

    def start(self, seq_id: int, request: NewRequest) -> None:
        return None

    def append(self, seq_id: int, token_id: int, *, may_stop: bool, is_stop_token: bool) -> TextDelta:
        return NO_TEXT

    def finish(self, seq_id: int) -> str:
        return ""


def num_measurements(batch_sizes: Sequence[int]) -> int:
    """How many costs `measure_scheduler` yields."""
    return 2 * len(WAITING_FOR_EACH) * len(batch_sizes)


def measure_scheduler(batch_sizes: tuple[int, ...] = BATCH_SIZES) -> Iterator[StepCost]:
    """The cost of a step at each batch size, alone and with ten times as many waiting, both with a prefix
    cache and without."""
    for caches_prefixes in (True, False):
        for waiting_for_each in WAITING_FOR_EACH:
            for num_running in batch_sizes:
                num_steps = max(20, min(NUM_STEPS, 50_000 // num_running))
                yield measure_step(num_running, waiting_for_each * num_running, num_steps, caches_prefixes)


def measure_step(
    num_running: int, num_waiting: int, num_steps: int, caches_prefixes: bool = True
) -> StepCost:
    """Median over `num_steps` steps, after as many tokens as a block holds to warm up."""
    max_tokens = 2 * BLOCK_SIZE + num_steps
    scheduler = loaded_scheduler(num_running, num_waiting, max_tokens, caches_prefixes)
    policy_clock = _PolicyClock(scheduler)
    now = 0.0
    while len(scheduler.state.running) < num_running or now < BLOCK_SIZE:
        now += 1.0
        output = scheduler.schedule(now)
        scheduler.update(output, null_model(output), now)
    schedule_seconds, update_seconds, policy_seconds = [], [], []
    gc.collect()
    gc.disable()
    try:
        for _ in range(num_steps):
            now += 1.0
            policy_clock.seconds = 0.0
            started = time.perf_counter()
            output = scheduler.schedule(now)
            scheduled = time.perf_counter()
            sampled = null_model(output)
            computed = time.perf_counter()
            scheduler.update(output, sampled, now)
            updated = time.perf_counter()
            schedule_seconds.append(scheduled - started)
            update_seconds.append(updated - computed)
            policy_seconds.append(policy_clock.seconds)
            assert len(output.scheduled) == num_running
    finally:
        gc.enable()
    schedule, update, policy = (
        statistics.median(seconds) * 1e6 for seconds in (schedule_seconds, update_seconds, policy_seconds)
    )
    num_whole = len(schedule_seconds) // BLOCK_SIZE * BLOCK_SIZE
    mean = (sum(schedule_seconds[:num_whole]) + sum(update_seconds[:num_whole])) / num_whole * 1e6
    return StepCost(
        num_running,
        num_waiting,
        caches_prefixes,
        schedule,
        update,
        schedule + update,
        policy,
        mean,
        _look_seconds(scheduler, now) * 1e6,
    )


def _look_seconds(scheduler: Scheduler, now: float) -> float:
    """Of one look at it, the least of a few: a busy neighbour's turn is longer than any."""
    seconds = []
    for _ in range(NUM_LOOKS):
        started = time.perf_counter()
        scheduler.inspect(now)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def cache_microseconds(costs: Iterable[StepCost]) -> dict[int, float]:
    """What a prefix cache that nothing hits adds to a step, on average, by running requests: it names each
    block that fills. Of the costs without waiting requests."""
    means = {
        (cost.num_running, cost.caches_prefixes): cost.mean_step_microseconds
        for cost in costs
        if not cost.num_waiting
    }
    return {
        num_running: mean - means[num_running, False]
        for (num_running, caches_prefixes), mean in means.items()
        if caches_prefixes and (num_running, False) in means
    }


class _PolicyClock:
    """Adds up the time that a scheduler spends on its policies."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.seconds = 0.0
        for question in QUESTIONS:
            setattr(scheduler.policy_host, question, self._timed(getattr(scheduler.policy_host, question)))

    def _timed(self, ask: Callable[P, R]) -> Callable[P, R]:
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            started = time.perf_counter()
            try:
                return ask(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


def loaded_scheduler(num_running: int, num_waiting: int, max_tokens: int, caches_prefixes: bool) -> Scheduler:
    """A scheduler with so many requests queued, of which `num_running` fit at once."""
    num_blocks = num_running * -(-(PROMPT_TOKENS + max_tokens) // BLOCK_SIZE)
    options = SchedulerOptions(
        max_model_len=PROMPT_TOKENS + max_tokens,
        max_num_seqs=num_running,
        max_num_batched_tokens=PROMPT_TOKENS * num_running,  # all start in one step, whatever decodes
        max_waiting=num_running + num_waiting,
        max_queued_tokens=PROMPT_TOKENS * (num_running + num_waiting),
        watermark=0.0,
        starvation_seconds=1e9,
    )
    cache = CacheOptions(num_blocks, BLOCK_SIZE, enable_prefix_caching=caches_prefixes)
    scheduler = Scheduler(options, cache, registry.default_policies(), NullText(), Rates())
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for number in range(num_running + num_waiting):
        prompt = tuple(number * PROMPT_TOKENS + position for position in range(PROMPT_TOKENS))
        scheduler.add_request(NewRequest(f"request-{number}", prompt, params, number, 0.0))
    return scheduler


def null_model(output: SchedulerOutput) -> tuple[SampledSequence, ...]:
    """The same token for every row, in no time."""
    token = (SampledToken(7),)
    return tuple(
        SampledSequence(row.seq_id, row.epoch, token) for part in output.scheduled for row in part.samples
    )
