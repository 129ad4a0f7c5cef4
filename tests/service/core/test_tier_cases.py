"""What becomes of a block that the device evicts: named cases, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from support.core_harness import CoreHarness
from support.fake_disk import FakeDisk
from support.tier_machine import FAST

from pageturner.policies import registry
from pageturner.policies.views import Rates
from pageturner.service.core.options import SchedulerOptions, SpeculationOptions

BLOCK_SIZE = 2
HELLO, OTHER = (0, 1, 2, 0, 1, 2, 0, 1), (2, 2, 1, 1, 0, 0, 2, 2)


def harness(
    *,
    num_blocks: int = 6,
    num_host: int = 16,
    num_cache: int = 8,
    disk: FakeDisk | None = None,
    rates: Rates = FAST,
    **arguments: Any,
) -> CoreHarness:
    return CoreHarness(
        registry.default_policies(),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_host_blocks=num_host,
        num_host_cache_blocks=num_cache,
        options=SchedulerOptions(max_model_len=40, max_num_seqs=2, max_num_batched_tokens=16, watermark=0.0),
        rates=rates,
        disk=disk,
        **arguments,
    )


def served(live: CoreHarness, prompt: tuple[int, ...], *, max_tokens: int = 2, **arguments: Any) -> int:
    """Serve one request to its end; how many tokens of its prompt were cached, in whatever tier."""
    request_id = live.submit(prompt, max_tokens=max_tokens, **arguments)
    for _ in range(50):
        live.step()
        if live.disk is not None:
            live.end_transfers()
        end = live.records[request_id].end
        if end is not None and not live.in_flight:
            assert end.error is None
            return end.usage.num_cached_prompt_tokens
    raise AssertionError("it never ended")


@pytest.mark.parametrize("depth", [0, 1])
def test_a_block_that_the_device_evicted_comes_back_from_the_host(depth: int) -> None:
    live = harness(depth=depth)
    assert served(live, HELLO) == 0
    for seed in range(3):
        served(live, OTHER, seed=seed, salt=str(seed))
    assert served(live, HELLO, seed=7) >= 4
    stats = live.scheduler.stats()
    assert stats.num_host_hit_tokens_total >= 4
    assert stats.num_spilled_blocks_total >= 3
    live.check_finished()


def test_without_a_host_tier_nothing_is_copied() -> None:
    live = harness(num_cache=0)
    for seed in range(3):
        served(live, OTHER, seed=seed, salt=str(seed))
    assert live.scheduler.stats().num_spilled_blocks_total == 0
    assert live.scheduler.manager.host.num_cached == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_block_that_the_host_evicted_comes_back_from_disk(depth: int) -> None:
    disk = FakeDisk()
    live = harness(num_host=6, num_cache=6, disk=disk, depth=depth)
    assert served(live, HELLO) == 0
    for seed in range(8):
        served(live, OTHER, seed=seed, salt=str(seed))
    assert served(live, HELLO, seed=7) >= 4
    assert live.scheduler.stats().num_disk_hit_tokens_total >= 4
    live.check_finished()


def test_what_drafts_evict_lives_on() -> None:
    live = harness(
        num_blocks=8,
        speculation=SpeculationOptions("ngram", num_tokens=4),
    )
    for seed in range(4):
        served(live, (0, 1, 0, 1, 0, 1, 0, 1), seed=seed, salt=str(seed), max_tokens=6)
    assert live.scheduler.stats().num_spilled_blocks_total > 0
    live.check_finished()
