"""What the engine's thread does for a step beside the model: its parts, with a model that takes no time.

Every request decodes. `pageturner bench scheduler` prints it below the scheduler's own figures.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import structlog
import torch

from pageturner.policies.views import Rates
from pageturner.service.bench.scheduler import BLOCK_SIZE, loaded_scheduler, measure_step, null_model
from pageturner.service.core.clock import MonotonicClock
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.outputs import (
    BlockCopies,
    SampledSequence,
    ScheduledSequence,
    SchedulerOutput,
)
from pageturner.service.engine.api import AcceptedEvent
from pageturner.service.engine.engine import Engine
from pageturner.service.engine.metrics import Metrics
from pageturner.service.engine.options import EngineOptions
from pageturner.service.flight.recorder import FlightRecorder
from pageturner.service.flight.records import Setting
from pageturner.service.model.batch import build_batch

SIZES = (1, 16, 64, 256)
NUM_STEPS = 200


@dataclass(frozen=True, slots=True)
class EngineStepCost:
    """Microseconds of one step with `num_running` decodes, all but the model's.

    scheduler: its schedule and update. engine: of the loop around them, counters and latencies. recorder: the
    flight record. batch: the step's arrays for the model, on a CPU. Text and streams are not in it.
    """

    num_running: int
    scheduler_microseconds: float
    engine_microseconds: float
    recorder_microseconds: float
    batch_microseconds: float


class _NullSteps:
    """A `StepComputation` without a model, which adds up what is not the engine's."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.started: SchedulerOutput | None = None

    def start(self, output: SchedulerOutput) -> None:
        self.started = output

    def finish(self) -> tuple[SampledSequence, ...]:
        assert self.started is not None, "no step is under way"
        begun = time.perf_counter()
        sampled = null_model(self.started)
        self.seconds += time.perf_counter() - begun
        return sampled

    def copy_blocks(self, copies: BlockCopies) -> None: ...

    def close(self) -> None: ...


def measure_engine_steps(
    sizes: tuple[int, ...] = SIZES, num_steps: int = NUM_STEPS
) -> Iterator[EngineStepCost]:
    """The cost of a step at each number of decodes, medians of `num_steps`."""
    for num_running in sizes:
        scheduler = measure_step(num_running, 0, num_steps).step_microseconds
        bare, batch = _measure(num_running, num_steps, is_recorded=False)
        recorded, _ = _measure(num_running, num_steps, is_recorded=True)
        yield EngineStepCost(num_running, scheduler, bare - scheduler, recorded - bare, batch)


def _measure(num_running: int, num_steps: int, *, is_recorded: bool) -> tuple[float, float]:
    """Microseconds of the engine's step, and of the step's arrays."""
    scheduler = loaded_scheduler(num_running, 0, 2 * BLOCK_SIZE + num_steps, caches_prefixes=True)
    if is_recorded:
        setting = Setting("bench", SchedulerOptions(), CacheOptions(1, BLOCK_SIZE), Rates(), depth=0)
        FlightRecorder(scheduler, setting, EngineOptions().flight_recorder_steps)
    steps, metrics = _NullSteps(), Metrics()
    for request in scheduler.state.requests.values():
        accepted = AcceptedEvent(request.request_id, 0, request.num_prompt_tokens, request.max_tokens)
        metrics.accepted(accepted, 0.0)
    logger = structlog.wrap_logger(structlog.testing.CapturingLogger())
    clock = MonotonicClock()
    engine = Engine(scheduler, steps, clock=clock, options=EngineOptions(), metrics=metrics, logger=logger)
    for _ in range(BLOCK_SIZE):
        engine.step()
    whole, arrays = [], []
    gc.collect()
    gc.disable()
    try:
        for _ in range(num_steps):
            steps.seconds = 0.0
            begun = time.perf_counter()
            engine.step()
            whole.append(time.perf_counter() - begun - steps.seconds)
            assert steps.started is not None, "a step was made"
            begun = time.perf_counter()
            build_batch(steps.started, BLOCK_SIZE, torch.device("cpu"), _known)
            arrays.append(time.perf_counter() - begun)
    finally:
        gc.enable()
    return statistics.median(whole) * 1e6, statistics.median(arrays) * 1e6


def _known(sequence: ScheduledSequence) -> int:
    raise AssertionError(f"depth 0 knows every token of sequence {sequence.seq_id}")
