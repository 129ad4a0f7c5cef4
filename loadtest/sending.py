"""One process's part of a workload, sent: conversations when they are due, or when others ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

from pageturner.loadtest.client import Exchange, RequestRecord, send
from pageturner.loadtest.errors import OptionError
from pageturner.loadtest.meter import ClientCost, CostMeter
from pageturner.loadtest.server import Target, connect_all
from pageturner.loadtest.workload import (
    LoadtestWorkload,
    PlannedConversation,
    PlannedRequest,
    plan_conversations,
)
from pageturner.v1.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from pageturner.v1.generation_pb2_grpc import GenerationServiceAsyncStub

OnRecord = Callable[[RequestRecord], None]
OnCost = Callable[[ClientCost], None]


@dataclass(frozen=True, slots=True)
class Run:
    """A workload and how it is sent. concurrency: of the closed loop, conversations at once; unused where the
    workload has arrivals. warmup: requests sent and forgotten beforehand. Raises OptionError."""

    target: Target
    workload: LoadtestWorkload
    concurrency: int = 1
    num_processes: int = 1
    warmup: int = 0

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise OptionError("concurrency", f"must be at least 1, not {self.concurrency}")
        if self.num_processes < 1:
            raise OptionError("processes", f"must be at least 1, not {self.num_processes}")
        if not self.is_open and self.num_processes > self.concurrency:
            raise OptionError(
                "processes", f"{self.num_processes} cannot share a concurrency of {self.concurrency}"
            )
        if self.warmup < 0:
            raise OptionError("warmup", f"must not be negative, not {self.warmup}")

    @property
    def is_open(self) -> bool:
        """Conversations begin when due, not when another ended."""
        return self.workload.arrivals is not None

    def concurrency_of(self, part: int) -> int:
        """What one of the processes contributes to the concurrency of the closed loop."""
        return self.concurrency // self.num_processes + (part < self.concurrency % self.num_processes)


def forget_cost(cost: ClientCost) -> None:
    """The on_cost of a caller that trusts its client."""


async def run_part(
    run: Run,
    part: int,
    begin: Callable[[], float],
    on_record: OnRecord,
    on_cost: OnCost = forget_cost,
) -> None:
    """Send the conversations of one process; on_record hears of each request as it ends. `begin` is called
    once all is ready; it returns the start."""
    planned = list(plan_conversations(run.workload, part, run.num_processes))
    meter = CostMeter()
    async with connect_all(run.target) as channels:
        stubs = cycle([GenerationServiceStub(channel) for channel in channels])
        sender = _Sender(stubs, run.target, on_record)
        start = begin()
        try:
            async with meter.running(), asyncio.TaskGroup() as tasks:
                if run.is_open:
                    for conversation in planned:
                        due = start + conversation.first.at_seconds
                        await _until(due)
                        tasks.create_task(sender.converse(conversation, due))
                else:
                    queue = iter(planned)
                    for _ in range(min(run.concurrency_of(part), len(planned))):
                        tasks.create_task(sender.follow(queue, start))
        finally:
            on_cost(meter.cost)


@dataclass(frozen=True, slots=True)
class _Sender:
    """stubs: of the servers in turn, without end. The turns of a conversation go to one of them."""

    stubs: Iterator[GenerationServiceAsyncStub]
    target: Target
    on_record: OnRecord

    async def follow(self, queue: Iterator[PlannedConversation], free_since: float) -> None:
        """One conversation after the other, each due when the one before it ended."""
        for conversation in queue:
            free_since = await self.converse(conversation, free_since)

    async def converse(self, conversation: PlannedConversation, due: float) -> float:
        """All turns, each due when its think time after the answer before it is over; when the last ended."""
        stub, request = next(self.stubs), conversation.first
        exchange = await self._send(stub, request, due)
        for follow_up in conversation.follow_ups:
            due = exchange.record.ended_at + follow_up.think_seconds
            await _until(due)
            request = follow_up.after(request, exchange.answer)
            exchange = await self._send(stub, request, due)
        return exchange.record.ended_at

    async def _send(self, stub: GenerationServiceAsyncStub, request: PlannedRequest, due: float) -> Exchange:
        exchange = await send(
            stub,
            request,
            model=self.target.model,
            scheduled_at=due,
            timeout_seconds=self.target.timeout_seconds,
            now=time.monotonic,
            metadata=self.target.access.metadata,
        )
        self.on_record(exchange.record)
        return exchange


async def _until(due: float) -> None:
    await asyncio.sleep(max(0.0, due - time.monotonic()))
