"""HTTP/1.1 for pages that are read: few connections, small requests, whole answers, each under a timer.

h11 reads and writes the protocol; here are the sockets and the bounds. It runs on the event loop, so that
a probe that is answered says that the loop goes round.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import h11
from structlog.typing import FilteringBoundLogger

from pageturner.service.errors import ConfigError
from pageturner.service.monitoring.host_names import HostNames
from pageturner.service.monitoring.routes import HttpResponse, Router

MAX_REQUEST_BYTES = 16 << 10
"""Request line and headers together."""
MAX_CONNECTIONS = 64
"""One too many takes the place of the one that has waited longest between two requests; where all are at
work, it is closed at once. Else whoever holds connections open would keep probes out."""


@dataclass(frozen=True, slots=True)
class HttpTimes:
    """Seconds that a connection may take: for a request, or for the next one; for taking an answer in."""

    read: float = 75.0
    first_read: float = 10.0
    write: float = 10.0


_ALWAYS = (
    ("cache-control", "no-store"),
    ("x-content-type-options", "nosniff"),
    (
        "content-security-policy",
        "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    ),
)


class HttpServer:
    """Listens from `start` to `aclose`. Raises ConfigError where it cannot.

    names: by which it is asked, beside those that `HostNames` knows.
    """

    def __init__(
        self,
        router: Router,
        logger: FilteringBoundLogger,
        *,
        max_connections: int = MAX_CONNECTIONS,
        times: HttpTimes = HttpTimes(),
        names: Iterable[str] = (),
    ) -> None:
        self._router = router
        self._logger = logger
        self._max_connections = max_connections
        self._times = times
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._idle: dict[asyncio.Task[None], None] = {}  # in the order in which they began to wait
        self._is_local = False
        self._names = tuple(names)
        self._host_names = HostNames()

    @property
    def num_connections(self) -> int:
        """Open ones."""
        return len(self._connections)

    async def start(self, host: str, port: int) -> int:
        """Listen; the port in force."""
        try:
            self._server = await asyncio.start_server(self._accept, host, port, limit=MAX_REQUEST_BYTES)
        except OSError as error:
            reason = f"cannot listen on {host}:{port}: {error.strerror or error}"
            if error.errno == errno.EADDRINUSE:
                reason = f"{host}:{port} is in use: another server listens there"
            raise ConfigError("metrics.port", reason) from error
        addresses = [socket.getsockname() for socket in self._server.sockets]
        self._host_names = HostNames.of(host, self._names)
        self._is_local = all(ipaddress.ip_address(address[0]).is_loopback for address in addresses)
        bound: int = addresses[0][1]
        return bound

    async def aclose(self) -> None:
        """Stop listening and end what is open."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= self._max_connections and not self._close_idle():
            writer.transport.abort()
            return
        self._connections.add(task)
        try:
            writer.transport.set_write_buffer_limits(0)  # so that `drain` waits until the client has it
            await _Connection(reader, writer, self._times, self._answer, self._note_idle).serve()
        except (TimeoutError, OSError, asyncio.CancelledError):
            writer.transport.abort()  # a client that lags or has left, or the end of the server
        finally:
            self._connections.discard(task)
            self._idle.pop(task, None)
            writer.close()

    def _note_idle(self, is_idle: bool) -> None:
        """Of the connection that this task serves: whether it waits for its next request."""
        task = asyncio.current_task()
        assert task is not None
        if is_idle:
            self._idle[task] = None
        else:
            self._idle.pop(task, None)

    def _close_idle(self) -> bool:
        """Whether one could be closed that has been answered, and asks nothing now."""
        task = next(iter(self._idle), None)
        if task is None:
            return False
        del self._idle[task]
        self._connections.discard(task)
        task.cancel()
        return True

    async def _answer(self, request: h11.Request) -> HttpResponse:
        headers = {name.decode(): value.decode("latin-1") for name, value in request.headers}
        if not self._host_names.is_right(headers.get("host", ""), is_local=self._is_local):
            known = "" if self._is_local else "; metrics.names lists those that are"
            return HttpResponse.of_text(f"asked for by a name that is not this machine's own{known}", 421)
        try:
            method, target = request.method.decode(), request.target.decode("latin-1")
            return await self._router.answer(method, target, headers)
        except Exception as error:
            self._logger.error("monitoring_failed", exc_info=error)
            return HttpResponse.of_text("failed; the server's log has the cause", 500)


class _Connection:
    """One client, one request after the other."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        times: HttpTimes,
        answer: Callable[[h11.Request], Awaitable[HttpResponse]],
        note_idle: Callable[[bool], None],
    ) -> None:
        self._reader, self._writer = reader, writer
        self._times = times
        self._answer = answer
        self._note_idle = note_idle
        self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_REQUEST_BYTES)

    async def serve(self) -> None:
        """Until either side has had enough. Raises TimeoutError or OSError where the client lags or left."""
        seconds = self._times.first_read
        try:
            while (request := await self._next_request(seconds)) is not None:
                await self._write(request, await self._answer(request))
                if self._protocol.our_state is not h11.DONE or self._protocol.their_state is not h11.DONE:
                    return
                self._protocol.start_next_cycle()
                seconds = self._times.read
        except h11.RemoteProtocolError as error:
            if self._protocol.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                await self._write(None, HttpResponse.of_text("bad request", error.error_status_hint))

    async def _next_request(self, seconds: float) -> h11.Request | None:
        """None at the end. A body is not read: its connection is closed behind the answer."""
        async with asyncio.timeout(seconds):
            while True:
                event = self._protocol.next_event()
                if isinstance(event, h11.Request):
                    self._protocol.next_event()  # the end of the message, or what there is of a body
                    return event
                if event is not h11.NEED_DATA:
                    return None
                self._note_idle(True)
                try:
                    data = await self._reader.read(MAX_REQUEST_BYTES)
                finally:
                    self._note_idle(False)
                self._protocol.receive_data(data)

    async def _write(self, request: h11.Request | None, response: HttpResponse) -> None:
        length = ("content-length", str(len(response.body)))
        headers = [("content-type", response.content_type), length, *_ALWAYS, *response.headers.items()]
        if self._protocol.their_state is not h11.DONE:
            headers.append(("connection", "close"))
        parts = [self._protocol.send(h11.Response(status_code=response.status, headers=headers))]
        if request is None or request.method != b"HEAD":
            parts.append(self._protocol.send(h11.Data(data=response.body)))
        parts.append(self._protocol.send(h11.EndOfMessage()))
        self._writer.write(b"".join(part for part in parts if part))
        async with asyncio.timeout(self._times.write):
            await self._writer.drain()
