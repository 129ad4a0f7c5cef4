"""Which blocks of the tiers are brought back for a request that is about to start, rather than computed anew.

The rates that were measured at the start decide: what is copied takes time by its bytes, what is computed by
its tokens and by those before them.
"""

from __future__ import annotations

from itertools import takewhile

from pageturner.policies.views import Rates
from pageturner.service.core.request import Request, Sequence
from pageturner.service.core.scheduling.state import SchedulerState
from pageturner.service.core.scheduling.step_budget import Place, StepBudget


def is_worth_copying(rates: Rates, num_blocks: int, block_size: int, num_context: int) -> bool:
    """Whether so many blocks are sooner copied from the host than computed behind `num_context` tokens."""
    return host_seconds(rates, num_blocks) < rates.prefill_seconds(num_blocks * block_size, num_context)


def is_worth_loading(rates: Rates, num_blocks: int, block_size: int, num_context: int) -> bool:
    """Whether so many blocks are sooner read from disk, and copied, than computed."""
    seconds = disk_seconds(rates, num_blocks) + host_seconds(rates, num_blocks)
    return seconds < rates.prefill_seconds(num_blocks * block_size, num_context)


def host_seconds(rates: Rates, num_blocks: int) -> float:
    """Of a copy from the host."""
    return num_blocks * rates.block_bytes / rates.swap_in_bytes_per_second


def disk_seconds(rates: Rates, num_blocks: int) -> float:
    """Of a read from disk into the host; unknown where it was not measured, and taken for the longest."""
    if not rates.disk_read_bytes_per_second:
        return float("inf")
    return num_blocks * rates.block_bytes / rates.disk_read_bytes_per_second


def may_use_tiers(request: Request) -> bool:
    """A request of which several choices compute has given up tails: those are its own, and in no tier."""
    return not request.new.bypass_prefix_cache and len(request.computing) == 1


def num_skippable_blocks(sequence: Sequence, block_size: int) -> int:
    """Leading full blocks that need not be computed if their KV is there: no row of them is to be scored."""
    return min(sequence.num_known_tokens, sequence.next_scored) // block_size


class Restoring:
    """Books copies from the host tier. Nothing is changed: what is booked is in the plan, or forgotten."""

    def __init__(self, state: SchedulerState, budget: StepBudget) -> None:
        self._state = state
        self._manager = state.manager
        self._budget = budget

    def book(self, request: Request, place: Place, *, may_wait: bool) -> list[int]:
        """The cached blocks of the host that continue `place`, which is moved behind them.

        may_wait: a block that another request is making, or has copied, in this step or the last is left to
        that one: this one waits for it and shares it.
        """
        tiers, block_size = self._manager.tiers, self._manager.block_size
        (sequence,) = request.computing
        if tiers is None or place.num_kv != len(place.table) * block_size:
            return []
        ledger = self._budget.ledger
        found = tiers.run(self._wanted(sequence, len(place.table), may_wait=may_wait))
        found = found[: max(0, ledger.available)]
        if not found or not is_worth_copying(self._state.rates, len(found), block_size, place.num_kv):
            return []
        held = list(takewhile(ledger.can_hold, found))
        place.table = (*place.table, *(ledger.restore_block() for _ in held))
        place.num_kv = len(place.table) * block_size
        place.num_computed = sequence.next_position(place.num_kv)
        return held

    def _wanted(self, sequence: Sequence, first: int, *, may_wait: bool) -> list[bytes]:
        """Hashes of the full known blocks from the first-th on, up to one that is to be waited for."""
        hashes = []
        for index in range(first, num_skippable_blocks(sequence, self._manager.block_size)):
            block_hash = self._manager.block_hash(sequence, index)
            if may_wait and block_hash in self._budget.producing:
                break
            hashes.append(block_hash)
        return hashes
