"""What a step costs in instructions, which no neighbour slows: as much for each decode, few or many."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from pageturner.service.bench.scheduler import BLOCK_SIZE, loaded_scheduler, null_model
from pageturner.service.core.scheduler import Scheduler

FEW, MANY = 16, 256


def instructions(scheduler: Scheduler, now: float) -> int:
    """Bytecodes of the next `schedule` and `update`, with all that they call."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        output = scheduler.schedule(now)
    finally:
        sys.settrace(before)
    sampled = null_model(output)
    sys.settrace(trace)
    try:
        scheduler.update(output, sampled, now)
    finally:
        sys.settrace(before)
    return count


def of_a_step(num_running: int) -> int:
    """The least of three steps behind each other, so that one which folds rates does not count."""
    scheduler = loaded_scheduler(num_running, 0, 2 * BLOCK_SIZE, caches_prefixes=True)
    for step in range(4):  # prompts, and decodes within their next block
        output = scheduler.schedule(step / 1000)
        assert len(output.scheduled) == num_running
        scheduler.update(output, null_model(output), step / 1000)
    return min(instructions(scheduler, step / 1000) for step in range(4, 7))


def test_a_decode_costs_as_much_among_many_as_among_few() -> None:
    few, many = of_a_step(FEW), of_a_step(MANY)
    shared = few - (many - few) * FEW / (MANY - FEW)
    """Of a step without decodes, if each decode costs the same."""
    assert 0 < shared < few / 2
    assert of_a_step(4 * FEW) == pytest.approx(shared + (few - shared) * 4, rel=0.001)


def test_a_look_at_all_for_each_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the search of a list would be."""
    update = Scheduler.update

    def planted(self: Scheduler, output: Any, *arguments: Any) -> Any:
        for _ in output.scheduled:
            for _ in self.state.running:
                pass
        return update(self, output, *arguments)

    monkeypatch.setattr(Scheduler, "update", planted)
    with pytest.raises(AssertionError):
        test_a_decode_costs_as_much_among_many_as_among_few()
