"""Every case of every engine, in turns: a noisy minute of the machine hits all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

from pageturner.loadtest.client import Outcome, RequestRecord
from pageturner.loadtest.errors import ServerError
from pageturner.loadtest.peers.cases import Case, demand_of
from pageturner.loadtest.peers.machine import processor_time
from pageturner.loadtest.peers.peer import Peer, Send
from pageturner.loadtest.peers.processes import ServerProcess, started
from pageturner.loadtest.statistics import RunSummary, summarize_run
from pageturner.loadtest.workload import PlannedRequest, plan_requests

READY_SECONDS = 900.0
"""How long a server may take to load; some compile their model."""

_RETRY_SECONDS = 0.25
_WARM_TOKENS = 16
_ANY_TOKEN = 1000
"""An id that models have and that is no special one."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One case of one engine in one round. other_cores: processors that the rest of the machine used
    meanwhile, on average."""

    engine: str
    case: Case
    round: int
    summary: RunSummary
    other_cores: float


@dataclass(frozen=True, slots=True)
class Contender:
    """A peer and the process that serves it, which stands still while it is not its turn."""

    peer: Peer
    process: ServerProcess

    def in_turn(self, case: Case, token_ids: tuple[int, ...], number: int) -> Slice:
        """Measure a case. Raises ServerError where a request fails."""
        with self.process.awake():
            # What it does first after it stood still is no part of the figures.
            asyncio.run(self._run(_warm(1), token_ids, seed=~number))
            before, began = processor_time(self.process.group), time.monotonic()
            records = asyncio.run(self._run(case, token_ids, seed=number))
            seconds, after = time.monotonic() - began, processor_time(self.process.group)
        return Slice(
            self.peer.name,
            case,
            number,
            summarize_run(records),
            other_cores=max(0.0, after.others - before.others) / seconds,
        )

    async def _run(self, case: Case, token_ids: tuple[int, ...], seed: int) -> list[RequestRecord]:
        requests = list(plan_requests(case.workload(token_ids, seed)))
        async with self.peer.connected(self.process.address) as send:
            records = await closed_loop(send, requests, case.concurrency)
        for record in records:
            if record.outcome is not Outcome.OK:
                self.process.check_alive()
                raise ServerError(f"{self.peer.name}: a request {record.outcome.value}: {record.error}")
        return records

    def make_ready(self, concurrencies: Sequence[int]) -> None:
        """Wait until it answers, then let it meet each batch size once. Raises ServerError."""
        with self.process.awake():
            asyncio.run(self._answers())
            for concurrency in sorted(set(concurrencies)):
                asyncio.run(self._run(_warm(concurrency), (_ANY_TOKEN,), seed=0))

    async def _answers(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        (request,) = plan_requests(Case("ready", 8, 1, 1, 1).workload((_ANY_TOKEN,), seed=0))
        while True:
            self.process.check_alive()
            try:
                async with self.peer.connected(self.process.address) as send:
                    record = await send(request, time.monotonic())
                if record.outcome is Outcome.OK:
                    return
                reason = record.error
            except ServerError as error:  # it does not listen yet
                reason = str(error)
            if time.monotonic() > deadline:
                raise ServerError(f"{self.peer.name} did not answer in {READY_SECONDS:g} s: {reason}")
            await asyncio.sleep(_RETRY_SECONDS)


def _warm(concurrency: int) -> Case:
    return Case("warm-up", 2 * _WARM_TOKENS, _WARM_TOKENS, concurrency, concurrency)


@contextmanager
def contenders(
    peers: Sequence[Peer], cases: Sequence[Case], on_ready: Callable[[str], None]
) -> Iterator[list[Contender]]:
    """Start them one after the other; each is warm and stands still. on_ready: told the name of each."""
    with ExitStack() as stack:
        ready = []
        for peer in peers:
            contender = Contender(peer, stack.enter_context(started(peer, demand_of(cases))))
            contender.make_ready([case.concurrency for case in cases])
            ready.append(contender)
            on_ready(peer.name)
        yield ready


def take_turns(
    contenders: Sequence[Contender],
    cases: Sequence[Case],
    rounds: int,
    token_ids: tuple[int, ...],
    on_slice: Callable[[Slice], None],
    turn: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[Slice]:
    """Each case by all engines before the next, another engine first each round; prompts are the same for all
    engines and new each round. turn: entered around each slice."""
    slices = []
    for number in range(1, rounds + 1):
        first = number % len(contenders)
        for case in cases:
            for contender in (*contenders[first:], *contenders[:first]):
                with turn():
                    slices.append(contender.in_turn(case, token_ids, number))
                on_slice(slices[-1])
    return slices


async def closed_loop(
    send: Send, requests: Sequence[PlannedRequest], concurrency: int
) -> list[RequestRecord]:
    """So many in flight; the next is due when one ends."""
    waiting = iter(requests)
    records: list[RequestRecord] = []

    async def follow(due: float) -> None:
        for request in waiting:
            records.append(await send(request, due))
            due = records[-1].ended_at

    start = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(follow(start))
    return records
