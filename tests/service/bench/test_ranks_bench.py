"""What `bench ranks` measures is a step as the service has it, and its estimates are sums done by hand."""

from __future__ import annotations

import pytest
from support.scripted import recording_logger

from pageturner.service.bench.link_estimate import LINKS, Shape, estimate_step
from pageturner.service.bench.ranks import BLOCK_SIZE, CONTEXT, decodes, measure_steps
from pageturner.service.config import cache_directory
from pageturner.service.model.tensor_parallel.torch_collectives import TWO_STEP_BYTES


def test_its_decodes_follow_each_other() -> None:
    for step_id in (0, 15, 16, 40):
        for part, before in zip(
            decodes(3, step_id + 1).scheduled, decodes(3, step_id).scheduled, strict=True
        ):
            assert part.start == part.write_start == before.end == CONTEXT + step_id + 1
            assert part.block_table[: len(before.block_table)] == before.block_table
            assert len(part.block_table) == -(-part.end // BLOCK_SIZE)
    tables = [set(part.block_table) for part in decodes(3, 0).scheduled]
    assert not tables[0] & tables[1]


def test_what_a_rank_receives_by_hand() -> None:
    shape = Shape("one layer", 1, 100, 1000)
    # Three sums of 4 rows x 100 numbers x 2 bytes from each other rank, the others' part of 4 rows of logits.
    small = estimate_step(shape, 4, 4)
    assert small.received_bytes == 3 * 3 * 800 + 4 * 1000 * 2 * 3 // 4
    assert small.num_collectives == 4
    rows = TWO_STEP_BYTES // 200 + 1
    large = estimate_step(shape, 4, rows)
    assert large.received_bytes == 3 * (2 * 3 * rows * 200 // 4) + rows * 1000 * 2 * 3 // 4
    assert large.num_collectives == 7
    # Of two ranks each receives the same either way, and in one step.
    assert estimate_step(shape, 2, rows).num_collectives == 4
    assert small.microseconds[LINKS[0].name] == pytest.approx(small.received_bytes / LINKS[0].bandwidth * 1e6)


@pytest.mark.slow
def test_a_step_of_real_ranks_is_measured() -> None:
    (cost,) = measure_steps(2, 8, cache_directory(), recording_logger()[0], counts=(4,))
    assert cost.num_decodes == 4
    assert 0 < cost.step_bytes < cost.whole_bytes
    assert min(cost.encode, cost.decode, cost.exchange, cost.addition) > 0
