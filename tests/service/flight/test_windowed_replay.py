"""A record of a scheduler under a sliding window replays: it holds tables whose beginning was given back."""

from __future__ import annotations

import pytest
from support.core_harness import CoreHarness
from support.flight import record_of, recorded

from pageturner.policies import registry
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.outputs import NO_BLOCK
from pageturner.service.flight import flight_file
from pageturner.service.flight.replay import replay

AMPLE = 1 << 16


@pytest.mark.parametrize("num_steps", [AMPLE, 8])
def test_what_a_window_gave_back_replays(num_steps: int) -> None:
    """From the beginning, and from a checkpoint in the midst of it."""
    harness = CoreHarness(
        registry.default_policies(),
        num_blocks=7,
        block_size=2,
        num_host_blocks=4,
        options=SchedulerOptions(max_model_len=64, max_num_seqs=3, max_num_batched_tokens=6, watermark=0.0),
        window=3,
    )
    recorded(harness, num_steps)
    for seed in range(3):
        harness.submit((0, 1, 2, 0, 1, 2, 0, 1) * 2, max_tokens=16, seed=seed)
    for _ in range(30):
        harness.step()
    assert harness.scheduler.stats().num_window_blocks_total
    record = record_of(harness)
    read = flight_file.load(flight_file.dump(record))
    assert read == record
    assert read.start is not None
    if num_steps != AMPLE:
        assert read.start.checkpoint is not None
        requests = read.start.checkpoint.requests
        assert any(NO_BLOCK in sequence.table for request in requests for sequence in request.sequences)
    result = replay(read)
    assert result.difference is None
    assert result.num_entries == len(record.entries)
