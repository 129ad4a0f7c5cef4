"""The place where it happens: one server, honest neighbours, and the settling after each fault."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chaos.adapter import save_adapter
from chaos.asking import ADAPTER
from chaos.calling import OK, Answer, request, stream
from chaos.ledger import Ledger
from chaos.server import Figures, ServerProcess, running
from pageturner.v1 import admin_pb2
from pageturner.v1.admin_pb2_grpc import AdminServiceStub
from pageturner.v1.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from pageturner.v1.admin_pb2_grpc import AdminServiceAsyncStub
    from pageturner.v1.generation_pb2_grpc import GenerationServiceAsyncStub

SETTLE_SECONDS = 60.0
"""For what a fault left to be gone."""

NUM_NEIGHBOURS = 3
PROMPTS = tuple(tuple((7 * i + 3 * number) % 400 + 1 for i in range(12 + 5 * number)) for number in range(4))
ANSWER_TOKENS = 24

EXECUTOR_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Of asyncio's own executor, which makes them when they are first needed and keeps them."""

PLAIN_CHANNEL = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
"""A connection of its own, to this machine itself."""


@dataclass
class Site:
    """folder: for files of the faults. reference: each prompt's tokens, asked before anything happened.

    tolerated: statuses in which a neighbour's stream may end too, until all is settled. expected_faults:
    events of level error that the fault under way makes the server log.
    """

    model: Path | str
    folder: Path
    server: ServerProcess
    channel: grpc.aio.Channel
    ledger: Ledger
    reference: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    tolerated: frozenset[str] = frozenset()
    expected_faults: frozenset[str] = frozenset()
    baseline: Figures | None = None
    _may_run: asyncio.Event = field(default_factory=asyncio.Event)
    _num_parked: int = 0

    @property
    def stub(self) -> GenerationServiceAsyncStub:
        """Of the site's own channel."""
        return GenerationServiceStub(self.channel)

    @property
    def admin(self) -> AdminServiceAsyncStub:
        """Of the site's own channel."""
        return AdminServiceStub(self.channel)

    @asynccontextmanager
    async def new_channel(self, *options: tuple[str, int | str]) -> AsyncIterator[grpc.aio.Channel]:
        """A connection that no one else uses."""
        async with grpc.aio.insecure_channel(
            self.server.target, options=(*PLAIN_CHANNEL, *options)
        ) as channel:
            yield channel

    # Neighbours

    @asynccontextmanager
    async def neighbours(self) -> AsyncIterator[None]:
        """Honest clients in the background, each of whose answers must be the reference's."""
        self._may_run.set()
        tasks = [asyncio.create_task(self._live_beside(number)) for number in range(NUM_NEIGHBOURS)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception):
                    raise outcome

    def tolerate(self, *codes: frozenset[str]) -> None:
        """From now on, until all is settled."""
        self.tolerated = self.tolerated.union(*codes)

    async def _live_beside(self, number: int) -> None:
        turn = number
        while True:
            if not self._may_run.is_set():
                self._num_parked += 1
                await self._may_run.wait()
                self._num_parked -= 1
            turn += 1
            answer = await self.ask_plainly("neighbour", turn, OK | self.tolerated)
            if answer.code != "OK":
                await asyncio.sleep(0.05)  # it was refused: a client waits before it asks again

    async def ask_plainly(self, purpose: str, turn: int, may_end: frozenset[str] = OK) -> Answer:
        """An ordinary request, whose tokens must be the reference's."""
        prompt = PROMPTS[turn % len(PROMPTS)]
        asked = request(self.ledger.new_id(purpose), prompt, max_tokens=ANSWER_TOKENS)
        allowed = frozenset((*may_end, "RESOURCE_EXHAUSTED", "UNAVAILABLE", "CANCELLED"))
        answer = await stream(self.stub, self.ledger, asked, allowed)
        if answer.code not in may_end | self.tolerated:
            self.ledger.problem(f"{asked.request_id}: ended {answer.code} ({answer.details})")
        if answer.code == "OK":
            expected = self.reference.setdefault(prompt, answer.tokens[0])
            if answer.tokens[0] != expected:
                self.ledger.problem(f"{asked.request_id}: other tokens than the reference's")
        return answer

    # Settling

    async def until(self, what: str, holds: Callable[[admin_pb2.Load], bool]) -> None:
        """Wait for it, with a look at the server's load ten times a second; that it never came is a problem.

        The watch ends here: one that is only dropped goes on, and a few dozen of them fill a server's time.
        """
        load = None
        call = self.admin.WatchLoad(admin_pb2.WatchLoadRequest(interval_seconds=0.1))
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_SECONDS):
                    async for message in call:
                        load = message.load
                        if holds(load):
                            return
        finally:
            call.cancel()
        self.ledger.problem(f"never came: {what}; {_shown(load)}, {self.server.figures()}")

    async def until_logged(self, event: str, request_id: str = "") -> None:
        """Wait until the log has had this event since the last settling, of this request if one is named."""
        log = self.server.log
        assert log is not None, "the site's server has a log that is read"

        def is_logged(_: admin_pb2.Load) -> bool:
            log.read()
            return any(name == event and request_id in ("", of) for name, of in log.events)

        await self.until(f"{event} {request_id} in the log", is_logged)

    async def settle(self) -> None:
        """Wait until nothing of the fault is left, and check that all is as before."""
        self._may_run.clear()
        await self.until("neighbours at rest", lambda load: self._num_parked == NUM_NEIGHBOURS)
        await self.until("nothing lives and every block is back", is_idle)
        await self._check_health()
        await self.ask_plainly("plain", 0)
        await self.until("an end of each accepted request in the log", self._log_is_even)
        await self.until("descriptors and threads as before", self._is_slim)
        if self.server.log is not None:
            self.server.check_log(self.ledger, self.expected_faults)
        self.tolerated = self.expected_faults = frozenset()
        self._may_run.set()

    def _log_is_even(self, load: admin_pb2.Load) -> bool:
        if self.server.log is not None:
            self.server.log.read()
        return self.server.log is None or not self.server.log.open_ids or bool(self.server.log.num_lost_lines)

    async def _check_health(self) -> None:
        health = health_pb2_grpc.HealthStub(self.channel)  # type: ignore[no-untyped-call] # has no types
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=SETTLE_SECONDS)
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            self.ledger.problem(f"health is {answer.status}")

    def _is_slim(self, load: admin_pb2.Load) -> bool:
        figures = self.server.figures()
        if self.baseline is None:
            self.baseline = figures
        return (
            figures.num_descriptors <= self.baseline.num_descriptors
            and figures.num_threads <= self.baseline.num_threads + EXECUTOR_THREADS
        )


def is_idle(load: admin_pb2.Load) -> bool:
    """Nothing runs or waits, and no block has an owner."""
    held = (load.num_running, load.num_waiting, load.num_swapped, load.num_queued_prompt_tokens)
    blocks = (load.num_blocks_used, load.num_host_blocks_used)
    return not any((*held, *blocks)) and load.num_blocks_free + load.num_blocks_evictable == load.num_blocks


def _shown(load: admin_pb2.Load | None) -> str:
    return "no load was told" if load is None else " ".join(str(load).split())


@asynccontextmanager
async def site(
    model: Path | str, folder: Path, ledger: Ledger, flags: Sequence[str] = ()
) -> AsyncIterator[Site]:
    """A server with an adapter, its baseline taken when it has answered each of the prompts."""
    adapter = save_adapter(model, folder / ADAPTER)
    async with (
        running(model, folder, flags=[f'--adapters-load={{ {ADAPTER} = "{adapter}" }}', *flags]) as server,
        grpc.aio.insecure_channel(server.target, options=PLAIN_CHANNEL) as channel,
    ):
        place = Site(model, folder, server, channel, ledger)
        for turn in range(2 * len(PROMPTS)):
            await place.ask_plainly("first", turn)
        async with place.neighbours():
            await place.settle()
            yield place
