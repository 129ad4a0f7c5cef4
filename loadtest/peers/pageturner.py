"""Pageturner itself, by its wire contract: `pageturner serve` of this environment, as its defaults are."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from pageturner.loadtest.client import RequestRecord, send
from pageturner.loadtest.peers.cases import Demand
from pageturner.loadtest.peers.peer import Command, Send
from pageturner.loadtest.server import Target, connect
from pageturner.loadtest.workload import PlannedRequest
from pageturner.v1.generation_pb2_grpc import GenerationServiceStub

_PROGRAM = "import sys; from pageturner.service.cli import main; sys.exit(main())"

_DEFAULT_MAX_MODEL_LEN = 2048
"""Tokens of a sequence that `serve` takes unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class Pageturner:
    """flags: of `pageturner serve`; none for what it does by default."""

    flags: tuple[str, ...] = ()
    name: str = "Pageturner"

    def command(self, port: int, demand: Demand) -> Command:
        longest = demand.tokens_per_sequence
        length = (f"--max-model-len={longest}",) if longest > _DEFAULT_MAX_MODEL_LEN else ()
        flags = (*length, *self.flags, "--host=127.0.0.1", f"--port={port}")
        return Command((sys.executable, "-P", "-c", _PROGRAM, "serve", *flags))

    def connected(self, address: str) -> AbstractAsyncContextManager[Send]:
        return _connected(Target(address))


@asynccontextmanager
async def _connected(target: Target) -> AsyncIterator[Send]:
    async with connect(target) as channel:
        stub = GenerationServiceStub(channel)

        async def send_one(request: PlannedRequest, scheduled_at: float) -> RequestRecord:
            exchange = await send(
                stub,
                request,
                model=target.model,
                scheduled_at=scheduled_at,
                timeout_seconds=target.timeout_seconds,
                now=time.monotonic,
            )
            return exchange.record

        yield send_one
