"""What becomes of a block that the device evicts: named cases, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.core_harness import CoreHarness
from support.fake_disk import FakeDisk
from support.tier_machine import FAST

from pageturner.policies import registry
from pageturner.policies.views import Rates
from pageturner.service.core.memory.block_pool import BlockPool
from pageturner.service.core.memory.tiers import CacheTiers
from pageturner.service.core.memory.transfers import Discard, Load, TransferEnd
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


def test_what_is_not_to_be_trusted_is_not_cached_when_its_load_ends() -> None:
    host = BlockPool(4, BLOCK_SIZE)
    tiers = CacheTiers(host, 4, FakeDisk())
    trusted, other = (tiers.load(block_hash) for block_hash in (b"a", b"b"))
    tiers.forget([b"b"])
    for host_block in (trusted, other):
        tiers.end(TransferEnd(host_block, succeeded=True), 0.0)
    assert host.lookup(b"a") == trusted
    assert host.lookup(b"b") is None
    assert tiers.take_transfers() == (Load(trusted, b"a"), Load(other, b"b"), Discard(b"b"))


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


def churned(live: CoreHarness, count: int = 8) -> None:
    """Others' blocks take the place of all that the device held, and of what a small host held."""
    for seed in range(count):
        served(live, OTHER, seed=seed, salt=f"churn {seed}")


@pytest.mark.parametrize("with_disk", [False, True])
def test_a_swap_takes_the_place_of_cached_blocks(with_disk: bool) -> None:
    """The host is full of what the device evicted, and two requests that don't fit together take turns."""
    live = harness(num_host=8, num_cache=4, disk=FakeDisk() if with_disk else None)
    live.scheduler.set_policies(
        registry.create_set({"reclaim": "always-swap", "admission": "first-chunk"}), live.now
    )
    churned(live)
    assert live.scheduler.manager.host.num_free == 0
    for seed in range(2):
        live.submit((seed, 0, 1), max_tokens=8, seed=seed)
    live.run_to_end()
    assert live.scheduler.stats().num_swap_preemptions_total > 0
    live.check_finished()


@pytest.mark.parametrize("difference", [{"salt": "mine"}, {"cache_tenant": "mine"}, {"adapter": "mine"}])
def test_what_one_tag_left_in_a_tier_is_not_found_by_another(difference: dict[str, str]) -> None:
    live = harness(num_host=6, num_cache=6, disk=FakeDisk())
    hasher = live.scheduler.manager.hasher
    assert hasher is not None
    assert len({hasher.root(**{"adapter": "", "salt": ""} | tag) for tag in ({}, renamed(difference))}) == 2
    assert served(live, HELLO) == 0
    churned(live)
    if "salt" in difference:
        assert served(live, HELLO, salt="mine") == 0
    assert served(live, HELLO) >= 4


def renamed(tag: dict[str, str]) -> dict[str, str]:
    return {name.removeprefix("cache_"): value for name, value in tag.items()}


def test_a_request_that_waits_for_the_disk_holds_up_no_other() -> None:
    patient = replace(FAST, disk_read_bytes_per_second=4e6, prefill_seconds_per_token=1.0)
    live = harness(num_host=6, num_cache=6, disk=FakeDisk(), rates=patient)
    served(live, HELLO)
    churned(live)
    fetching = live.submit(HELLO, max_tokens=2, seed=7)
    live.step()
    assert live.scheduler.stats().num_requests_fetching == 1
    other = live.submit((2, 2, 2), max_tokens=2, salt="new")
    live.step()
    assert live.records[other].outputs, "it runs at once, though it came later"
    assert not live.records[fetching].outputs
    live.end_transfers()
    live.run_to_end()
    assert live.scheduler.stats().num_disk_hit_tokens_total > 0
    live.check_finished()


def test_a_silent_disk_costs_a_bounded_time() -> None:
    live = harness(num_host=6, num_cache=6, disk=FakeDisk())
    served(live, HELLO)
    churned(live)
    silent = live.submit(HELLO, max_tokens=2, seed=7)
    for _ in range(8):
        live.step()
    assert live.records[silent].end is not None, "it was computed"
    assert live.scheduler.stats().num_host_blocks_used == 0
    live.check_finished()


def test_a_request_that_is_aborted_while_it_fetches_leaves_nothing() -> None:
    live = harness(num_host=6, num_cache=6, disk=FakeDisk())
    served(live, HELLO)
    churned(live)
    live.abort(submitted(live))
    assert live.scheduler.stats().num_requests_fetching == 0
    live.end_transfers()
    live.step()
    live.check_finished()


def submitted(live: CoreHarness) -> str:
    """A request that fetches."""
    request_id = live.submit(HELLO, max_tokens=2, seed=7)
    live.step()
    assert live.scheduler.stats().num_requests_fetching == 1
    return request_id


def test_what_was_lost_on_disk_is_computed() -> None:
    disk = FakeDisk()
    live = harness(num_host=6, num_cache=6, disk=disk)
    served(live, HELLO)
    churned(live)
    for _ in range(len(disk.stored)):
        disk.lose(0)
    assert served(live, HELLO, seed=7) == 0
    assert live.scheduler.stats().num_disk_reads_failed_total > 0
    live.check_finished()


def test_a_request_that_goes_non_finite_is_forgotten_in_every_tier() -> None:
    disk = FakeDisk()
    live = harness(num_host=6, num_cache=6, disk=disk)
    served(live, HELLO)
    churned(live)
    poisoned = submitted(live)
    live.model.poisoned_requests.add(poisoned)
    live.end_transfers()
    live.run_to_end()
    assert live.records[poisoned].end is not None
    assert served(live, HELLO, seed=8) == 0
    live.check_finished()


@pytest.mark.parametrize(
    "rates",
    [replace(FAST, swap_in_bytes_per_second=1.0), replace(FAST, disk_read_bytes_per_second=1.0)],
    ids=["host", "disk"],
)
def test_what_is_sooner_computed_is_not_copied(rates: Rates) -> None:
    live = harness(num_host=6, num_cache=6, disk=FakeDisk(), rates=rates)
    served(live, HELLO)
    churned(live)
    assert served(live, HELLO, seed=7) == 0
    stats = live.scheduler.stats()
    assert (stats.num_host_hit_tokens_total, stats.num_disk_hit_tokens_total) == (0, 0)


def test_a_request_that_by_passes_the_cache_takes_nothing_from_a_tier() -> None:
    live = harness(num_host=6, num_cache=6, disk=FakeDisk())
    served(live, HELLO)
    churned(live)
    assert served(live, HELLO, seed=7, bypass=True) == 0
    assert live.scheduler.stats().num_disk_hit_tokens_total == 0


def test_two_that_start_alike_copy_a_block_once() -> None:
    live = harness(num_blocks=12, num_host=16)
    served(live, HELLO)
    churned(live, 5)
    before = live.scheduler.stats().num_host_hit_tokens_total
    for seed in (7, 8):
        live.submit(HELLO, max_tokens=2, seed=seed)
    live.run_to_end()
    assert 4 <= live.scheduler.stats().num_host_hit_tokens_total - before <= len(HELLO)
    live.check_finished()
