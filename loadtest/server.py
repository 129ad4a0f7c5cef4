"""What the load test asks a server before it sends load: its model, and tokens to make prompts of."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from pageturner.loadtest.channel import channel_options, proxy_hint
from pageturner.loadtest.errors import ServerError
from pageturner.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)

_NUM_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send to. model: empty for the one that the server runs."""

    address: str
    model: str = ""
    timeout_seconds: float = 600.0
    connect_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a report says of the server. token_ids: some that show text, so none that are special."""

    name: str
    architecture: str
    backend: str
    dtype: str
    kernels: str
    version: str
    max_model_len: int
    token_ids: tuple[int, ...]


@asynccontextmanager
async def connect(target: Target) -> AsyncIterator[grpc.aio.Channel]:
    """A channel that is ready. Raises ServerError if the server cannot be reached in time."""
    options = channel_options(target.address)
    async with grpc.aio.insecure_channel(target.address, options=options) as channel:
        try:
            await asyncio.wait_for(channel.channel_ready(), target.connect_seconds)
        except TimeoutError:
            hint = proxy_hint(target.address)
            raise ServerError(
                f"no server answers at {target.address} within {target.connect_seconds:g} s{hint}"
            ) from None
        yield channel


async def discover(target: Target, seed: int) -> ServedModel:
    """Ask the server what it runs. Raises ServerError with what it answers."""
    async with connect(target) as channel:
        try:
            response = await model_pb2_grpc.ModelServiceStub(channel).GetModel(
                model_pb2.GetModelRequest(name=target.model), timeout=target.timeout_seconds
            )
            info = await admin_pb2_grpc.AdminServiceStub(channel).GetServerInfo(
                admin_pb2.GetServerInfoRequest(), timeout=target.timeout_seconds
            )
            token_ids = await _ordinary_token_ids(channel, response.model, target, seed)
        except grpc.aio.AioRpcError as error:
            raise ServerError(f"{target.address}: {error.code().name}: {error.details()}") from error
    return ServedModel(
        name=response.model.name,
        architecture=response.model.architecture,
        backend=response.model.backend,
        dtype=response.model.dtype,
        kernels=info.kernels,
        version=info.version,
        max_model_len=response.model.max_model_len,
        token_ids=token_ids,
    )


async def _ordinary_token_ids(
    channel: grpc.aio.Channel, model: model_pb2.Model, target: Target, seed: int
) -> tuple[int, ...]:
    """Token ids drawn from the vocabulary, without those that the server leaves out of text as special."""
    rng = random.Random(f"{seed}/vocabulary")
    drawn = rng.sample(range(model.vocab_size), min(_NUM_CANDIDATES, model.vocab_size))
    candidates = [token_id for token_id in drawn if token_id not in model.eos_token_ids] or drawn
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    answers = await asyncio.gather(
        *(
            stub.Detokenize(
                generation_pb2.DetokenizeRequest(model=target.model, token_ids=[token_id]),
                timeout=target.timeout_seconds,
            )
            for token_id in candidates
        )
    )
    shown = [token_id for token_id, answer in zip(candidates, answers, strict=True) if answer.text]
    # A null engine may show no text at all; then no token is more special than another.
    return tuple(shown or candidates)
