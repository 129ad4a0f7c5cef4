"""How a call comes in and how it ends, whatever it asks for. Knows nothing of Ray.

Nothing is told to whoever is not proved, and nothing is raised: what ends a call goes along with a message
(`statuses`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog
from google.protobuf.message import Message

from pageturner.service.auth.identities_in_force import IdentitiesInForce
from pageturner.service.auth.proof import Authenticator
from pageturner.service.config import ServiceConfig
from pageturner.service.core.clock import Clock
from pageturner.service.errors import PageturnerError
from pageturner.service.rpc.callers import Gatekeeper
from pageturner.service.rpc.tracing import trace_parent_of
from pageturner.service.scale.call_metadata import deadline_of
from pageturner.service.scale.calls import Call, Failure, Refused
from pageturner.service.scale.statuses import RpcContext, end_with

LOOK_SECONDS = 1.0
"""A token that is revoked begins nothing so long after, and one that is new is known."""

_M = TypeVar("_M", bound=Message)


class Entrance:
    """follower: the name of this process among Ray's, for replicas."""

    def __init__(
        self,
        config: ServiceConfig,
        follower: str,
        logger: structlog.typing.FilteringBoundLogger,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._looked_at = clock.now()
        self._logger = logger
        self._follower = follower
        self._max_request_bytes = config.server.max_request_bytes
        path = config.auth.identities
        self._identities = None if path is None else IdentitiesInForce(path, logger)
        authenticator = (
            None if self._identities is None else Authenticator(self._identities.current, time.time)
        )
        self._gatekeeper = Gatekeeper(authenticator)

    async def admit(self, service: str, request: Message, context: RpcContext) -> Call:
        """Who calls, and how long there is. Raises Unauthenticated, PermissionDenied, Refused."""
        if self._identities is not None and self._clock.now() - self._looked_at >= LOOK_SECONDS:
            self._looked_at = self._clock.now()
            await self._identities.poll()
        metadata = tuple(context.invocation_metadata())
        caller = self._gatekeeper.admit_early(service, metadata)
        assert caller is not None, "only certificates would have to be looked at later"
        if request.ByteSize() > self._max_request_bytes:
            raise Refused(Failure.too_large(request.ByteSize(), self._max_request_bytes))
        return Call(
            caller,
            deadline_of(metadata),
            context.peer(),
            trace_parent_of(metadata),
            follower=self._follower,
        )

    async def unary(
        self,
        method: str,
        service: str,
        request: Message,
        context: RpcContext,
        response: type[_M],
        answer: Callable[[Call], Coroutine[Any, Any, _M]],
    ) -> _M:
        """As `ended_well`, of a call that has to be admitted first."""

        async def admitted() -> _M:
            return await answer(await self.admit(service, request, context))

        return await self.ended_well(
            method, context, response, admitted(), getattr(request, "request_id", "")
        )

    async def ended_well(
        self,
        method: str,
        context: RpcContext,
        response: type[_M],
        answer: Coroutine[Any, Any, _M],
        request_id: str = "",
    ) -> _M:
        """What `answer` returns; an empty message beside the status where it raises."""
        try:
            return await answer
        except Exception as error:
            end_with(context, self.failure(error, method, request_id))
            return response()

    def failure(self, error: Exception, method: str, request_id: str) -> Failure:
        """What the client is told. A fault of ours is logged."""
        if isinstance(error, Refused):
            return error.failure
        if not isinstance(error, PageturnerError):
            self._logger.error("rpc_error", method=method, request_id=request_id, exc_info=error)
        return Failure.of(error, request_id)
