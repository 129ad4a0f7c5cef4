"""gRPC's server for asyncio, guarded against calls of a method whose name is no UTF-8.

From grpcio 1.84 on its main loop decodes the name of every call that no registered method answers, and a
name that cannot be decoded ends the loop, and with it the server: one frame of a stranger would be the end of
the service. Here every method is registered, and the calls of others are answered by a loop of our own, which
does not look at their names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server as aio

IS_GUARDED = hasattr(cygrpc.AioServer, "_make_request_call_future")
"""Whether this grpcio decodes names in its main loop; others do in the call's own task."""


def new_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, int]]
) -> grpc.aio.Server:
    """As `grpc.aio.server`. Methods that `add_registered_method_handlers` was not told of are unknown."""
    if not IS_GUARDED:
        return grpc.aio.server(interceptors=interceptors, options=options)
    server: grpc.aio.Server = _Server(interceptors, options)  # type: ignore[assignment] # typeshed: another class
    return server


class _CoreServer(cygrpc.AioServer):  # type: ignore[misc] # has no types
    """Tells its main loop of calls of registered methods alone."""

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
        """What the main loop waits for: the next call of a method; None for those of no registered one."""
        if method is None:
            return asyncio.ensure_future(self._answer_unknown_methods())
        future: asyncio.Future[Any] = super()._make_request_call_future(method)
        return future

    async def _answer_unknown_methods(self) -> None:
        """UNIMPLEMENTED to each, until the server stops: then the next call that is asked for is an error,
        which the main loop knows."""
        loop = asyncio.get_running_loop()
        nothing = cygrpc._MethodResolver([], {})
        answering: set[asyncio.Task[None]] = set()
        while True:
            call = await self._request_call()
            answer = cygrpc._handle_rpc("", nothing, (), call, loop, False)
            task = loop.create_task(cygrpc._schedule_rpc_coro(answer, call, loop, ""))
            answering.add(task)
            task.add_done_callback(answering.discard)


class _Server(aio.Server):
    """`grpc.aio.Server` over a `_CoreServer`."""

    def __init__(
        self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, int]]
    ) -> None:
        self._loop = cygrpc.get_working_loop()
        arguments = aio._augment_channel_arguments(tuple(options), None)
        self._server = _CoreServer(self._loop, None, (), tuple(interceptors), arguments, None)
