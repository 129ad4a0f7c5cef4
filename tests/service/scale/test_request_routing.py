"""What routers learn of replicas: reports are taken for what they count, summaries for what they hold."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from pageturner.policies import registry
from pageturner.service.core.memory.prefix_cache import PrefixHasher
from pageturner.service.core.prefix_summary import PrefixSummary
from pageturner.service.core.stats import SchedulerStats
from pageturner.service.errors import NoReplica
from pageturner.service.routing.router import Router
from pageturner.service.scale.calls import RouteHint, Sent
from pageturner.service.scale.reports import ReplicaReport
from pageturner.service.scale.request_routing import RequestRouting

HASHER = PrefixHasher(b"key")
SIZE = 4


def routing_of(policy: str = "prefix-aware", name: str = "me") -> RequestRouting:
    return RequestRouting(Router(registry.create("routing", policy), Random(0).randrange), name)


def hint_of(tokens: range) -> RouteHint:
    digests = HASHER.chain(tokens, SIZE, adapter="", salt="")
    return RouteHint(len(tokens), tuple(digests), SIZE)


def report_of(
    tokens: range = range(0),
    revision: int = 0,
    queued: int = 0,
    requests: int = 0,
    seen: dict[str, int] | None = None,
) -> ReplicaReport:
    """What goes through Ray's controller."""
    hashes = HASHER.chain(tokens, SIZE, adapter="", salt="")
    summary = PrefixSummary.of(revision, SIZE, HASHER.key_id, hashes)
    stats = SchedulerStats(num_queued_prompt_tokens=queued, num_running=requests, num_blocks=1000)
    return ReplicaReport.from_plain(ReplicaReport.of(stats, summary, seen or {}).to_plain())


def first(routing: RequestRouting, key: str, hint: RouteHint) -> str:
    order, _ = routing.order(key, hint)
    return order[0]


def test_a_prompt_goes_where_a_report_says_that_its_beginning_is_and_no_longer_when_it_is_gone() -> None:
    routing = routing_of()
    held = {"a": report_of(), "b": report_of(range(400), revision=1), "c": report_of()}
    routing.update(held)
    for key in "xyz":
        assert first(routing, key, hint_of(range(420))) == "b"
        routing.ended(key)
    routing.update(held | {"b": report_of(revision=2)})
    assert first(routing, "w", hint_of(range(420))) == "a", "the least loaded, of equals the first"


def test_a_prompt_goes_where_this_router_sent_its_beginning_before_any_report_says_so() -> None:
    routing = routing_of()
    routing.update({"a": report_of(), "b": report_of()})
    first(routing, "1", hint_of(range(1000, 1040)))
    where = first(routing, "2", hint_of(range(400)))
    for key in "12":
        routing.ended(key)
    assert where == "b"
    assert first(routing, "3", hint_of(range(410))) == "b"


def test_a_load_that_counts_a_request_is_not_added_to_what_was_sent() -> None:
    routing = routing_of("least-tokens")
    routing.update({"a": report_of(), "b": report_of()})
    order, told = routing.order("1", hint_of(range(100)))
    assert order == ("a", "b")
    assert (told.router, told.number) == ("me", 0)
    routing.update({"a": report_of(queued=50, requests=1, seen={"me": told.number}), "b": report_of()})
    assert routing._router.view("a").num_queued_tokens == 50
    routing.update({"a": report_of(seen={"another": 7}), "b": report_of()})
    assert routing._router.view("a").num_queued_tokens == 50, "a report from before the request is older"
    routing.ended("1")
    routing.update({"a": report_of(seen={"me": told.number}), "b": report_of()})
    assert routing._router.view("a").num_requests == 0


def test_what_other_routers_sent_counts_before_this_one_has_sent_anything() -> None:
    routing = routing_of("least-tokens")
    routing.update({"a": report_of(queued=900, requests=3, seen={"another": 7}), "b": report_of()})
    assert routing._router.view("a").num_queued_tokens == 900
    assert first(routing, "1", hint_of(range(40))) == "b"


def test_replicas_that_fail_are_offered_last_and_all_are_offered() -> None:
    routing = routing_of()
    routing.update({name: report_of() for name in "abcd"})
    order, _ = routing.order("1", replace(hint_of(range(40)), avoid=frozenset("ab")))
    assert sorted(order) == list("abcd")
    assert set(order[:2]) == {"c", "d"}


def test_a_replica_that_comes_again_is_known_anew_and_ends_are_told_once() -> None:
    routing = routing_of()
    routing.update({"a": report_of(range(400), revision=5)})
    routing.order("1", hint_of(range(40)))
    routing.lost("a")
    with pytest.raises(NoReplica):
        routing.order("2", hint_of(range(40)))
    routing.ended("1")
    routing.ended("1")
    routing.update({"a": report_of(range(400), revision=5), "b": report_of()})
    assert first(routing, "3", hint_of(range(404))) == "a"
    routing.went_to("3", "b")
    assert routing.num_open == 0, "another replica has it than this router reckons with"


def test_an_order_that_is_asked_for_again_counts_once() -> None:
    routing = routing_of("least-tokens")
    routing.update({"a": report_of()})
    for _ in range(5):
        routing.order("1", hint_of(range(100)))
    assert routing._router.view("a").num_requests == 1
    routing.ended("1")
    assert routing._router.view("a").num_requests == 0


def test_a_replica_that_joined_before_its_first_report_is_taken_to_hold_what_it_says() -> None:
    routing = routing_of()
    routing.update({"a": ReplicaReport()})
    small = replace(report_of(), cache_tokens=40)
    routing.update({"a": small})
    for number in range(10):
        first(routing, str(number), hint_of(range(100 * number, 100 * number + 40)))
    assert routing._router._prefixes.num_tokens("a") == 80
    large = replace(report_of(range(400), revision=1), cache_tokens=400)
    routing.update({"a": large})
    assert routing._router._prefixes.num_tokens("a") >= 400


def test_what_a_replica_told_outlives_as_much_that_was_sent_since() -> None:
    """Deltas tell it once: what was forgotten of it would be lost to this router until it is cached anew."""
    routing = routing_of()
    full = replace(report_of(range(400), revision=1), cache_tokens=400)
    routing.update({"a": full, "b": report_of()})
    for number in range(10):
        routing._router._prefixes.add("a", tuple(range(1000 * number, 1000 * number + 10)), SIZE)
    order, _ = routing.order("1", hint_of(range(420)))
    assert order[0] == "a"
    assert routing._routed["1"].num_tokens == 20


def test_the_host_tier_counts_and_what_a_later_version_tells_beside_is_passed_over() -> None:
    stats = SchedulerStats(num_blocks=10, num_host_blocks_cached=5)
    told = ReplicaReport.of(stats, PrefixSummary(block_size=SIZE), {})
    assert told.cache_tokens == 15 * SIZE
    assert ReplicaReport.from_plain({**told.to_plain(), "told_by_a_later_version": 1}) == told


def test_news_of_another_ingress_count_before_a_report_does_and_go_no_further() -> None:
    hint = hint_of(range(400))
    packed = b"".join(digest[:4] for digest in hint.digests)
    for holder in "cab":
        routing = routing_of()
        routing.update({"a": report_of(), "b": report_of(), "c": report_of()})
        news = Sent(holder, SIZE, packed), Sent("gone", SIZE, packed)
        order, told = routing.order("x", replace(hint, news=news))
        assert order[0] == holder
        assert told.news == ()
