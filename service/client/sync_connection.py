"""The way to one server for code without an event loop.

On gRPC's own synchronous channel rather than on `AsyncConnection` in a thread with a loop: it is made for
threads, wakes for Ctrl-C, and leaves gRPC's asyncio poller, which a process has once, to the caller's loops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from pageturner.service.client.calls import Call, StreamCall
from pageturner.service.client.credentials import Credentials, call_metadata
from pageturner.service.client.failures import tell_load, typed_errors
from pageturner.service.client.forks import GrpcUse, refuse_calls_in_a_child
from pageturner.service.client.targets import Target
from pageturner.service.rpc.status import UnknownStatus

_R = TypeVar("_R", bound=Message)
_T = TypeVar("_T")


class SyncConnection:
    """One server, from any thread; the threads share a channel, made by the first call.

    A forked child makes one of its own, and leaves that of its parent alone.
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
        self._lock = threading.Lock()
        self._open: grpc.Channel | None = None
        self._use = GrpcUse()
        self._inherited: list[object] = []

    def close(self) -> None:
        """Let go of the channel; calls under way fail. A later call connects anew."""
        self._leave_the_parents()
        with self._lock:
            channel, self._open = self._open, None
        if channel is not None:
            channel.close()

    def ask(self, call: Call[_R, _T]) -> _T:
        """The answer to a call."""
        with self._under_way():
            return self._ask(call)

    def _ask(self, call: Call[_R, _T]) -> _T:
        method = self._channel().unary_unary(
            call.path,
            request_serializer=type(call.request).SerializeToString,
            response_deserializer=call.response.FromString,
        )
        with _told_from_closing():
            rpc = method.future(
                call.request,
                timeout=call.timeout_seconds,
                metadata=call_metadata(self._credentials, call.timeout_seconds),
            )
        try:
            with typed_errors(self.target, call.path):
                response = rpc.result()
                if self._on_load is not None:
                    tell_load(rpc.trailing_metadata(), self._on_load)
                return call.read(response)
        finally:
            rpc.cancel()  # does nothing to a call that is over

    def follow(self, call: StreamCall[_R, _T]) -> Generator[_T, None, None]:
        """What the messages of a stream say. The call ends, on the server too, when this is left."""
        with self._under_way():
            yield from self._follow(call)

    def _follow(self, call: StreamCall[_R, _T]) -> Generator[_T, None, None]:
        method = self._channel().unary_stream(
            call.path,
            request_serializer=type(call.request).SerializeToString,
            response_deserializer=call.response.FromString,
        )
        with _told_from_closing():
            rpc = method(
                call.request,
                timeout=call.timeout_seconds,
                wait_for_ready=call.waits,
                metadata=call_metadata(self._credentials, call.timeout_seconds),
            )
        try:
            with typed_errors(self.target, call.path):
                for message in rpc:
                    if (value := call.read(message)) is not None:
                        yield value
                if self._on_load is not None:
                    tell_load(rpc.trailing_metadata(), self._on_load)
        finally:
            rpc.cancel()

    def _channel(self) -> grpc.Channel:
        with self._lock:
            if self._open is None:
                refuse_calls_in_a_child()
                address, options = self.target.address, self.target.channel_options()
                credentials = self._credentials.of_channel()
                self._open = (
                    grpc.insecure_channel(address, options=options)
                    if credentials is None
                    else grpc.secure_channel(address, credentials, options=options)
                )
            return self._open

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """A call: counted, as no child outlives a fork in the middle of one."""
        self._leave_the_parents()
        with self._lock:
            self._use.num_calls += 1
        try:
            yield
        finally:
            if not self._use.is_inherited():
                with self._lock:
                    self._use.num_calls -= 1

    def _leave_the_parents(self) -> None:
        """In a forked child: the lock may be held by a thread that is not there, and closing the channel that
        the parent still uses would shut down its sockets."""
        if self._use.is_inherited():
            refuse_calls_in_a_child()
            self._inherited.append(self._open)
            self._lock, self._open = threading.Lock(), None
            self._use.begin_anew()


@contextmanager
def _told_from_closing() -> Iterator[None]:
    """gRPC raises ValueError for a channel that another thread closed before the call began."""
    try:
        yield
    except ValueError as error:
        raise UnknownStatus(grpc.StatusCode.CANCELLED.name, "the client was closed") from error
