"""A prompt's KV on its way from the scheduler that computed it to another that goes on with it."""

from __future__ import annotations

import pytest
from support.core_harness import CoreHarness
from support.fake_disk import FakeDisk
from support.tier_machine import FAST

from pageturner.policies import registry
from pageturner.service.core.memory.prefix_cache import PrefixHasher
from pageturner.service.core.memory.tiers import CacheTiers
from pageturner.service.core.options import SchedulerOptions

BLOCK_SIZE = 2
PROMPT = tuple(n % 3 for n in range(13))
"""Six full blocks and one token."""

HASHES = PrefixHasher(b"test").chain(PROMPT, BLOCK_SIZE, adapter="", salt="")


def scheduler(*, num_cache: int = 8, num_swap: int = 4, depth: int = 0, num_blocks: int = 12) -> CoreHarness:
    return CoreHarness(
        registry.default_policies(),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_host_blocks=num_swap + num_cache,
        num_host_cache_blocks=num_cache,
        options=SchedulerOptions(max_model_len=40, max_num_seqs=2, max_num_batched_tokens=4, watermark=0.0),
        rates=FAST,
        disk=FakeDisk(),
        depth=depth,
        saves_evictions=False,
    )


def settled(live: CoreHarness, *, well: bool = True) -> FakeDisk:
    """Go on until nothing is on its way any more."""
    assert live.disk is not None
    assert live.scheduler.manager.tiers is not None
    for _ in range(60):
        live.step()
        live.end_transfers(well=well)
        ended = all(record.end is not None for record in live.records.values())
        if ended and not live.in_flight and not live.scheduler.manager.tiers.is_busy:
            return live.disk
    raise AssertionError("something is on its way for ever")


@pytest.mark.parametrize("depth", [0, 1])
def test_another_scheduler_goes_on_with_what_was_handed_over(depth: int) -> None:
    prefill, decode = scheduler(depth=depth), scheduler(depth=depth)
    prefill.submit(PROMPT, max_tokens=1, hands_over=True)
    handed_over = settled(prefill).stored
    assert set(handed_over) == set(HASHES)
    assert decode.disk is not None
    decode.disk.stored.update(handed_over)
    decode.submit(PROMPT, max_tokens=6)  # `check` compares its tokens with those of a run by itself
    settled(decode)
    stats = decode.scheduler.stats()
    assert stats.num_disk_hit_tokens_total == len(HASHES) * BLOCK_SIZE
    assert stats.num_scheduled_tokens_total == 1 + 5, "the last token of the prompt, and the answer's"
    decode.check_finished()
    prefill.check_finished()


def test_blocks_go_while_the_prompt_is_being_computed() -> None:
    live = scheduler()
    live.submit(PROMPT, max_tokens=1, hands_over=True)
    assert live.disk is not None
    for _ in range(3):
        live.step()
        live.end_transfers()
    (record,) = live.records.values()
    assert record.end is None
    assert list(live.disk.stored) == HASHES[: len(live.disk.stored)] != []


def test_blocks_that_were_cached_already_go_too() -> None:
    live = scheduler()
    live.submit(PROMPT[:9], max_tokens=1)
    settled(live)
    assert live.disk is not None
    assert not live.disk.stored
    live.submit(PROMPT, max_tokens=1, hands_over=True)
    assert set(settled(live).stored) == set(HASHES)


def test_what_no_request_hands_over_stays_though_the_device_evicts_it() -> None:
    live = scheduler()
    for salt in range(4):
        live.submit(PROMPT, max_tokens=1, salt=str(salt))
    disk = settled(live)
    assert live.scheduler.stats().num_spilled_blocks_total > 0
    assert not disk.stored
    assert not disk.withheld


@pytest.mark.parametrize("num_cache", [1, 2, 3])
def test_a_host_smaller_than_the_prompt_passes_it_on_piece_by_piece(num_cache: int) -> None:
    live = scheduler(num_cache=num_cache, num_swap=0)
    live.submit(PROMPT, max_tokens=1, hands_over=True)
    assert set(settled(live).stored) == set(HASHES)
    live.check_finished()


def test_what_left_memory_before_it_could_be_saved_is_withheld() -> None:
    live = scheduler(num_cache=1, num_swap=0, num_blocks=8)
    live.submit(PROMPT, max_tokens=1, hands_over=True)
    assert live.disk is not None
    for _ in range(6):
        live.step()  # and no transfer ends
    for salt in range(3):  # these take the place of all that the device held
        live.submit(PROMPT, max_tokens=1, salt=str(salt))
        for _ in range(6):
            live.step()
    disk = settled(live)
    assert disk.withheld
    assert disk.stored.keys() | disk.withheld == set(HASHES)
    live.check_finished()


def test_a_loss_that_is_not_told_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheTiers, "_withhold", lambda self, block_hash: None)
    with pytest.raises(AssertionError):
        test_what_left_memory_before_it_could_be_saved_is_withheld()


def test_what_a_failed_step_was_to_copy_is_withheld_or_right() -> None:
    live = scheduler()
    live.submit((0,), max_tokens=12)  # one that fails alone would be to blame
    live.step()
    live.submit(PROMPT, max_tokens=1, hands_over=True)
    live.step()
    live.step()
    live.fail(moves_blocks=False)
    disk = settled(live)
    assert disk.stored.keys() | disk.withheld == set(HASHES)
    decode = scheduler()
    assert decode.disk is not None
    decode.disk.stored.update(disk.stored)
    decode.submit(PROMPT, max_tokens=4)
    settled(decode)
