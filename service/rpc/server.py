"""The gRPC server: what it serves, on which port, and how it ends."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import structlog
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pageturner.service.auth.proof import Authenticator
from pageturner.service.core.clock import Clock
from pageturner.service.engine.api import Condition, DrainOutcome, EngineClient
from pageturner.service.engine.metrics import Metrics
from pageturner.service.errors import ConfigError, Loading
from pageturner.service.rpc.admin import AdminServicer
from pageturner.service.rpc.callers import Gatekeeper
from pageturner.service.rpc.channelz import enable_channelz
from pageturner.service.rpc.generation import GenerationServicer
from pageturner.service.rpc.grpc_server import new_server
from pageturner.service.rpc.health import HealthServicer
from pageturner.service.rpc.interceptors import CallInterceptor
from pageturner.service.rpc.lifecycle import LOADING_TEXT, Lifecycle
from pageturner.service.rpc.listening import Listener, Transport, listen
from pageturner.service.rpc.load_report import load_report
from pageturner.service.rpc.models import ModelServicer
from pageturner.service.rpc.options import ListenAddress, ServerOptions
from pageturner.service.rpc.reflection import enable_reflection
from pageturner.service.rpc.tracing import CallTracer
from pageturner.service.rpc.transfer import TransferServicer
from pageturner.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
)

if TYPE_CHECKING:
    from pageturner.service.rpc.certificates import Certificates  # cryptography comes with it

OWN_SERVICES = frozenset(
    service.full_name
    for file in (generation_pb2, model_pb2, admin_pb2, transfer_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
)

LEAVING_SECONDS = 0.2
"""How long a drain still takes work after it told clients to leave: a round trip, and some."""


def _random_request_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class _Listening:
    server: grpc.aio.Server
    address: ListenAddress
    listener: Listener
    has_public: bool


class Server:
    """Listens from `start` on; serves one engine from `attach` on, and refuses with Loading before.

    Health answers from the start: NOT_SERVING while the model loads. The engine is the caller's: it is
    drained here, neither started nor closed. authenticator: None where every caller is served. certificates:
    None for plain text. tracer: None where no spans are made. write_timeout_seconds: a stream is given up
    when its client's window has had no room for one more message for so long.
    """

    def __init__(
        self,
        options: ServerOptions,
        logger: structlog.typing.FilteringBoundLogger,
        clock: Clock,
        metrics: Metrics,
        *,
        write_timeout_seconds: float,
        authenticator: Authenticator | None = None,
        certificates: Certificates | None = None,
        tracer: CallTracer | None = None,
        new_request_id: Callable[[], str] = _random_request_id,
    ) -> None:
        self._options = options
        self._logger = logger
        self._clock = clock
        self._metrics = metrics
        self._write_timeout_seconds = write_timeout_seconds
        self._authenticator = authenticator
        self._certificates = certificates
        self._tracer = tracer
        self._new_request_id = new_request_id
        # Streams that stand open by themselves end with their port: one for each.
        self._lifecycle, self._admin_lifecycle = Lifecycle(), Lifecycle()
        self._background: set[asyncio.Future[None]] = set()
        self._listening: list[_Listening] = []

    async def start(self) -> int:
        """Listen; the port in force, or 0 for a socket file. Raises ConfigError if an address is taken."""
        assert not self._listening, "a server starts once"
        public, admin = self._options.public_address, self._options.admin_address
        try:
            listener = self._open(public, has_public=True, has_admin=admin is None)
            if admin is not None:
                self._open(admin, has_public=False, has_admin=True)
        except ConfigError:
            await self._close(self._listening, 0.0)
            raise
        for each in self._listening:
            await each.server.start()
            self._logger.info("listening", address=each.address.text, port=each.listener.port)
        self._warn_of_strangers()
        return listener.port

    @property
    def admin_port(self) -> int:
        """The port in force of the admin listener; 0 where it is a socket file, or there is none."""
        admin = self._options.admin_address
        return next((each.listener.port for each in self._listening if each.address == admin), 0)

    def attach(self, engine: EngineClient) -> None:
        """Serve this engine from now on."""
        self._lifecycle.attach(engine)
        self._admin_lifecycle.attach(engine)

    @property
    def engine(self) -> EngineClient | None:
        """What is served; None while it loads."""
        return None if self._lifecycle.is_loading else self._lifecycle.engine

    @property
    def condition(self) -> Condition:
        """Whether new work is taken, and why not."""
        return self._lifecycle.condition

    async def drain(self, grace_seconds: float | None = None) -> DrainOutcome:
        """End the work in order: refuse what is new and tell clients to leave, let what runs finish for
        grace_seconds (drain_seconds by default), end the rest (UNAVAILABLE), then close the public port.

        An admin port of its own stays open until `stop`, so that the end can be watched. Safe to call again,
        also meanwhile: the grace that ends first counts."""
        outcome = await self._end_requests(grace_seconds)
        await self._close(self._public(), self._options.abort_seconds)
        return outcome

    def begin_drain(self, grace_seconds: float | None) -> asyncio.Future[DrainOutcome]:
        """As `drain`, for a call on the very port that is to be closed: done once all requests have ended.
        The rest goes on by itself. Raises Loading while there is nothing to drain."""
        if self._lifecycle.is_loading:
            raise Loading(LOADING_TEXT)
        ending = asyncio.ensure_future(self._end_requests(grace_seconds))
        ending.add_done_callback(lambda _: self._close_later())
        return ending

    async def stop(self) -> None:
        """As `drain` without any grace, and closes the admin port too. May overtake a drain in progress."""
        await self._end_requests(0.0)
        self._admin_lifecycle.stopping.set()
        await self._close(self._listening, self._options.abort_seconds)

    async def _end_requests(self, grace_seconds: float | None) -> DrainOutcome:
        grace = self._options.drain_seconds if grace_seconds is None else grace_seconds
        outcome = DrainOutcome()
        if not self._lifecycle.is_loading:
            num_live = self._lifecycle.condition.num_live
            self._lifecycle.leave()
            self._admin_lifecycle.leave()
            self._send_away(grace + self._options.abort_seconds)
            # What is on its way is still taken, so that no call is lost to a client that knows other servers.
            leaving = min(LEAVING_SECONDS, grace)
            await asyncio.sleep(leaving)
            ended = await self._lifecycle.engine.drain(grace - leaving)
            num_finished = max(ended.num_finished, num_live - ended.num_aborted)
            outcome = DrainOutcome(num_finished, ended.num_aborted)
        # Every request has ended, or was told to. What stands open by itself, as a watch of health, ends now.
        self._lifecycle.stopping.set()
        return outcome

    def _send_away(self, lasting: float) -> None:
        """Have gRPC take no connection and no call from now on, and tell clients so (GOAWAY): those that know
        other servers go there with their next call. What runs goes on, for so many seconds.

        A call that gRPC has and that no handler was given yet ends with CANCELLED; those are few, as
        long as the event loop keeps up.
        """
        for each in self._public():
            stopping = asyncio.ensure_future(each.server.stop(lasting))
            self._background.add(stopping)
            stopping.add_done_callback(self._background.discard)

    def _close_later(self) -> None:
        closing = asyncio.ensure_future(self._close(self._public(), self._options.abort_seconds))
        self._background.add(closing)
        closing.add_done_callback(self._background.discard)

    def _public(self) -> list[_Listening]:
        return [each for each in self._listening if each.has_public]

    async def _close(self, some: Sequence[_Listening], grace_seconds: float) -> None:
        await asyncio.gather(*(each.server.stop(grace_seconds) for each in some))
        for each in some:
            each.listener.remove_socket_file()

    async def wait_for_termination(self) -> None:
        """Wait until the server has stopped."""
        assert self._listening, "the server was started"
        await asyncio.gather(*(each.server.wait_for_termination() for each in self._listening))

    def _open(self, address: ListenAddress, *, has_public: bool, has_admin: bool) -> Listener:
        """A server of gRPC's own with these services, bound and not started. A socket file that serves admins
        alone is for the server's own user, who needs no token there."""
        is_private = not has_public and address.socket_path is not None
        gatekeeper = Gatekeeper(
            self._authenticator, trusts_socket=is_private, has_certificates=self._knows_clients
        )
        server = new_server(
            interceptors=[
                CallInterceptor(
                    self._logger,
                    self._clock,
                    self._metrics,
                    gatekeeper,
                    write_timeout_seconds=self._write_timeout_seconds,
                    tracer=self._tracer,
                    load_report=self._load_report if self._options.load_reports else None,
                )
            ],
            options=self._options.channel_arguments(),
        )
        names = self._register(server, has_public=has_public, has_admin=has_admin)
        if has_admin and self._options.enable_channelz:
            names.append(enable_channelz(server))
        if has_admin and self._options.enable_reflection:
            enable_reflection(sorted(names), server)
        certificates = self._certificates
        new_credentials = None if certificates is None else certificates.server_credentials
        listener = listen(server, address, Transport(new_credentials, is_private))
        self._listening.append(_Listening(server, address, listener, has_public))
        return listener

    def _load_report(self) -> bytes:
        """For the trailers of a call; nothing while no engine is there."""
        return b"" if self._lifecycle.is_loading else load_report(self._lifecycle.engine)

    def _warn_of_strangers(self) -> None:
        """Say what any program may do that reaches the port: from another machine there are many."""
        far = [each.address.text for each in self._listening if not each.address.is_local]
        if not far:
            return
        if self._authenticator is None and not self._knows_clients:
            reason = "other machines reach this address, and auth.identities is not set: all are served"
            self._logger.warning("no_authentication", addresses=far, reason=reason)
        elif self._certificates is None:
            reason = "other machines reach this address, and tls.certificate is not set: tokens are in clear"
            self._logger.warning("no_encryption", addresses=far, reason=reason)

    @property
    def _knows_clients(self) -> bool:
        """Whether a client needs a certificate of an authority that the operator has chosen."""
        return self._certificates is not None and self._certificates.wants_client_certificate

    def _register(self, server: grpc.aio.Server, *, has_public: bool, has_admin: bool) -> list[str]:
        """The full names of the services that were registered. Health is everywhere."""
        names = [health_pb2.DESCRIPTOR.services_by_name["Health"].full_name]
        lifecycle = self._lifecycle if has_public else self._admin_lifecycle
        if has_public:
            generation = GenerationServicer(
                self._options, self._lifecycle, self._logger, self._new_request_id
            )
            generation_pb2_grpc.add_GenerationServiceServicer_to_server(generation, server)
            model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(self._lifecycle), server)
            transfer = TransferServicer(self._lifecycle)
            transfer_pb2_grpc.add_TransferServiceServicer_to_server(transfer, server)
            names += [_name_in(file.DESCRIPTOR) for file in (generation_pb2, model_pb2, transfer_pb2)]
        if has_admin and self._options.enable_admin:
            admin = AdminServicer(self._options, lifecycle, self.begin_drain)
            admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
            names.append(_name_in(admin_pb2.DESCRIPTOR))
        health_pb2_grpc.add_HealthServicer_to_server(  # type: ignore[no-untyped-call] # has no types
            HealthServicer(lifecycle, OWN_SERVICES), server
        )
        return names


def _name_in(file: FileDescriptor) -> str:
    """The full name of the one service that a file has."""
    (service,) = file.services_by_name.values()
    name: str = service.full_name
    return name
