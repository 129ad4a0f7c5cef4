"""The general machine with tiers behind the prefix cache, whose disk answers late, badly or not at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from pageturner.policies import registry
from pageturner.policies.interfaces import PolicySet
from pageturner.policies.views import Rates
from pageturner.service.core.options import SchedulerOptions
from support.core_harness import CoreHarness
from support.drafting_machine import SPECULATION, PlannedDrafter
from support.fake_disk import FakeDisk
from support.scheduler_machine import ConversingMachine, policy_sets, requests, scheduler_options

FAST = Rates(
    swap_out_bytes_per_second=1e12,
    swap_in_bytes_per_second=1e12,
    disk_read_bytes_per_second=1e12,
)
EVEN = replace(FAST, swap_in_bytes_per_second=1e9, disk_read_bytes_per_second=1e9)
"""With these a block of one token takes as long to copy as to compute."""


class TieredMachine(ConversingMachine):
    """A small pool over a host tier, with a disk or without. totals: of all runs of this class."""

    totals: ClassVar[dict[str, int]] = {}
    is_all_on_disk: ClassVar[bool] = False
    saves_evictions: ClassVar[bool] = True

    @initialize(
        policies=policy_sets(),
        options=scheduler_options(),
        num_blocks=st.sampled_from((8, 6, 5, 7, 4, 3, 2)),
        block_size=st.sampled_from((1, 2, 2, 3)),
        num_swap_blocks=st.sampled_from((0, 2, 6)),
        num_cache_blocks=st.sampled_from((2, 4, 3, 1, 8, 16)),
        depth=st.integers(0, 1),
        reuse_partial_blocks=st.sampled_from((True, False)),
        rates=st.sampled_from((FAST, FAST, EVEN)),
        has_disk=st.sampled_from((True, True, False)),
        load=st.lists(requests(), min_size=2, max_size=4),
        num_steps=st.sampled_from((8, 4, 12, 20, 0)),
    )
    def start(
        self,
        policies: PolicySet,
        options: SchedulerOptions,
        num_blocks: int,
        block_size: int,
        num_swap_blocks: int,
        num_cache_blocks: int,
        depth: int,
        reuse_partial_blocks: bool,
        rates: Rates,
        has_disk: bool,
        load: list[dict[str, Any]],
        num_steps: int,
    ) -> None:
        favoured: dict[str, Any] = {
            axis: registry.create(axis, name) for axis, name in self.favoured_policies
        }
        depth = 0 if self.speculation.method != "none" else depth
        if not self.saves_evictions:
            has_disk = True
        if self.is_all_on_disk:
            has_disk, num_swap_blocks, num_cache_blocks = True, 0, min(num_cache_blocks, 4)
        self.harness = CoreHarness(
            replace(policies, **favoured),
            num_blocks=num_blocks,
            block_size=block_size,
            num_host_blocks=num_swap_blocks + num_cache_blocks,
            num_host_cache_blocks=num_cache_blocks,
            depth=depth,
            options=options,
            reuse_partial_blocks=reuse_partial_blocks,
            rates=rates,
            scheduler_class=self.scheduler_class,
            disk=FakeDisk() if has_disk else None,
            speculation=self.speculation,
            drafter=type(self).drafter,
            saves_evictions=self.saves_evictions,
        )
        for wanted in load:
            self._submit(wanted)
        for _ in range(num_steps):
            self._step()

    def _step(self) -> None:
        """With a disk that keeps up."""
        self.live.step()
        if self.live.disk is not None:
            self.live.end_transfers()

    @precondition(lambda self: self.live.disk is not None and self.live.disk.under_way)
    @rule(count=st.integers(1, 8), pick=st.integers(0, 9), well=st.sampled_from((True, True, True, False)))
    def end_transfers(self, count: int, pick: int, well: bool) -> None:
        self.live.end_transfers(count, pick, well=well)

    @precondition(lambda self: self.live.disk is not None and self.live.disk.stored)
    @rule(pick=st.integers(0, 99))
    def lose_a_record(self, pick: int) -> None:
        assert self.live.disk is not None
        self.live.disk.lose(pick)

    @precondition(lambda self: self.live.records)
    @rule(num_others=st.integers(1, 4), pick=st.integers(0, 99), wanted=requests())
    def ask_again(self, num_others: int, pick: int, wanted: dict[str, Any]) -> None:
        """A prompt that came before, once others' blocks have taken the place of its own."""
        records = list(self.live.records.values())
        asked = records[pick % len(records)].new
        plain = wanted | {"tenant": asked.tenant, "bypass": False, "copies": 1, "n": 1, "seconds": None}
        for number in range(num_others):
            salt = f"{len(records)}/{number}"  # equal to no other: its blocks are all new
            self._submit(plain | {"prompt": (0, 1, 2, 0, 1, 2, 0, 1), "salt": salt})
            for _ in range(3):
                self._step()
        self._submit(plain | {"prompt": asked.prompt_token_ids, "salt": asked.cache_salt})
        for _ in range(3):
            self._step()

    @precondition(lambda self: self.live.num_steps > 8)
    @rule()
    def fail_before_blocks_move(self) -> None:
        self.live.fail(moves_blocks=False)

    def teardown(self) -> None:
        super().teardown()
        if self.harness is not None:
            stats = self.live.scheduler.stats()
            for name in (
                "num_host_hit_tokens_total",
                "num_disk_hit_tokens_total",
                "num_spilled_blocks_total",
            ):
                self.totals[name] = self.totals.get(name, 0) + getattr(stats, name)


class DiskMachine(TieredMachine):
    """The same with a disk in each run, behind so small a host that much of it comes back from there."""

    is_all_on_disk = True


class DraftingDiskMachine(DiskMachine):
    """The same with drafts, for which the device evicts blocks too."""

    speculation = SPECULATION
    drafter = PlannedDrafter


class HandingOverMachine(TieredMachine):
    """The same with another server in place of the disk: it is given what requests hand over, all of it or
    told that it will not come, and gives it back to others that begin alike."""

    saves_evictions = False

    @rule(wanted=requests())
    def hand_over(self, wanted: dict[str, Any]) -> None:
        self._submit(wanted | {"hands_over": True, "bypass": False})

    def teardown(self) -> None:
        if self.harness is not None and not self.live.is_broken:
            self._check_handed_over()
        super().teardown()

    def _check_handed_over(self) -> None:
        """Nothing is waited for in vain: each block of a request that ended was saved, or will be, or not."""
        live, disk, tiers = self.live, self.live.disk, self.live.scheduler.manager.tiers
        assert disk is not None
        assert tiers is not None
        state = tiers.snapshot()
        told = disk.stored.keys() | disk.withheld | disk.discarded | disk.unsaved | disk.lies
        told |= {*state.unsaved, *state.offered, *(block_hash for _, _, block_hash, _ in state.in_flight)}
        hasher, block_size = live.scheduler.manager.hasher, live.scheduler.manager.block_size
        assert hasher is not None
        for record in live.records.values():
            new, end = record.new, record.end
            if new.hands_over and end is not None and end.error is None:
                tokens = new.prompt_token_ids
                for block_hash in hasher.chain(tokens, block_size, adapter=new.adapter, salt=new.cache_salt):
                    assert block_hash in told, "handed over: a block is neither saved nor withheld"
            if not any(other.new.hands_over for other in live.records.values()):
                assert not disk.stored, "handed over: what no request gave was saved"
