"""The way to one server for asyncio: calls over a channel of each event loop's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from pageturner.service.client.calls import Call, StreamCall
from pageturner.service.client.credentials import Credentials, call_metadata
from pageturner.service.client.failures import tell_load, typed_errors
from pageturner.service.client.forks import GrpcUse, refuse_asyncio_in_a_child
from pageturner.service.client.targets import Target
from pageturner.service.rpc.status import UnknownStatus

_R = TypeVar("_R", bound=Message)
_T = TypeVar("_T")


class AsyncConnection:
    """One server, from any event loop: each has a channel of its own, made by its first call.

    A child of a process that had any open when it forked can make none, and every call is a ForkedProcess.
    """

    def __init__(
        self,
        target: Target,
        credentials: Credentials,
        on_load: Callable[[bytes], object] | None = None,
    ) -> None:
        self._on_load = on_load
        self.target = target
        self._credentials = credentials
        self._channels: dict[asyncio.AbstractEventLoop, grpc.aio.Channel] = {}
        self._use = GrpcUse()

    async def close(self) -> None:
        """Let go of this loop's channel, and of those whose loop has ended; calls under way fail.

        A later call connects anew.
        """
        self._forget_closed_loops()
        channel = self._channels.pop(asyncio.get_running_loop(), None)
        self._use.num_channels = len(self._channels)
        if channel is not None:
            await channel.close()

    async def ask(self, call: Call[_R, _T]) -> _T:
        """The answer to a call."""
        method = self._channel().unary_unary(
            call.path,
            request_serializer=type(call.request).SerializeToString,
            response_deserializer=call.response.FromString,
        )
        with typed_errors(self.target, call.path), _told_from_cancelling():
            rpc = method(
                call.request,
                timeout=call.timeout_seconds,
                metadata=call_metadata(self._credentials, call.timeout_seconds),
            )
            response = await rpc
            if self._on_load is not None:
                tell_load(await rpc.trailing_metadata(), self._on_load)
        return call.read(response)

    async def follow(self, call: StreamCall[_R, _T]) -> AsyncGenerator[_T, None]:
        """What the messages of a stream say. The call ends, on the server too, when this is left."""
        method = self._channel().unary_stream(
            call.path,
            request_serializer=type(call.request).SerializeToString,
            response_deserializer=call.response.FromString,
        )
        rpc = method(
            call.request,
            timeout=call.timeout_seconds,
            wait_for_ready=call.waits,
            metadata=call_metadata(self._credentials, call.timeout_seconds),
        )
        try:
            with typed_errors(self.target, call.path), _told_from_cancelling():
                async for message in rpc:
                    if (value := call.read(message)) is not None:
                        yield value
                if self._on_load is not None:
                    tell_load(await rpc.trailing_metadata(), self._on_load)
        finally:
            rpc.cancel()

    def _channel(self) -> grpc.aio.Channel:
        """Of the running loop: gRPC binds a channel to the loop that made it."""
        loop = asyncio.get_running_loop()
        channel = self._channels.get(loop)
        if channel is None or self._use.is_inherited():
            refuse_asyncio_in_a_child()
            if self._use.is_inherited():
                self._use.begin_anew()
            self._forget_closed_loops()
            address, options = self.target.address, self.target.channel_options()
            credentials = self._credentials.of_channel()
            channel = self._channels[loop] = (
                grpc.aio.insecure_channel(address, options=options)
                if credentials is None
                else grpc.aio.secure_channel(address, credentials, options=options)
            )
            self._use.num_channels = len(self._channels)
        return channel

    def _forget_closed_loops(self) -> None:
        """Nothing can be awaited there any more; a channel closes when it is collected."""
        for loop in list(self._channels):
            if loop.is_closed():
                self._channels.pop(loop, None)


@contextmanager
def _told_from_cancelling() -> Iterator[None]:
    """gRPC raises CancelledError in a task that nothing cancels when the channel is closed under its call."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise UnknownStatus(grpc.StatusCode.CANCELLED.name, "the client was closed") from None
