"""How does a victim yield: its KV to the host, its KV dropped, or only the blocks at its end dropped?

No policy asks for a swap that the host pool cannot take, nor for a tail that would not end the shortage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pageturner.policies.interfaces import Reclaim
from pageturner.policies.options import check_option
from pageturner.policies.views import LoadView, Rates, VictimView


@dataclass(frozen=True, slots=True)
class AlwaysRecompute:
    """Drop all KV and compute it again later. Source: vLLM v1, which knows no other way."""

    name: ClassVar[str] = "always-recompute"
    summary: ClassVar[str] = (
        "wins on short contexts and slow links; loses long contexts, whose prefill is dear"
    )

    def choose(self, victim: VictimView, num_blocks_short: int, rates: Rates, load: LoadView) -> Reclaim:
        return Reclaim.RECOMPUTE


@dataclass(frozen=True, slots=True)
class AlwaysSwap:
    """Move all KV to the host while it has room, else recompute. Source: vLLM (Kwon et al., SOSP 2023)."""

    name: ClassVar[str] = "always-swap"
    summary: ClassVar[str] = (
        "wins on long contexts over a fast link; loses short ones, and shared blocks are copied too"
    )

    def choose(self, victim: VictimView, num_blocks_short: int, rates: Rates, load: LoadView) -> Reclaim:
        return Reclaim.SWAP if _host_has_room(victim, load) else Reclaim.RECOMPUTE


@dataclass(frozen=True, slots=True)
class SwapGroups:
    """Swap a request of several sequences while the host has room; recompute one of a single sequence.

    Source: vLLM before v1, which could not compute a forked group again.
    """

    name: ClassVar[str] = "swap-groups"
    summary: ClassVar[str] = (
        "wins when n > 1 makes many tokens to compute again; loses by ignoring what each way costs"
    )

    def choose(self, victim: VictimView, num_blocks_short: int, rates: Rates, load: LoadView) -> Reclaim:
        is_group = victim.request.num_sequences > 1
        return Reclaim.SWAP if is_group and _host_has_room(victim, load) else Reclaim.RECOMPUTE


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cheapest way by this machine's measured rates.

    Swap costs every block of the victim out and in again, shared ones too. Recompute costs the prefill
    of the tokens that would be lost, on top of the context that others keep alive. The tail, if its
    exclusive blocks alone end the shortage, costs the prefill of just those tokens on top of the rest.
    `swap_weight` scales the cost of a swap: above 1 where copies hold up the step. `tail_weight` scales
    that of a tail: above 1 since a victim that keeps blocks while it waits is the first to yield at the next
    shortage, and then loses the rest as well. Of equals the way that moves no bytes is taken.
    Source: the swap-or-recompute trade-off of Kwon et al. (SOSP 2023, section 7.3) as a rule.
    """

    name: ClassVar[str] = "cost-model"
    summary: ClassVar[str] = (
        "wins wherever the rates are right; loses if they drift (a busy link, a throttled machine)"
    )

    swap_weight: float = 1.0
    """Scale of a swap's cost: above 1 where copies hold up the step."""
    tail_weight: float = 2.0
    """Scale of a tail's cost: above 1 since what the victim keeps may be lost before it runs again."""

    def __post_init__(self) -> None:
        check_option(self, "swap_weight", at_least=0)
        check_option(self, "tail_weight", at_least=0)

    def choose(self, victim: VictimView, num_blocks_short: int, rates: Rates, load: LoadView) -> Reclaim:
        context = max(0, victim.request.num_computed_tokens - victim.num_recompute_tokens)
        costs = [(rates.prefill_seconds(victim.num_recompute_tokens, context), Reclaim.RECOMPUTE)]
        if _tail_ends_shortage(victim, num_blocks_short):
            lost = min(num_blocks_short * load.device.block_size, victim.num_recompute_tokens)
            kept = context + victim.num_recompute_tokens - lost
            costs.append((self.tail_weight * rates.prefill_seconds(lost, kept), Reclaim.TAIL))
        if _host_has_room(victim, load):
            costs.append((self.swap_weight * _swap_seconds(victim, rates), Reclaim.SWAP))
        return min(costs, key=lambda cost: cost[0])[1]


@dataclass(frozen=True, slots=True)
class HostHeadroom:
    """Swap while the host pool keeps `headroom` of itself free, else recompute.

    Source: the high-water marks of paging daemons (Unix), which leave room for who comes next.
    """

    name: ClassVar[str] = "host-headroom"
    summary: ClassVar[str] = (
        "wins when host memory is the scarce thing; loses by ignoring what each way costs"
    )

    headroom: float = 0.25
    """Share of the host pool that a swap leaves free, 0 to 1."""

    def __post_init__(self) -> None:
        check_option(self, "headroom", at_least=0, at_most=1)

    def choose(self, victim: VictimView, num_blocks_short: int, rates: Rates, load: LoadView) -> Reclaim:
        left = load.host.num_available - victim.num_blocks
        keeps_headroom = left >= self.headroom * load.host.num_blocks
        return Reclaim.SWAP if keeps_headroom and _host_has_room(victim, load) else Reclaim.RECOMPUTE


@dataclass(frozen=True, slots=True)
class TailFirst:
    """Give up only the end if that ends the shortage, else swap if `swap_rest` and the host has room.

    Source: partial preemption, as page-wise reclaim is to swapping whole processes (Denning, 1970).
    """

    name: ClassVar[str] = "tail-first"
    summary: ClassVar[str] = (
        "wins on small shortages, little is lost; loses if shortages recur and nibble at many"
    )

    swap_rest: bool = False
    """Whether to swap, where the tail alone does not end the shortage."""

    def choose(self, victim: VictimView, num_blocks_short: int, rates: Rates, load: LoadView) -> Reclaim:
        if _tail_ends_shortage(victim, num_blocks_short):
            return Reclaim.TAIL
        return Reclaim.SWAP if self.swap_rest and _host_has_room(victim, load) else Reclaim.RECOMPUTE


def _host_has_room(victim: VictimView, load: LoadView) -> bool:
    return 0 < victim.num_blocks <= load.host.num_available


def _tail_ends_shortage(victim: VictimView, num_blocks_short: int) -> bool:
    return 0 < num_blocks_short <= victim.num_tail_blocks


def _swap_seconds(victim: VictimView, rates: Rates) -> float:
    num_bytes = victim.num_blocks * rates.block_bytes
    return num_bytes / rates.swap_out_bytes_per_second + num_bytes / rates.swap_in_bytes_per_second
