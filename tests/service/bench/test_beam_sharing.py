"""The figure of blocks that beams save is that of their tables."""

from __future__ import annotations

import pytest
from support.fake_model import FakeModel

from pageturner.service.bench.beam_sharing import INSTRUCTIONS, WIDTHS, measure_sharing
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.outputs import SampledSequence, SchedulerOutput

BLOCK_SIZE = 2


class FakeSteps:
    """Counts, by its own reckoning, table entries and blocks of the steps in which all beams are computed."""

    def __init__(self) -> None:
        self.num_entries = self.num_blocks = 0
        self._model = FakeModel(200, 1, BLOCK_SIZE)

    def run(self, output: SchedulerOutput) -> tuple[tuple[SampledSequence, ...], float]:
        beams = [part for part in output.scheduled if part.samples and len(output.scheduled) > 1]
        self.num_entries += sum(len(part.block_table) for part in beams)
        self.num_blocks += len({block for part in beams for block in part.block_table})
        return self._model.run(output), 0.0


@pytest.mark.parametrize("width", WIDTHS)
def test_saved_blocks_are_those_that_several_tables_name(width: int) -> None:
    steps = FakeSteps()
    prompt = (0, 1, 2, 0, 1, 2)
    sharing = measure_sharing(steps, [(prompt, 12)], SchedulerOptions(), CacheOptions(200, BLOCK_SIZE), width)
    assert sharing.saved == pytest.approx(1 - steps.num_blocks / steps.num_entries)
    assert 0.2 < sharing.saved < 1 - 1 / width
    assert sharing.num_copies


def test_answers_are_as_long_as_those_of_alpaca() -> None:
    assert sum(length for _, length in INSTRUCTIONS) / len(INSTRUCTIONS) == pytest.approx(58.5)
