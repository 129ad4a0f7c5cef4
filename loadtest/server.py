"""What the load test asks a server before it sends load: its model, and tokens to make prompts of."""

from __future__ import annotations

import asyncio
import random
import string
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import grpc

from pageturner.loadtest.channel import OPEN, Access, proxy_hint
from pageturner.loadtest.errors import ServerError
from pageturner.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)

_NUM_CHARACTERS = 1024
_ASK_AGAIN_SECONDS = 0.2

_NOT_FOR_US = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED)
_NO_TOKENIZER = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send to, and as whom. model: empty for the one that the server runs. admin_address: where
    AdminService listens; empty for where all else does."""

    address: str
    model: str = ""
    timeout_seconds: float = 600.0
    connect_seconds: float = 10.0
    loading_seconds: float = 120.0
    access: Access = OPEN
    admin_address: str = ""
    others: tuple[str, ...] = ()
    """Servers that stand in for the one at `address`, which alone is asked what is served, and watched."""


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
    device: str = ""
    block_size: int = 0
    num_blocks: int = 0
    config: tuple[tuple[str, str], ...] = ()

    @property
    def max_context(self) -> int:
        """What prompt and output may reach together: in the model, and in a pool of which they have all."""
        num_slots = self.block_size * self.num_blocks
        return min(self.max_model_len, num_slots) if num_slots else self.max_model_len


@asynccontextmanager
async def connect_all(target: Target) -> AsyncIterator[tuple[grpc.aio.Channel, ...]]:
    """A channel to each server, all of them ready. Raises ServerError."""
    async with AsyncExitStack() as stack:
        servers = (replace(target, address=address) for address in (target.address, *target.others))
        yield tuple([await stack.enter_async_context(connect(server)) for server in servers])


@asynccontextmanager
async def connect(target: Target) -> AsyncIterator[grpc.aio.Channel]:
    """A channel that is ready. Raises ServerError if the server cannot be reached in time."""
    async with target.access.open_channel(target.address) as channel:
        try:
            await asyncio.wait_for(channel.channel_ready(), target.connect_seconds)
        except TimeoutError:
            hint = proxy_hint(target.address)
            raise ServerError(
                f"no server answers at {target.address} within {target.connect_seconds:g} s{hint}"
            ) from None
        yield channel


async def discover(target: Target, seed: int) -> ServedModel:
    """Ask the server what it runs, once it has loaded it. Raises ServerError with what it answers."""
    async with connect(target) as channel:
        try:
            await _loaded(channel, target)
            response = await model_pb2_grpc.ModelServiceStub(channel).GetModel(
                model_pb2.GetModelRequest(name=target.model),
                timeout=target.timeout_seconds,
                metadata=target.access.metadata,
            )
            info = await _server_info(channel, target)
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
        device=info.device,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        config=tuple(sorted(info.config.items())),
    )


async def _server_info(channel: grpc.aio.Channel, target: Target) -> admin_pb2.GetServerInfoResponse:
    """What the server tells of itself; nothing where AdminService is not for this caller, or not here."""
    call = admin_pb2_grpc.AdminServiceStub(channel).GetServerInfo
    request, metadata = admin_pb2.GetServerInfoRequest(), target.access.metadata
    try:
        if not target.admin_address:
            return await call(request, timeout=target.timeout_seconds, metadata=metadata)
        async with target.access.open_channel(target.admin_address) as admin:
            call = admin_pb2_grpc.AdminServiceStub(admin).GetServerInfo
            return await call(request, timeout=target.timeout_seconds, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        if error.code() not in _NOT_FOR_US:
            raise
        return admin_pb2.GetServerInfoResponse()


async def _loaded(channel: grpc.aio.Channel, target: Target) -> None:
    """Wait while the server is there and answers UNAVAILABLE, as it does until its model is loaded. Raises
    AioRpcError where it still does after `loading_seconds`."""
    until = time.monotonic() + target.loading_seconds
    stub = model_pb2_grpc.ModelServiceStub(channel)
    while True:
        try:
            await stub.GetModel(
                model_pb2.GetModelRequest(name=target.model),
                timeout=target.timeout_seconds,
                metadata=target.access.metadata,
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() >= until:
                raise
            await asyncio.sleep(_ASK_AGAIN_SECONDS)
        else:
            return


async def _ordinary_token_ids(
    channel: grpc.aio.Channel, model: model_pb2.Model, target: Target, seed: int
) -> tuple[int, ...]:
    """Token ids of some text, which no special token is among, by one call; any ids where the model has no
    tokenizer, and so no special ones."""
    rng = random.Random(f"{seed}/vocabulary")
    # Of letters alone, a text has no more tokens than characters, so that it fits any model.
    letters = rng.choices(f"{string.ascii_letters}  ", k=min(_NUM_CHARACTERS, model.max_model_len))
    request = generation_pb2.TokenizeRequest(
        model=target.model, prompt=generation_pb2.Prompt(text="".join(letters)), add_special_tokens=False
    )
    try:
        response = await generation_pb2_grpc.GenerationServiceStub(channel).Tokenize(
            request, timeout=target.timeout_seconds, metadata=target.access.metadata
        )
        drawn = sorted(set(response.token_ids))
    except grpc.aio.AioRpcError as error:
        if error.code() not in _NO_TOKENIZER:
            raise
        drawn = rng.sample(range(model.vocab_size), min(_NUM_CHARACTERS, model.vocab_size))
    return tuple(each for each in drawn if each not in model.eos_token_ids) or tuple(drawn)
