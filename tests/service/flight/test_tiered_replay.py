"""A record of a scheduler with tiers replays: what the disk held and did is an input like others."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.core_harness import CoreHarness
from support.fake_disk import FakeDisk
from support.flight import record_of, recorded
from support.scheduler_machine import scheduler_options
from support.tier_machine import FAST

from pageturner.policies import registry
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.errors import InvalidArgument
from pageturner.service.flight import flight_file
from pageturner.service.flight.explain import explain
from pageturner.service.flight.records import Added, FlightRecord, Scheduled, Transferred
from pageturner.service.flight.replay import replay

AMPLE = 1 << 16


def replays(record: FlightRecord) -> None:
    read = flight_file.load(flight_file.dump(record))
    assert read == record
    assert read.start is not None
    result = replay(read)
    assert result.difference is None
    assert result.num_entries == len(record.entries)


def conversed(num_steps: int, depth: int = 0) -> FlightRecord:
    """Prompts that come again when others' blocks have taken the place of theirs, on the host too."""
    harness = CoreHarness(
        registry.default_policies(),
        num_blocks=6,
        block_size=2,
        num_host_blocks=4,
        num_host_cache_blocks=4,
        options=SchedulerOptions(max_model_len=40, max_num_seqs=2, max_num_batched_tokens=16, watermark=0.0),
        rates=FAST,
        disk=FakeDisk(),
        depth=depth,
    )
    recorded(harness, num_steps)
    for turn in range(3):
        for salt in range(4):
            harness.submit((0, 1, 2, 0, 1, 2, 0, 1), max_tokens=2, salt=str(salt), seed=turn)
            for _ in range(6):
                harness.step()
                harness.end_transfers(well=turn != 1 or salt != 2)
    assert harness.scheduler.stats().num_disk_hit_tokens_total
    assert harness.scheduler.stats().num_disk_reads_failed_total
    return record_of(harness)


@pytest.mark.parametrize("depth", [0, 1])
def test_what_came_from_disk_replays_from_the_beginning(depth: int) -> None:
    record = conversed(AMPLE, depth)
    assert any(isinstance(entry, Transferred) for entry in record.entries)
    assert any(isinstance(entry, Scheduled) and entry.on_disk for entry in record.entries)
    replays(record)


def test_a_wait_for_the_disk_is_explained() -> None:
    record = conversed(AMPLE)
    told = [
        line.text
        for entry in record.entries
        if isinstance(entry, Added)
        for line in explain(record, entry.request.request_id)
    ]
    assert "waited for 3 blocks of its prefix to be read from disk" in told, (
        "as many as the host has room for"
    )


def test_what_came_from_disk_replays_from_a_checkpoint() -> None:
    record = conversed(8)
    assert record.start is not None
    assert record.start.checkpoint is not None
    assert record.start.checkpoint.scheduler.tiers is not None
    replays(record)


@settings(max_examples=25, deadline=None)
@given(
    options=scheduler_options(),
    num_blocks=st.sampled_from((6, 8, 5)),
    num_cache_blocks=st.sampled_from((2, 4, 3)),
    num_swap_blocks=st.sampled_from((0, 4)),
    depth=st.integers(0, 1),
    has_disk=st.booleans(),
    num_steps=st.sampled_from((AMPLE, 4)),
    seed=st.integers(0, 1 << 16),
)
def test_every_decision_of_a_random_run_with_tiers_comes_out_again(
    options: SchedulerOptions,
    num_blocks: int,
    num_cache_blocks: int,
    num_swap_blocks: int,
    depth: int,
    has_disk: bool,
    num_steps: int,
    seed: int,
) -> None:
    harness = CoreHarness(
        registry.create_set({"reclaim": "always-swap", "admission": "first-chunk"}),
        num_blocks=num_blocks,
        block_size=2,
        num_host_blocks=num_cache_blocks + num_swap_blocks,
        num_host_cache_blocks=num_cache_blocks,
        options=options,
        rates=FAST,
        disk=FakeDisk() if has_disk else None,
        depth=depth,
    )
    recorded(harness, num_steps)
    choice = random.Random(seed)
    for number in range(8):
        for salt in choice.sample("abc", 2):
            with contextlib.suppress(InvalidArgument):  # more choices than may run
                n, priority = choice.choice((1, 1, 2)), choice.choice((0, 0, 1))
                prompt = (0, 1, 2, 0, 1, 2)
                harness.submit(prompt, max_tokens=1, salt=salt, n=n, priority=priority, seed=number)
        for _ in range(choice.randint(1, 6)):
            harness.step()
            if has_disk:
                harness.end_transfers(choice.randint(0, 9), choice.randint(0, 9), well=choice.random() < 0.8)
        if choice.random() < 0.2:
            harness.fail(moves_blocks=choice.random() < 0.5)
    record = record_of(harness)
    if record.start is not None:
        replays(record)
