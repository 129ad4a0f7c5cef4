"""Measures what this machine does, once, before the first request: the `Rates` that policies weigh.

Runs a handful of steps on blocks that no request owns yet. What they leave there is never read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pageturner.policies.views import Rates
from pageturner.service.core.drafting.draft_counts import LEAST_ROW_COST
from pageturner.service.core.options import MAX_SCORED_ROW_COST
from pageturner.service.core.outputs import (
    BlockCopies,
    BlockCopy,
    SampleRow,
    ScheduledSequence,
    SchedulerOutput,
    ScoreRun,
)
from pageturner.service.core.sampling_params import SamplingParams

_REPEATS = 4

_SCORED_REPEATS = 2
"""Few, since the start waits for them, and a budget need not be exact."""

_MORE_ROWS, _ROWS_CONTEXT, _ROW_REPEATS = 16, 256, 6
"""Of a step with drafts: enough for several tiles of a CPU's products, in the middle of a conversation."""


@dataclass(frozen=True, slots=True)
class CalibrationWork:
    """How much is measured, as far as the pools reach.

    chunk_tokens: of the prefill step, enough to tell its slope from the fixed cost of a step.
    context_tokens, context_rows: how far back how many rows of a step look. num_copied_blocks: of each swap.
    scored_rows: of a step whose rows all score, enough to be more than reading the weights.
    """

    chunk_tokens: int
    context_tokens: int
    context_rows: int
    num_copied_blocks: int
    scored_rows: int


CPU_WORK = CalibrationWork(
    chunk_tokens=32, context_tokens=1024, context_rows=1, num_copied_blocks=16, scored_rows=32
)
GPU_WORK = CalibrationWork(
    chunk_tokens=2048, context_tokens=16_384, context_rows=2048, num_copied_blocks=128, scored_rows=256
)
"""A GPU computes the tokens of the CPU's chunk in the time of one, and copies its blocks before the bus is
at speed. One row that looks back waits for keys that all the rows of a prompt would share."""


@dataclass(frozen=True, slots=True)
class CalibrationTarget:
    """What is measured: the model's forward, the cache's block traffic, and the sizes of both pools.

    forward, apply: must have finished when they return. timer: seconds.
    """

    forward: Callable[[SchedulerOutput], object]
    apply: Callable[[BlockCopies], object]
    timer: Callable[[], float]
    block_size: int
    block_bytes: int
    num_blocks: int
    num_host_blocks: int
    max_num_batched_tokens: int
    max_model_len: int
    work: CalibrationWork = CPU_WORK


def measure_rates(target: CalibrationTarget) -> Rates:
    """The fastest of some steps of each kind, since start-up waits for them and noise only ever adds.

    Without host blocks the copy rates keep their defaults.
    """
    capacity = min(target.num_blocks * target.block_size, target.max_model_len)
    wanted = target.work
    chunk = max(2, min(wanted.chunk_tokens, capacity, target.max_num_batched_tokens))
    rows = max(1, min(wanted.context_rows, chunk, capacity // 2))
    context = min(wanted.context_tokens, capacity - rows)
    target.forward(_step(target, chunk))  # the first run pays for caches
    one = _seconds(target, lambda: target.forward(_step(target, 1)))
    many = _seconds(target, lambda: target.forward(_step(target, chunk)))
    far = _seconds(target, lambda: target.forward(_step(target, rows, start=context)))
    a_token = max((many - one) / (chunk - 1), 1e-9)
    near = one + (rows - 1) * a_token
    rates = Rates(
        block_bytes=target.block_bytes,
        prefill_seconds_fixed=max(one - a_token, 0.0),
        prefill_seconds_per_token=a_token,
        prefill_seconds_per_token_context=max((far - near) / max(rows * context, 1), 0.0),
    )
    num_copied = min(wanted.num_copied_blocks, target.num_blocks, target.num_host_blocks)
    if not num_copied:
        return rates
    pairs = tuple(BlockCopy(block, block) for block in range(num_copied))
    copied_bytes = num_copied * target.block_bytes
    out = _seconds(target, lambda: target.apply(BlockCopies(swap_outs=pairs)))
    back = _seconds(target, lambda: target.apply(BlockCopies(swap_ins=pairs)))
    return replace(
        rates,
        swap_out_bytes_per_second=copied_bytes / out,
        swap_in_bytes_per_second=copied_bytes / back,
    )


def measure_row_cost(target: CalibrationTarget) -> float:
    """What one more row of a sequence, its logits included, adds to a step: a share of a step of one row."""
    capacity = min(target.num_blocks * target.block_size, target.max_model_len)
    num_more = min(_MORE_ROWS, capacity - 1, target.max_num_batched_tokens - 1)
    if num_more < 1:
        return 1.0
    start = min(_ROWS_CONTEXT, capacity - 1 - num_more)
    steps = [_step(target, rows, start, is_sampled=True) for rows in (1, 1 + num_more)]
    for step in steps:
        target.forward(step)  # the first run pays for caches
    # In turns, so that a busy neighbour meets both.
    one = many = float("inf")
    for _ in range(_ROW_REPEATS):
        one = min(one, _once(target, steps[0]))
        many = min(many, _once(target, steps[1]))
    return max(LEAST_ROW_COST, min(1.0, (many / one - 1.0) / num_more))


def measure_scored_row_cost(target: CalibrationTarget) -> float:
    """What a row of a chunk costs whose logits score a known token, beside a row that wants none."""
    capacity = min(target.num_blocks * target.block_size, target.max_model_len)
    rows = min(target.work.scored_rows, capacity, target.max_num_batched_tokens)
    plain = _step(target, rows)
    (part,) = plain.scheduled
    scored = replace(plain, scheduled=(replace(part, scored=(ScoreRun(0, 0, 0, part.token_ids, 0),)),))
    target.forward(scored)  # the first run pays for caches
    without = with_scores = float("inf")
    for _ in range(_SCORED_REPEATS):
        without = min(without, _once(target, plain))
        with_scores = min(with_scores, _once(target, scored))
    return max(1.0, min(MAX_SCORED_ROW_COST, with_scores / without))


def _once(target: CalibrationTarget, step: SchedulerOutput) -> float:
    started = target.timer()
    target.forward(step)
    return max(target.timer() - started, 1e-9)


def _seconds(target: CalibrationTarget, work: Callable[[], object]) -> float:
    def once() -> float:
        started = target.timer()
        work()
        return max(target.timer() - started, 1e-9)

    return min(once() for _ in range(_REPEATS))


def _step(
    target: CalibrationTarget, num_tokens: int, start: int = 0, *, is_sampled: bool = False
) -> SchedulerOutput:
    """is_sampled: logits of every row are wanted, as of drafts, else of none."""
    num_blocks = -(-(start + num_tokens) // target.block_size)
    sequence = ScheduledSequence(
        seq_id=-1,
        request_id="calibration",
        epoch=0,
        token_ids=(0,) * num_tokens,
        start=start,
        write_start=start,
        block_table=tuple(range(num_blocks)),
        samples=(SampleRow(-1, 0, 0, 0, SamplingParams()),) if is_sampled else (),
        num_drafts=num_tokens - 1 if is_sampled else 0,
    )
    return SchedulerOutput(step_id=-1, scheduled=(sequence,))
