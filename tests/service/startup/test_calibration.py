"""Rates measured on a machine whose costs are known."""

from __future__ import annotations

import pytest

from pageturner.policies.views import Rates
from pageturner.service.core.outputs import BlockCopies, SchedulerOutput
from pageturner.service.startup.calibration import (
    CPU_WORK,
    GPU_WORK,
    CalibrationTarget,
    CalibrationWork,
    measure_rates,
    measure_row_cost,
    measure_scored_row_cost,
)

FIXED, A_TOKEN, A_CONTEXT, A_COPY = 0.01, 0.002, 3e-6, 0.004


class KnownMachine:
    """Its time passes only by working, at known rates; every block touched is checked to exist."""

    def __init__(self, num_blocks: int, num_host_blocks: int) -> None:
        self.now = 0.0
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.steps: set[tuple[int, int]] = set()
        """(rows, context before them) of each step."""
        self.num_copied = 0

    def forward(self, output: SchedulerOutput) -> None:
        (sequence,) = output.scheduled
        assert sequence.end <= len(sequence.block_table) * 16
        assert max(sequence.block_table) < self.num_blocks
        self.steps.add((output.num_tokens, sequence.start))
        self.now += FIXED + A_TOKEN * output.num_tokens + A_CONTEXT * output.num_tokens * sequence.start

    def apply(self, copies: BlockCopies) -> None:
        for copy in copies.swap_outs + copies.swap_ins:
            assert copy.source < self.num_blocks
            assert copy.destination < self.num_host_blocks
        self.num_copied = len(copies.swap_outs + copies.swap_ins)
        self.now += A_COPY * (len(copies.swap_outs) + 2 * len(copies.swap_ins))

    def measure(self, workload: CalibrationWork = CPU_WORK, **changes: int) -> Rates:
        sizes = {"max_num_batched_tokens": 512, "max_model_len": 2048, **changes}
        return measure_rates(
            CalibrationTarget(
                forward=self.forward,
                apply=self.apply,
                timer=lambda: self.now,
                block_size=16,
                block_bytes=4096,
                num_blocks=self.num_blocks,
                num_host_blocks=self.num_host_blocks,
                work=workload,
                **sizes,
            )
        )


@pytest.mark.parametrize("workload", [CPU_WORK, GPU_WORK])
def test_the_workload_says_what_is_tried(workload: CalibrationWork) -> None:
    machine = KnownMachine(num_blocks=4096, num_host_blocks=4096)
    machine.measure(workload, max_num_batched_tokens=8192, max_model_len=65_536)
    assert machine.steps == {
        (1, 0),
        (workload.chunk_tokens, 0),
        (workload.context_rows, workload.context_tokens),
    }
    assert machine.num_copied == workload.num_copied_blocks


@pytest.mark.parametrize("workload", [CPU_WORK, GPU_WORK])
def test_known_costs_are_found(workload: CalibrationWork) -> None:
    rates = KnownMachine(num_blocks=128, num_host_blocks=64).measure(workload)
    assert rates.prefill_seconds_fixed == pytest.approx(FIXED)
    assert rates.prefill_seconds_per_token == pytest.approx(A_TOKEN)
    assert rates.prefill_seconds_per_token_context == pytest.approx(A_CONTEXT)
    assert rates.swap_out_bytes_per_second == pytest.approx(4096 / A_COPY)
    assert rates.swap_in_bytes_per_second == pytest.approx(4096 / A_COPY / 2)
    assert rates.block_bytes == 4096


@pytest.mark.parametrize("workload", [CPU_WORK, GPU_WORK])
@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_a_tiny_pool_is_measured_within_its_bounds(num_blocks: int, workload: CalibrationWork) -> None:
    machine = KnownMachine(num_blocks, num_host_blocks=1)
    rates = machine.measure(workload, max_model_len=20, max_num_batched_tokens=1)
    assert rates.prefill_seconds_per_token == pytest.approx(A_TOKEN)


def test_without_a_host_pool_nothing_is_copied() -> None:
    rates = KnownMachine(num_blocks=8, num_host_blocks=0).measure()
    assert rates.swap_out_bytes_per_second == Rates().swap_out_bytes_per_second


@pytest.mark.parametrize(("max_model_len", "fixed"), [(2048, 1.0), (2048, 30.0), (4, 1.0)])
def test_the_cost_of_a_row_is_its_share_of_a_step_of_one(max_model_len: int, fixed: float) -> None:
    machine = KnownMachine(num_blocks=64, num_host_blocks=0)

    def forward(output: SchedulerOutput) -> None:
        (sequence,) = output.scheduled
        assert sequence.end <= max_model_len
        assert sequence.num_drafts == len(sequence.token_ids) - 1
        assert len(sequence.samples) == 1
        machine.now += fixed + 0.5 * output.num_tokens

    target = CalibrationTarget(
        forward=forward,
        apply=machine.apply,
        timer=lambda: machine.now,
        block_size=16,
        block_bytes=4096,
        num_blocks=64,
        num_host_blocks=0,
        max_num_batched_tokens=512,
        max_model_len=max_model_len,
    )
    assert measure_row_cost(target) == pytest.approx(0.5 / (fixed + 0.5))


@pytest.mark.parametrize("workload", [CPU_WORK, GPU_WORK])
@pytest.mark.parametrize("max_model_len", [2048, 4, 1])
@pytest.mark.parametrize(("added", "cost"), [(0.0, 1.0), (0.25, 1.5), (-0.1, 1.0), (100.0, 16.0)])
def test_the_cost_of_a_scored_row_is_a_multiple_of_a_plain_one(
    added: float, cost: float, max_model_len: int, workload: CalibrationWork
) -> None:
    machine = KnownMachine(num_blocks=64, num_host_blocks=0)
    rows = []

    def forward(output: SchedulerOutput) -> None:
        (sequence,) = output.scheduled
        assert not sequence.samples
        assert sequence.end <= max_model_len
        rows.append((output.num_tokens, len(sequence.scored_rows)))
        machine.now += 0.5 * output.num_tokens + added * len(sequence.scored_rows)

    target = CalibrationTarget(
        forward=forward,
        apply=machine.apply,
        timer=lambda: machine.now,
        block_size=16,
        block_bytes=4096,
        num_blocks=64,
        num_host_blocks=0,
        max_num_batched_tokens=512,
        max_model_len=max_model_len,
        work=workload,
    )
    assert measure_scored_row_cost(target) == pytest.approx(cost)
    most = min(workload.scored_rows, max_model_len)
    assert set(rows) == {(most, 0), (most, most)}
