"""Several plain servers behind one client: in turn, by load, by conversation; those that fail left out."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from support.fake_engine import FakeEngine, accepted, echo
from support.serving import Served, serving

from pageturner.service.backoff import FIRST_REST
from pageturner.service.client import AcceptedEvent, Client, SyncClient
from pageturner.service.client.balancing import (
    Balancer,
    Balancing,
    MixedServersWarning,
    Placement,
    Wanted,
)
from pageturner.service.client.retry import NEVER, Retry, balanced
from pageturner.service.client.targets import parse_target
from pageturner.service.core.clock import ManualClock
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.errors import InvalidArgument, MixedServers
from pageturner.service.rpc.load_report import (
    QUEUED_TOKENS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    OrcaLoadReport,
    load_report,
)

ADDRESSES = ("a:1", "b:1", "c:1")


def balancer(balancing: Balancing, **given: Any) -> tuple[Balancer, ManualClock]:
    clock = ManualClock()
    return Balancer(balancing, ADDRESSES, clock, Random(1).random, **given), clock


def chosen(made: Balancer, wanted: Wanted | None = None) -> str:
    """The request goes on for ever."""
    routed = made.place(wanted or Wanted())
    return "" if routed is None else routed.replica_id


def busy(num_waiting: int) -> bytes:
    engine = FakeEngine()
    engine.stats = SchedulerStats(
        num_waiting=num_waiting, num_running=1, num_queued_prompt_tokens=500 * num_waiting
    )
    return load_report(engine)


def test_in_turn() -> None:
    made, _ = balancer("round-robin")
    assert [chosen(made) for _ in range(6)] == [*ADDRESSES, *ADDRESSES]


def test_the_least_load_is_that_of_what_was_sent_and_of_what_servers_report() -> None:
    made, _ = balancer("least-load")
    assert {chosen(made, Wanted(1000)) for _ in range(3)} == set(ADDRESSES)
    for address, num_waiting in zip(ADDRESSES, (9, 0, 9), strict=True):
        made.report(address, busy(num_waiting))
    assert chosen(made, Wanted(1000)) == "b:1"
    made.report("b:1", b"\xff no report")
    assert [chosen(made, Wanted(10_000)) for _ in range(2)] == ["b:1", "a:1"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_report_of_no_number_tells_nothing_and_costs_no_answer(value: float) -> None:
    made, _ = balancer("least-load")
    for name in (REQUESTS_RUNNING, REQUESTS_WAITING, QUEUED_TOKENS):
        metrics = {REQUESTS_RUNNING: 9.0, REQUESTS_WAITING: 9.0, QUEUED_TOKENS: 9.0, name: value}
        made.report("a:1", OrcaLoadReport(named_metrics=metrics).SerializeToString())
    assert chosen(made) == "a:1"


def test_a_session_stays_wherever_the_client_is() -> None:
    made, _ = balancer("session")
    other = Balancer("session", reversed(ADDRESSES), ManualClock(), Random(7).random)
    homes = {name: chosen(made, Wanted(10, name)) for name in map(str, range(40))}
    assert set(homes.values()) == set(ADDRESSES)
    for name, home in homes.items():
        assert chosen(made, Wanted(10, name)) == chosen(other, Wanted(10, name)) == home
    made.failed("a:1")
    moved = {name for name, home in homes.items() if chosen(made, Wanted(10, name)) != home}
    assert moved == {name for name, home in homes.items() if home == "a:1"}


def test_a_server_that_fails_is_left_out_for_longer_each_time_and_comes_back() -> None:
    made, clock = balancer("round-robin")
    for rest in (FIRST_REST, 2 * FIRST_REST):
        made.failed("b:1")
        assert "b:1" not in {chosen(made) for _ in range(6)}
        clock.advance(rest * 0.99)
        assert "b:1" not in {chosen(made) for _ in range(6)}
        clock.advance(rest * 0.02)
        assert "b:1" in {chosen(made) for _ in range(6)}
    made.succeeded("b:1")
    made.failed("b:1")
    clock.advance(FIRST_REST * 1.01)
    assert "b:1" in {chosen(made) for _ in range(6)}


def test_calls_that_are_lost_together_are_one_failure() -> None:
    made, clock = balancer("round-robin")
    for _ in range(64):
        made.failed("b:1")
    clock.advance(FIRST_REST)
    assert "b:1" in {chosen(made) for _ in range(6)}


def test_where_all_are_left_out_any_is_tried() -> None:
    made, _ = balancer("least-load")
    for address in ADDRESSES:
        made.failed(address)
    assert chosen(made) == ""
    assert Placement(made, Wanted(), ADDRESSES).choose((), 2) == 2


def test_a_call_that_has_ended_weighs_no_more() -> None:
    made, _ = balancer("least-load")
    first = Placement(made, Wanted(10_000), ADDRESSES)
    home = first.choose((), 0)
    assert chosen(made, Wanted(10)) != ADDRESSES[home]
    first.end()
    first.end()
    assert chosen(made, Wanted(10)) == ADDRESSES[home]


def test_names_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="balancing"):
        Client("a", balancing="fastest")  # type: ignore[arg-type] # what is tested
    with pytest.raises(InvalidArgument, match="mixed"):
        SyncClient("a", balancing="session", mixed="maybe")  # type: ignore[arg-type] # what is tested
    with pytest.raises(InvalidArgument, match="named one by one"):
        Client("dns:///headless:50051", balancing="session")


def test_the_addresses_of_one_name_are_grpcs_to_balance() -> None:
    targets = (parse_target("dns:///headless:50051"),)
    (target,) = balanced(targets, "least-load", "warn", NEVER, ManualClock(), Random(1).random, None).targets
    options = dict(target.channel_options())
    assert options["grpc.service_config"] == '{"loadBalancingConfig": [{"weighted_round_robin": {}}]}'
    assert options["grpc.dns_min_time_between_resolutions_ms"] == 1000
    assert "grpc.service_config" not in dict(targets[0].channel_options())


@dataclass(frozen=True, slots=True)
class Fleet:
    engines: list[FakeEngine]
    served: list[Served]

    @property
    def targets(self) -> list[str]:
        return [f"127.0.0.1:{each.port}" for each in self.served]

    def num_requests(self) -> list[int]:
        return [len(engine.requests) for engine in self.engines]


@asynccontextmanager
async def fleet(*engines: FakeEngine) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(serving(engine)) for engine in engines]
        yield Fleet(list(engines), served)


async def test_answers_are_spread_and_loads_learnt_from_trailers() -> None:
    async with fleet(FakeEngine(), FakeEngine()) as servers:
        async with Client(servers.targets, balancing="round-robin") as client:
            for _ in range(4):
                await client.generate("hi")
            assert servers.num_requests() == [2, 2]
        servers.engines[0].stats = SchedulerStats(num_waiting=50, num_queued_prompt_tokens=90_000)
        async with Client(servers.targets, balancing="least-load") as client:
            for _ in range(2):
                await client.generate("hi")  # one each: nothing is known of either
            for _ in range(5):
                await client.generate("hi")
            assert servers.num_requests() == [3, 8]
            await client.tokenize("hi")


async def test_a_lost_server_is_left_out_and_no_answer_with_it() -> None:
    retry = Retry(first_wait_seconds=0.01)
    async with (
        fleet(FakeEngine(), FakeEngine()) as servers,
        Client(servers.targets, balancing="round-robin", retry=retry) as client,
    ):
        await servers.served[0].server.stop()
        for _ in range(4):
            assert (await client.generate("hi")).text
        assert servers.num_requests()[1] == 4


def of_weights(name: str) -> FakeEngine:
    def script(request: Any, token_ids: Any) -> Any:
        steps = [*echo(request, token_ids)]
        return [
            replace(step, fingerprint=f"weights={name};code=1;prompt=7", is_exact=True)
            if type(step) is type(accepted(request, token_ids))
            else step
            for step in steps
        ]

    return FakeEngine(script)


async def test_other_weights_are_told_once_by_name() -> None:
    async with fleet(of_weights("x"), of_weights("y")) as servers:
        async with Client(servers.targets, balancing="round-robin") as client:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                for _ in range(6):
                    await client.generate("hi")
            (warning,) = told
            assert warning.category is MixedServersWarning
            assert re.search(r"weights \((x, y|y, x)\)", str(warning.message))  # as the servers are named
            assert servers.num_requests() == [3, 3]
        async with Client(servers.targets, balancing="round-robin", mixed="allow") as client:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for _ in range(4):
                    await client.generate("hi")


async def test_other_weights_are_refused_where_that_is_wanted() -> None:
    async with (
        fleet(of_weights("x"), of_weights("y"), of_weights("x")) as servers,
        Client(servers.targets, balancing="round-robin", mixed="refuse") as client,
    ):
        told = [[event async for event in client.stream("hi")] for _ in range(6)]
        fingerprints = set()
        for first, *_ in told:
            assert isinstance(first, AcceptedEvent)
            fingerprints.add(first.fingerprint)
        assert len(fingerprints) == 1  # that of the server asked first, whose port is chance
        assert all(len(events) > 2 for events in told)


async def test_where_no_other_server_is_left_the_refusal_is_the_error() -> None:
    async with (
        fleet(of_weights("x"), of_weights("y")) as servers,
        Client(servers.targets, balancing="round-robin", mixed="refuse", retry=NEVER) as client,
    ):
        await client.generate("hi")
        with pytest.raises(MixedServers, match="weights"):
            await client.generate("hi")


def test_what_differs_is_said_and_what_is_of_the_answer_does_not() -> None:
    made, _ = balancer("round-robin", mixed="refuse")
    made.note_fingerprint("a:1", "weights=x;prompt=1")
    made.note_fingerprint("b:1", "weights=x;prompt=2;grammar=g")
    with pytest.raises(MixedServers, match=r"c:1 and a:1 compute tokens otherwise: weights \(y, x\)"):
        made.note_fingerprint("c:1", "weights=y;prompt=1")


def test_a_server_that_was_started_anew_with_other_weights_is_refused() -> None:
    made, _ = balancer("round-robin", mixed="refuse")
    for address in ADDRESSES:
        made.note_fingerprint(address, "weights=x;prompt=1")
    for address in ADDRESSES[1:] * 2:
        with pytest.raises(MixedServers, match=rf"{address} and a:1 compute tokens otherwise"):
            made.note_fingerprint(address, "weights=y;prompt=2")
    made.note_fingerprint("a:1", "weights=y;prompt=3")  # the last of the old ones: now all have these
    for address in ADDRESSES:
        made.note_fingerprint(address, "weights=y;prompt=4")


def _no_ejection(self: Balancer, address: str) -> None:
    return None


def test_the_proof_of_leaving_out_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Balancer, "failed", _no_ejection)
    with pytest.raises(AssertionError):
        test_a_server_that_fails_is_left_out_for_longer_each_time_and_comes_back()
