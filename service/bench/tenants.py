"""`pageturner bench tenants`: a quiet tenant alone, then beside one that floods the server.

The server authenticates both. The quiet tenant sends a request at even times, whether or not the one before
is answered; latency counts from when it was due. The other keeps many requests open; a refused one waits
as long as its RetryInfo says.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import grpc

from pageturner.service.auth.tokens import BearerToken, new_token
from pageturner.service.client.server_process import running_server
from pageturner.service.errors import PageturnerError, QueueFull
from pageturner.service.rpc.status import from_status
from pageturner.v1 import generation_pb2 as pb
from pageturner.v1.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from pageturner.v1.generation_pb2_grpc import GenerationServiceAsyncStub

QUIET, FLOOD = "quiet", "flood"
_STATUS_KEY = "grpc-status-details-bin"
LONGEST_ANSWER = 60.0
"""Seconds; a request that takes longer has failed. No deadline tells the server: it would shed by it."""

_SETTLE_SECONDS = 3.0
"""Between the begin of the flood and the first request beside it that counts."""


@dataclass(frozen=True, slots=True)
class TenantsLoad:
    """interval_seconds: between two requests of the quiet tenant. num_open: requests that the other keeps
    open."""

    interval_seconds: float
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    num_open: int
    flood_prompt_tokens: int
    flood_output_tokens: int


@dataclass(frozen=True, slots=True)
class Answers:
    """The quiet tenant's requests in one phase: seconds from when each was due; those of a refused or failed
    one are infinite."""

    first_token: tuple[float, ...]
    end: tuple[float, ...]

    def figures(self) -> dict[str, float]:
        """Medians and 90th percentiles."""
        return {
            "ttft_p50": statistics.median(self.first_token),
            "ttft_p90": percentile(self.first_token, 0.9),
            "latency_p50": statistics.median(self.end),
            "latency_p90": percentile(self.end, 0.9),
            "failed": sum(map(math.isinf, self.end)),
        }


@dataclass(frozen=True, slots=True)
class TenantsResult:
    """flood_tokens_per_second: output tokens of the flood beside the quiet tenant."""

    load: TenantsLoad
    alone: Answers
    beside: Answers
    flood_tokens_per_second: float
    flood_refused: int

    def figures(self) -> dict[str, object]:
        """Both phases, and the second over the first."""
        alone, beside = self.alone.figures(), self.beside.figures()
        ratios = {f"{name}_ratio": beside[name] / alone[name] for name in alone if name != "failed"}
        return {
            "alone": alone,
            "beside": beside,
            **ratios,
            "flood_tokens_per_second": self.flood_tokens_per_second,
            "flood_refused": self.flood_refused,
        }


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that so large a share of all do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def measure_tenants(load: TenantsLoad, arguments: Sequence[str], say: Callable[[str], None]) -> TenantsResult:
    """arguments: flags of the server. say: told of each phase. Raises PageturnerError if the server fails."""
    tokens = {QUIET: new_token(), FLOOD: new_token()}
    with tempfile.TemporaryDirectory() as folder:
        identities = Path(folder) / "identities.toml"
        identities.write_text("".join(map(_entry, tokens, tokens.values())), encoding="utf-8")
        with running_server([*arguments, f"--auth-identities={identities}"]) as server:
            return asyncio.run(_measure(server.target, load, tokens, say))


def _entry(tenant: str, token: BearerToken) -> str:
    return f'[tenants.{tenant}]\ntokens = [{{ id = "{token.id}", sha256 = "{token.digest.hex()}" }}]\n'


async def _measure(
    target: str, load: TenantsLoad, tokens: dict[str, BearerToken], say: Callable[[str], None]
) -> TenantsResult:
    async with _tenant(target, tokens[QUIET]) as quiet, _tenant(target, tokens[FLOOD]) as flood:
        await _ask_evenly(quiet, load, 3)  # warm
        alone = await _ask_evenly(quiet, load, load.num_requests)
        say(_told("alone", alone))
        flooding = _Flood(flood, load)
        async with flooding:
            await asyncio.sleep(_SETTLE_SECONDS)
            started, before = time.monotonic(), flooding.num_tokens
            beside = await _ask_evenly(quiet, load, load.num_requests)
            rate = (flooding.num_tokens - before) / (time.monotonic() - started)
        say(_told("beside", beside))
    return TenantsResult(load, alone, beside, rate, flooding.num_refused)


def _told(phase: str, answers: Answers) -> str:
    figures = answers.figures()
    return f"{phase}: p50 {figures['latency_p50']:.3f} s, first token {figures['ttft_p50']:.3f} s"


@dataclass(slots=True)
class _Tenant:
    """Calls under one token. Prompts are random, so that no cached prefix helps."""

    stub: GenerationServiceAsyncStub
    metadata: tuple[tuple[str, str], ...]
    random: Random = field(default_factory=lambda: Random(0))  # prompts, no secrets

    async def deltas(self, num_prompt: int, num_output: int) -> AsyncIterator[int]:
        """How many tokens come, whenever some do. Raises PageturnerError."""
        ids = [self.random.randrange(1000, 20_000) for _ in range(num_prompt)]
        request = pb.GenerateStreamRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=ids)))
        request.sampling.max_tokens = num_output
        request.sampling.ignore_eos = True
        call = self.stub.GenerateStream(request, metadata=self.metadata)
        try:
            async for message in call:
                if message.WhichOneof("event") == "delta":
                    yield len(message.delta.token_ids)
        except grpc.aio.AioRpcError as error:
            details = dict(error.trailing_metadata() or ()).get(_STATUS_KEY, b"")
            assert isinstance(details, bytes), "a status of google.rpc is bytes"
            raise from_status(error.code(), error.details() or "", details) from error


@asynccontextmanager
async def _tenant(target: str, token: BearerToken) -> AsyncIterator[_Tenant]:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = GenerationServiceStub(channel)
        yield _Tenant(stub, (("authorization", f"Bearer {token.text}"),))


async def _ask_evenly(tenant: _Tenant, load: TenantsLoad, count: int) -> Answers:
    start = time.monotonic()
    due = [start + number * load.interval_seconds for number in range(count)]
    answers = await asyncio.gather(*(_ask(tenant, load, at) for at in due))
    return Answers(tuple(first for first, _ in answers), tuple(end for _, end in answers))


async def _ask(tenant: _Tenant, load: TenantsLoad, due: float) -> tuple[float, float]:
    """Seconds to the first token and to the end."""
    await asyncio.sleep(due - time.monotonic())
    first = math.inf
    try:
        async with asyncio.timeout(LONGEST_ANSWER):
            async for _ in tenant.deltas(load.prompt_tokens, load.output_tokens):
                first = min(first, time.monotonic() - due)
    except (PageturnerError, TimeoutError):
        return first, math.inf
    return first, time.monotonic() - due


class _Flood:
    """Keeps requests open from entering to leaving."""

    def __init__(self, tenant: _Tenant, load: TenantsLoad) -> None:
        self._tenant = tenant
        self._load = load
        self._tasks: list[asyncio.Task[None]] = []
        self.num_tokens = 0
        self.num_refused = 0

    async def __aenter__(self) -> None:
        self._tasks = [asyncio.create_task(self._ask_again()) for _ in range(self._load.num_open)]

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask_again(self) -> None:
        load = self._load
        while True:
            try:
                async for count in self._tenant.deltas(load.flood_prompt_tokens, load.flood_output_tokens):
                    self.num_tokens += count
            except QueueFull as error:
                self.num_refused += 1
                await asyncio.sleep(error.retry_after_seconds)
