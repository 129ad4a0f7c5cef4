"""The router keeps what a policy looks at, whatever is told in whatever order, and survives any policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from support.junk_policies import RAISED, LyingStr
from support.planted_routing import BUGS, RoutingBug
from support.router_machine import RouterMachine

from pageturner.policies import registry
from pageturner.policies.fleet import Draw, FleetView, RoutedRequest
from pageturner.policies.routing import (
    LeastTokens,
    PowerOfTwo,
    PrefixAware,
    RoundRobin,
    SessionAffinity,
)
from pageturner.service.errors import NoReplica
from pageturner.service.policy_host.calls import CallWatch
from pageturner.service.policy_host.reports import FaultNote
from pageturner.service.routing.options import LoadReport, Replica, RouterOptions
from pageturner.service.routing.router import Router


def router_of(*names: str, policy: Any = None, **options: Any) -> Router:
    router = Router(
        policy or LeastTokens(), Random(0).randrange, RouterOptions(request_tokens=0.0), **options
    )
    router.join(*map(Replica, names))
    return router


@pytest.mark.parametrize("seed", range(40))
def test_any_moves_leave_the_router_as_the_model_reckons(seed: int) -> None:
    RouterMachine(seed).run(120)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: RoutingBug, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bug.owner, bug.method, bug.mistake(getattr(bug.owner, bug.method)))

    def run_many() -> None:
        for seed in range(60):
            RouterMachine(seed).run(120)

    with pytest.raises(AssertionError, match="|".join(f"^{begin}" for begin in bug.caught_by)):
        run_many()


# --- loads ----------------------------------------------------------------------------------------------


def test_without_reports_the_load_is_what_the_router_has_under_way() -> None:
    router = router_of("a", "b")
    first, second = (router.route(num_prompt_tokens=100) for _ in range(2))
    assert (first.replica_id, second.replica_id) == ("a", "b")
    router.computed(first)
    assert router.route(num_prompt_tokens=1).replica_id == "a", "its prompt is computed, b's waits"
    router.ended(second)
    assert (router.view("b").num_queued_tokens, router.view("b").num_requests) == (0, 0)


def test_a_report_counts_what_was_sent_before_it_was_asked_for_and_no_more() -> None:
    router = router_of("a")
    before = router.route(num_prompt_tokens=100)
    mark = router.mark()
    router.route(num_prompt_tokens=30)
    router.report("a", LoadReport(num_queued_tokens=140, num_requests=4), mark)
    assert (router.view("a").num_queued_tokens, router.view("a").num_requests) == (170, 5)
    router.ended(before)
    assert (router.view("a").num_queued_tokens, router.view("a").num_requests) == (70, 4)


def test_however_often_loads_change_the_order_of_loads_takes_no_more_memory() -> None:
    router = router_of(*"abcd", policy=RoundRobin())  # which never asks for the least loaded
    for _ in range(200):
        router.ended(router.route(num_prompt_tokens=10))
        assert len(router._fleet._heap) <= 4 * 4 + 64
    assert router._fleet.least_loaded().load == min(router.view(name).load for name in "abcd")


def test_a_herd_does_not_form_on_an_old_report() -> None:
    """Sixty requests between two reports: by the report alone all would go to the one that was idle."""
    router = router_of("busy", "idle", "idler")
    for name, tokens in (("busy", 2000), ("idle", 1000), ("idler", 0)):
        router.report(name, LoadReport(tokens, 1), router.mark())
    for _ in range(60):
        router.route(num_prompt_tokens=100)
    loads = [router.view(name).num_queued_tokens for name in router.replica_ids]
    assert max(loads) - min(loads) <= 100


def test_routers_that_take_turns_do_not_march_in_step() -> None:
    firsts = set()
    for seed in range(40):
        router = Router(RoundRobin(), Random(seed).randrange)
        router.join(*(Replica(f"r{number}") for number in range(10)))
        order = [router.route(num_prompt_tokens=1).replica_id for _ in range(10)]
        assert len(set(order)) == 10
        firsts.add(order[0])
    assert len(firsts) > 5


# --- replicas -------------------------------------------------------------------------------------------


def test_where_no_replica_may_take_a_request_it_is_refused() -> None:
    router = router_of()
    with pytest.raises(NoReplica, match="no server is known"):
        router.route(num_prompt_tokens=1)
    router.join(Replica("a"))
    router.drain("a")
    with pytest.raises(NoReplica, match="all 1 known servers drain"):
        router.route(num_prompt_tokens=1)
    router.undrain("a")
    assert router.route(num_prompt_tokens=1).number == 0


def test_replicas_join_all_or_none() -> None:
    router = router_of("a")
    with pytest.raises(ValueError, match="'a' is there already"):
        router.join(Replica("b"), Replica("a"))
    with pytest.raises(ValueError, match="'c' is there already"):
        router.join(Replica("c"), Replica("c"))
    assert router.replica_ids == ("a",)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Replica(""), "needs an id"),
        (lambda: Replica("a", capacity=0.0), "capacity must be finite and above 0"),
        (lambda: Replica("a", capacity=float("inf")), "capacity"),
        (lambda: Replica("a", cache_tokens=-1), "cache_tokens"),
        (lambda: RouterOptions(request_tokens=float("nan")), "request_tokens"),
    ],
)
def test_what_nothing_could_be_reckoned_with_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_where_all_are_to_be_avoided_one_of_them_is_tried_again() -> None:
    router = router_of("a", "b")
    assert router.route(num_prompt_tokens=1, avoid={"a"}).replica_id == "b"
    assert router.route(num_prompt_tokens=1, avoid={"a", "b"}).replica_id in ("a", "b")


# --- prefixes -------------------------------------------------------------------------------------------


def chain(name: str, length: int) -> tuple[bytes, ...]:
    return tuple(f"{name} {number}".encode() for number in range(length))


def test_turns_of_a_conversation_go_where_its_prefix_is() -> None:
    router = router_of(*"abcd", policy=PrefixAware())
    homes: dict[str, set[str]] = {}
    for turn in range(1, 6):
        for name in ("x", "y", "z", "u", "v"):
            routed = router.route(num_prompt_tokens=160 * turn, digests=chain(name, 10 * turn))
            homes.setdefault(name, set()).add(routed.replica_id)
            assert routed.num_tokens == 160
            router.ended(routed)
    assert all(len(home) == 1 for home in homes.values())


def test_a_prefix_that_everyone_asks_for_spreads_and_no_replica_is_swamped() -> None:
    router = Router(PrefixAware(), Random(0).randrange)
    router.join(*(Replica(name) for name in "abcd"))
    open_requests = [router.route(num_prompt_tokens=1700, digests=chain("system", 100)) for _ in range(400)]
    loads = [router.view(name).load for name in "abcd"]
    assert all(router.view(name).num_requests for name in "abcd")
    assert max(loads) <= 1.5 * min(loads) + 2.0 * 1600 + 512 + 1700
    assert sum(routed.num_tokens == 1700 for routed in open_requests) == 4, "each computed it once"


def test_what_a_cache_cannot_hold_any_more_is_forgotten() -> None:
    router = Router(PrefixAware(), Random(0).randrange)
    router.join(Replica("a", cache_tokens=160))
    for name, expected in (("x", 80), ("y", 80), ("x", 0), ("z", 80), ("x", 0), ("y", 80)):
        routed = router.route(num_prompt_tokens=80, digests=chain(name, 5))
        assert routed.num_tokens == expected


def test_a_cache_that_turns_out_smaller_forgets_the_longest_unused() -> None:
    router = Router(PrefixAware(), Random(0).randrange)
    router.join(Replica("a", cache_tokens=320))
    for name in "xy":
        router.route(num_prompt_tokens=80, digests=chain(name, 5))
    router.resize("a", 80)
    router.resize("nobody", 80)
    assert router.route(num_prompt_tokens=80, digests=chain("y", 5)).num_tokens == 0
    assert router.route(num_prompt_tokens=80, digests=chain("x", 5)).num_tokens == 80
    router.drain("a")
    router.resize("a", 320)
    router.undrain("a")
    for name in "xyzxyz":
        routed = router.route(num_prompt_tokens=80, digests=chain(name, 5))
    assert routed.num_tokens == 0, "three fit again"


def test_names_of_sessions_take_no_more_memory_than_short_ones_do() -> None:
    router = router_of(*"abcd", policy=SessionAffinity())
    for name in ("short", "long" * 1000):
        homes = {router.route(num_prompt_tokens=1, session=name).replica_id for _ in range(3)}
        assert len(homes) == 1
    assert [key for key, _ in router._fleet._orders] == ["short"]


# --- policies -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Does:
    """Answers with what `act` gives."""

    act: Callable[..., Any]

    def route(self, request: RoutedRequest, fleet: FleetView, draw: Draw) -> Sequence[str]:
        answer: Sequence[str] = self.act(request, fleet, draw)
        return answer


def endless(*_: object) -> Any:
    while True:
        yield "nobody"


@pytest.mark.parametrize(
    "answer",
    [
        None,
        7,
        "a",
        b"a",
        [],
        ["nobody"],
        [None, "a"],
        [7],
        {"a": 1},
        {"a"},
        [["a"]],
    ],
    ids=repr,
)
def test_a_bad_answer_is_replaced_and_counted(answer: object) -> None:
    notes: list[FaultNote] = []
    router = router_of("a", "b", policy=Does(lambda *_: answer), on_fault=notes.append)
    assert router.route(num_prompt_tokens=1).replica_id == "a"
    assert router.num_faults == len(notes) == 1
    assert notes[0].wanted == "ids of replicas that may take the request, the best first"


@pytest.mark.parametrize("answer", [["b"], ("b", "b"), iter(["b", "a"]), ["nobody", "b"], [LyingStr("b")]])
def test_an_answer_that_can_be_followed_is(answer: object) -> None:
    router = router_of("a", "b", policy=Does(lambda *_: answer))
    assert router.route(num_prompt_tokens=1).replica_id == "b"
    assert router.num_faults == 0


def test_an_endless_answer_ends() -> None:
    router = router_of("a", policy=Does(endless))
    assert router.route(num_prompt_tokens=1).replica_id == "a"
    assert router.num_faults == 1


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_a_policy_that_raises_is_replaced(error: BaseException) -> None:
    def act(*_: object) -> Any:
        raise error

    router = router_of("a", policy=Does(act), watch=CallWatch(escapes=()))
    assert router.route(num_prompt_tokens=1).replica_id == "a"
    assert router.num_faults == 1


def test_a_policy_that_keeps_failing_is_quarantined_until_another_is_set() -> None:
    router = router_of("a", "b", policy=Does(lambda *_: ()))
    for _ in range(20):
        router.route(num_prompt_tokens=1)
    assert router.num_faults == 8
    assert "8 of its last 32" in router.quarantine_reason
    router.set_policy(SessionAffinity())
    assert (router.policy, router.num_faults, router.quarantine_reason) == (SessionAffinity(), 0, "")


def test_a_policy_cannot_change_what_the_router_keeps_of_prefixes() -> None:
    def act(request: RoutedRequest, fleet: FleetView, draw: Draw) -> Any:
        holders: Any = fleet.longest_match(request.digests).replica_ids
        holders.clear()

    router = router_of("a", policy=Does(act))
    for _ in range(3):
        router.route(num_prompt_tokens=80, digests=chain("x", 5))
    assert router.num_faults == 3
    router.leave("a")
    router.join(Replica("a"))
    assert router.route(num_prompt_tokens=80, digests=chain("x", 5)).num_tokens == 80


@pytest.mark.parametrize("name", registry.names("routing"))
def test_the_same_draws_choose_the_same(name: str) -> None:
    def chosen(seed: int) -> list[str]:
        router = Router(registry.create("routing", name), Random(seed).randrange)
        router.join(*(Replica(f"r{number}") for number in range(5)))
        return [
            router.route(num_prompt_tokens=100, digests=chain(f"{n % 3}", 6), session=f"{n % 7}").replica_id
            for n in range(50)
        ]

    assert chosen(3) == chosen(3)
    if name == PowerOfTwo.name:
        assert chosen(3) != chosen(4)
