"""Planted bugs of simulated hand-overs, each a plausible mistake, for the checks of `fleets_apart`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pageturner.service.routing.peers import Peers
from pageturner.service.simulator.handing_over import Handovers
from pageturner.service.simulator.handover import Links
from pageturner.service.simulator.peer_tiers import SimulatedReceiver, SimulatedSender
from pageturner.service.simulator.prefill_replica import PrefillReplica
from pageturner.service.simulator.replica import SchedulerReplica


@dataclass(frozen=True, slots=True)
class ApartBug:
    """owner.method is replaced by `mistake(original)`."""

    name: str
    owner: type[Any]
    method: str
    mistake: Callable[[Any], Any]


def _does_nothing(original: Any) -> Any:
    def nothing(*arguments: Any, **options: Any) -> None:
        return None

    return nothing


def _links_are_free(original: Any) -> Any:
    def send(self: Links, source: int, target: int, now: float) -> float:
        return now

    return send


def _the_last_token_too(original: Any) -> Any:
    def hashes(self: SchedulerReplica, token_ids: tuple[int, ...]) -> Any:
        return original(self, (*token_ids, token_ids[-1] + 1))

    return hashes


def _calls_weigh_on(original: Any) -> Any:
    def over(self: Handovers, call: Any, *, has_failed: bool) -> None:
        num_tokens = call.peer.num_tokens
        original(self, call, has_failed=has_failed)
        call.peer.num_tokens = max(call.peer.num_tokens, num_tokens)

    return over


def _prompts_are_cut_short(original: Any) -> Any:
    def prefill(self: PrefillReplica, index: int, num_tokens: int, at: float, now: float) -> None:
        original(self, index, max(1, num_tokens - 16), at, now)

    return prefill


def _failures_are_forgiven(original: Any) -> Any:
    def over(self: Handovers, call: Any, *, has_failed: bool) -> None:
        original(self, call, has_failed=False)

    return over


def _loads_fail(original: Any) -> Any:
    def end(self: SimulatedReceiver, ended: Any) -> None:
        original(self, type(ended)(ended.host_block, False))

    return end


BUGS = (
    ApartBug("what was sent stays held", SimulatedSender, "give_up", _does_nothing),
    ApartBug("ends of saves are not heard of", SimulatedSender, "_end", _does_nothing),
    ApartBug("links take no time", Links, "send", _links_are_free),
    ApartBug("the last token is asked for too", SchedulerReplica, "hashes", _the_last_token_too),
    ApartBug("prompts are cut short", PrefillReplica, "prefill", _prompts_are_cut_short),
    ApartBug("who waits for a lost server is not told", Handovers, "lose", _does_nothing),
    ApartBug("a failure is no reason to ask another", Handovers, "_over", _failures_are_forgiven),
    ApartBug("what came is not there", SimulatedReceiver, "put", _does_nothing),
    ApartBug("loads fail", SimulatedReceiver, "end", _loads_fail),
    ApartBug("ended calls weigh on", Handovers, "_over", _calls_weigh_on),
    ApartBug("a server that failed is asked again at once", Peers, "failed", _does_nothing),
)
