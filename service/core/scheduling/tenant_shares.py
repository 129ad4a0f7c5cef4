"""Equal shares of the server for the tenants that have requests: of slots and blocks, and of a step's time.

A tenant that has less than its share claims from one that has more; nothing is set aside for an absent one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pageturner.service.core.request import Request, Sequence
from pageturner.service.core.scheduling import views
from pageturner.service.core.scheduling.state import SchedulerState

BURDEN = 1 / 3
"""What each further tenant may add to the time of a step, as a share of the time that the work of the tenant
with least to do takes by itself. Not 1: that one has waited for the step before already, and a decoded token
costs up to half as much again as one of a prompt, of which the rates tell."""


LONGEST_STEP = 16
"""A step that prefills takes about so many times as long as one of no token: a request that comes waits for
the step under way, and longer steps would save less than a sixteenth."""


LEAST_PREFILL = 64
"""Tokens of prefill that a step has room for, whatever the rates say: they are measured in haste."""

LEAST_FIXED = 4.0
"""Tokens that a step costs at the least beside its own, for the same reason."""


def token_budget(state: SchedulerState, num_decodes: int) -> int:
    """Tokens of the next step, in which so many sequences decode."""
    most = state.options.max_num_batched_tokens
    if not state.options.share_between_tenants:
        return most
    return min(most, num_decodes + max(LEAST_PREFILL, int(LONGEST_STEP * _fixed_tokens(state))))


def divides(state: SchedulerState) -> bool:
    """Whether shares matter at this moment."""
    return state.options.share_between_tenants and len(state.num_live) > 1


class TenantShares:
    """Slots and device blocks that tenants hold. running: the requests that do, those that yield left out.

    What counts is a tenant's dominant share, the larger of its shares of slots and of blocks. Source:
    dominant resource fairness (Ghodsi et al., NSDI 2011).
    """

    def __init__(self, state: SchedulerState, running: Iterable[Request]) -> None:
        self._state = state
        self._fair = 1.0 / max(1, len(state.num_live))
        self._slots: Counter[str] = Counter()
        self._blocks: Counter[str] = Counter()
        self._running = list(running)
        for request in self._running:
            self._slots[request.new.tenant] += request.num_slots
            self._blocks[request.new.tenant] += self._num_blocks(request)

    def add(self, request: Request) -> None:
        """It starts in this step."""
        self._slots[request.new.tenant] += request.num_slots
        self._blocks[request.new.tenant] += self._num_wanted(request)

    def is_owed(self, request: Request) -> bool:
        """Whether its tenant would have no more than its share with it."""
        num_blocks = self._num_wanted(request)
        return self._dominant(request.new.tenant, request.num_slots, num_blocks) <= self._fair

    def may_claim(self, request: Request) -> bool:
        """Whether it is owed to its tenant, and another tenant has more than its own share."""
        return self.is_owed(request) and any(self.yields(other, request) for other in self._running)

    def yields(self, victim: Request, claimant: Request) -> bool:
        """Whether the victim's tenant has its share without it. No request yields to a less urgent one."""
        if victim.new.tenant == claimant.new.tenant or victim.priority > claimant.priority:
            return False
        num_blocks = self._num_blocks(victim)
        return self._dominant(victim.new.tenant, -victim.num_slots, -num_blocks) >= self._fair

    def _dominant(self, tenant: str, more_slots: int, more_blocks: int) -> float:
        state = self._state
        return max(
            (self._slots[tenant] + more_slots) / state.options.max_num_seqs,
            (self._blocks[tenant] + more_blocks) / state.manager.device.num_blocks,
        )

    def _num_wanted(self, request: Request) -> int:
        return views.num_known_blocks(request, self._state.manager.block_size)

    def _num_blocks(self, request: Request) -> int:
        return sum(map(self._state.manager.num_blocks, request.sequences))


def step_shares(
    state: SchedulerState, work: Iterable[tuple[Sequence, int]], starting: Iterable[Request]
) -> dict[str, int] | None:
    """How many tokens each tenant may compute in a step; None where nothing need be divided.

    work: the running sequences and what each lacks. starting: requests that may start in it. The least demand
    is met, and of the others the small ones (max-min fairness). All together are so many that the step takes
    longer by BURDEN, for each other tenant, than the work of the one that wants least takes by itself.
    """
    demands: Counter[str] = Counter()
    for sequence, remaining in work:
        demands[sequence.request.new.tenant] += remaining
    for request in starting:
        demands[request.new.tenant] += max(1, views.num_known_tokens(request))
    demands = +demands
    if len(demands) < 2:
        return None
    total = min(state.options.max_num_batched_tokens, _num_bearable(state, demands))
    if sum(demands.values()) <= total:
        return None
    least = min(demands, key=demands.__getitem__)
    given = {least: min(demands.pop(least), total - len(demands))}
    given.update(zip(demands, _max_min(list(demands.values()), total - given[least]), strict=True))
    return given


def _num_bearable(state: SchedulerState, demands: Counter[str]) -> int:
    least = min(demands.values())
    burden = BURDEN * (_fixed_tokens(state) + least)
    return least + max(1, int(burden)) * (len(demands) - 1)


def _fixed_tokens(state: SchedulerState) -> float:
    """How many tokens take as long as a step takes beside its tokens."""
    rates = state.rates
    return max(LEAST_FIXED, rates.prefill_seconds_fixed / max(rates.prefill_seconds_per_token, 1e-12))


def _max_min(demands: list[int], supply: int) -> list[int]:
    """Each gets its demand, or what is left to those that want more, in equal parts."""
    given = [0] * len(demands)
    order = sorted(range(len(demands)), key=demands.__getitem__)
    for position, index in enumerate(order):
        given[index] = min(demands[index], supply // (len(order) - position))
        supply -= given[index]
    return given
