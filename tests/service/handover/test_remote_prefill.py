"""Whom a decoding server asks for the KV of a prompt, and how long it is kept waiting for it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.scripted import recording_logger

from pageturner.policies.views import Rates
from pageturner.service.backoff import FIRST_REST, LONGEST_REST
from pageturner.service.client.async_connection import AsyncConnection
from pageturner.service.core.clock import ManualClock
from pageturner.service.core.memory.prefix_cache import PrefixHasher
from pageturner.service.core.prefix_summary import PrefixSummary
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.engine.block_receiver import BlockReceiver
from pageturner.service.engine.handover import HandoverOptions
from pageturner.service.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    EngineDead,
    InvalidArgument,
    PageturnerError,
    QueueFull,
    StepFailed,
    TenantLimitReached,
)
from pageturner.service.handover.remote_prefill import OwnKv, RemotePrefill
from pageturner.service.routing.peers import REFUSED_REST, SLOWEST, Peers

BLOCK = 16
PATIENCE = 10.0
AWAY = EngineDead("planted")


class SlowServer:
    """A connection to a server that fails each call, a while after it was asked."""

    def __init__(
        self, address: str, clock: ManualClock, seconds: float, error: PageturnerError = AWAY
    ) -> None:
        self.target = SimpleNamespace(address=address)
        self._error = error
        self.num_calls, self.num_closed = 0, 0
        self._clock = clock
        self._seconds = seconds

    async def follow(self, call: object) -> AsyncGenerator[Any, None]:
        self.num_calls += 1
        self._clock.advance(self._seconds)
        raise self._error
        yield

    async def close(self) -> None:
        self.num_closed += 1


def peers_of(*servers: SlowServer, clock: ManualClock) -> Peers[AsyncConnection]:
    return Peers([cast(AsyncConnection, server) for server in servers], clock.now)


@pytest.fixture
def receiver() -> Iterator[BlockReceiver]:
    receiver = BlockReceiver(64, lambda block: memoryview(bytearray(4)), recording_logger()[0])
    yield receiver
    receiver.close()


def remote_prefill(
    peers: Peers[AsyncConnection], clock: ManualClock, receiver: BlockReceiver
) -> RemotePrefill:
    logger, _ = recording_logger()
    options = HandoverOptions("decode", ("a:1",), min_tokens=2 * BLOCK, patience_seconds=PATIENCE)
    own = OwnKv("weights=x", "layout", BLOCK, 4)
    return RemotePrefill(peers, receiver, PrefixHasher(b"key"), own, options, clock, logger)


def request(num_tokens: int, **given: Any) -> NewRequest:
    return NewRequest("r", tuple(range(num_tokens)), SamplingParams(), 1, 0.0, **given)


async def nothing_held() -> PrefixSummary:
    return PrefixSummary(block_size=BLOCK)


async def no_look() -> PrefixSummary:
    raise AssertionError("a look takes a step of the engine, which this request need not wait for")


async def test_each_server_is_asked_once_however_soon_it_may_be_asked_again(receiver: BlockReceiver) -> None:
    clock = ManualClock()
    servers = [SlowServer(f"{name}:1", clock, PATIENCE) for name in "abc"]
    peers = peers_of(*servers, clock=clock)
    await remote_prefill(peers, clock, receiver).fetch(request(100), nothing_held)
    assert [server.num_calls for server in servers] == [1, 1, 1]
    assert clock.now() == 3 * PATIENCE > FIRST_REST


@pytest.mark.parametrize(
    "new",
    [
        request(2 * BLOCK),
        request(100, adapter="a"),
        request(100, bypass_prefix_cache=True),
        request(100, hands_over=True),
        request(100, is_scoring=True),
    ],
)
async def test_what_is_computed_here_in_any_case_waits_for_no_look_at_the_cache(
    receiver: BlockReceiver, new: NewRequest
) -> None:
    clock = ManualClock()
    server = SlowServer("a:1", clock, 0.0)
    await remote_prefill(peers_of(server, clock=clock), clock, receiver).fetch(new, no_look)
    assert not server.num_calls


@pytest.mark.parametrize(
    ("error", "seconds", "is_its_own"),
    [
        (AWAY, 0.0, True),
        (QueueFull("full", 1.0), 0.0, True),
        (DeadlineExceeded("no answer for long"), 5.0, True),
        (DeadlineExceeded("there was hardly time"), 0.2, False),
        (DeadlineUnreachable("by its queue"), 5.0, False),
        (InvalidArgument("token_ids", "longer than its context"), 0.0, False),
        (InvalidArgument("client_key", "key.pem cannot be read: Permission denied"), 0.0, True),
        (StepFailed("by these tokens"), 5.0, False),
        (TenantLimitReached("tokens_per_minute", "of this tenant", 1.0), 0.0, False),
    ],
)
async def test_a_server_is_left_alone_for_reasons_of_its_own_alone(
    receiver: BlockReceiver, error: PageturnerError, seconds: float, is_its_own: bool
) -> None:
    """One tenant's short deadlines must not cost the others their hand-overs."""
    clock = ManualClock()
    server = SlowServer("a:1", clock, seconds, error)
    prefill = remote_prefill(peers_of(server, clock=clock), clock, receiver)
    for _ in range(2):
        await prefill.fetch(request(100), nothing_held)
    assert server.num_calls == (1 if is_its_own else 2)
    assert server.num_closed == (1 if is_its_own else 0), "it is reached anew where it failed"


async def test_all_blocks_may_take_some_times_what_computing_them_takes_here(
    receiver: BlockReceiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, asked = ManualClock(), list[tuple[int, int]]()
    peers = peers_of(SlowServer("a:1", clock, 0.0), clock=clock)
    prefill = remote_prefill(peers, clock, receiver)
    rates = Rates(prefill_seconds_per_token=0.5, prefill_seconds_per_token_context=0.25)
    prefill._own = replace(prefill._own, rates=rates)
    tokens = 3 * BLOCK * 0.5 + (3 * BLOCK * 2 * BLOCK + 3 * BLOCK * (3 * BLOCK + 1) / 2) * 0.25
    assert prefill._longest(first=2, num_blocks=3) == PATIENCE + SLOWEST * tokens

    def noted(first: int, num_blocks: int) -> float:
        asked.append((first, num_blocks))
        return 1.0

    monkeypatch.setattr(prefill, "_longest", noted)
    (peer,) = peers
    with pytest.raises(EngineDead):
        await prefill._take_in(peer, request(100), 2, [b"a", b"b", b"c"])
    assert asked == [(2, 3)]


async def test_a_connection_that_others_use_is_not_closed(receiver: BlockReceiver) -> None:
    clock = ManualClock()
    server = SlowServer("a:1", clock, 0.0)
    peers = peers_of(server, clock=clock)
    (peer,) = peers
    peer.num_tokens = 64
    await remote_prefill(peers, clock, receiver).fetch(request(100), nothing_held)
    assert (server.num_calls, server.num_closed, peer.num_tokens) == (1, 0, 64)


async def test_one_that_lacks_enough_asks(receiver: BlockReceiver) -> None:
    """The other half of the test above: its cases are not left out for a reason that all share."""
    clock = ManualClock()
    server = SlowServer("a:1", clock, 0.0)
    await remote_prefill(peers_of(server, clock=clock), clock, receiver).fetch(request(100), nothing_held)
    assert server.num_calls == 1


def test_a_server_away_for_a_day_is_still_left_alone_for_half_a_minute() -> None:
    clock = ManualClock()
    peers = peers_of(SlowServer("a:1", clock, 0.0), clock=clock)
    rests = []
    for _ in range(3000):  # 2.0**1024 is no float
        peer = peers.choose()
        assert peer is not None
        peers.failed(peer, "away", is_refusal=False)
        rests.append(peer.rests_until - clock.now())
        clock.advance(LONGEST_REST)
    assert rests[:3] == [FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST]
    assert set(rests[7:]) == {LONGEST_REST}


def test_hand_overs_that_fail_together_are_one_failure() -> None:
    clock = ManualClock()
    peers = peers_of(SlowServer("a:1", clock, 0.0), clock=clock)
    peer = peers.choose()
    assert peer is not None
    news = [peers.failed(peer, "away", is_refusal=False) for _ in range(64)]
    assert news == [True] + [False] * 63
    assert peer.rests_until == FIRST_REST
    peers.failed(peer, "other weights", is_refusal=True)
    assert peer.rests_until == REFUSED_REST, "which asking again will not mend"
    peers.failed(peer, "away", is_refusal=False)
    assert peer.rests_until == REFUSED_REST
