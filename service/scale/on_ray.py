"""The engines behind the ingress as Ray has them: handles, and Ray's errors in our words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from pageturner.service.errors import NoReplica
from pageturner.service.scale.calls import Begun, Call, Failure, ReplicaLost, RouteHint

COORDINATOR, ENGINE, INGRESS = "Coordinator", "Engine", "Ingress"
"""Names of the application's deployments."""


ANSWER_SECONDS = 20.0
"""How long all replicas together may take to answer what changes or reads a little."""


def own_replica_id() -> str:
    """Of the replica that this process is; the request router knows it by the same."""
    replica_id: str = serve.get_replica_context().replica_id.unique_id
    return replica_id


def engines() -> DeploymentHandle:
    """Of the application that this process belongs to; for a deployment that is built before the engines."""
    return serve.get_deployment_handle(ENGINE)


class RayReplicas:
    """Implements `answers.Replicas`. patience_seconds: how long a request waits for a replica to be there."""

    def __init__(self, handle: DeploymentHandle, patience_seconds: float) -> None:
        self._handle = handle
        self._patience_seconds = patience_seconds

    async def follow(
        self, method: str, request: bytes, call: Call, hint: RouteHint
    ) -> AsyncGenerator[Begun | bytes | Failure, None]:
        """The messages of a stream of the replica that the request router chooses."""
        handle = self._handle.options(stream=True, method_name="follow")
        parts: Any = handle.remote(method, request, call, hint=hint)
        try:
            # Begun comes at once from a replica that is there.
            yield await asyncio.wait_for(anext(parts), self._patience_seconds)
            async for part in parts:
                yield part
        except StopAsyncIteration:
            return  # its ingress finds that the answer has no end
        except Exception as error:
            raise _meant(error) from error
        finally:
            parts.cancel()  # of one that has ended it does nothing

    async def ask(
        self, method: str, request: bytes, call: Call, hint: RouteHint
    ) -> tuple[str, bytes | Failure]:
        """The answer of the replica that the request router chooses."""
        handle = self._handle.options(method_name="ask")
        # A score takes what it takes; all else is a look, and waits for nothing but a replica.
        limit = None if method == "Score" else self._patience_seconds
        answer: tuple[str, bytes | Failure] = await self._answer(
            handle.remote(method, request, call, hint=hint), limit
        )
        return answer

    async def one(self, method_name: str, *arguments: object) -> Any:
        """What a method of any replica returns."""
        response = self._handle.options(method_name=method_name).remote(*arguments)
        return await self._answer(response, self._patience_seconds)

    async def ask_all(self, method: str, request: bytes, call: Call) -> list[bytes | Failure]:
        """The answers of all replicas that give one."""
        answers = await self.all("ask", method, request, call)
        return [each[1] for each in answers if isinstance(each, tuple)]

    async def all(self, method_name: str, *arguments: object) -> list[Any]:
        """What a method of all replicas returns; the exception in place of an answer that did not come.

        Raises ReplicaLost where they are not heard of in time.
        """
        try:
            broadcast: Any = self._handle.broadcast(method_name, *arguments)
            return list(await broadcast.results_async(timeout_s=ANSWER_SECONDS, return_exceptions=True))
        except DeploymentUnavailableError:
            return []
        except TimeoutError as error:
            raise ReplicaLost(f"not all replicas answered {method_name} in time") from error

    async def _answer(self, response: Any, limit: float | None) -> Any:
        async def answered() -> Any:
            return await response

        try:
            return await asyncio.wait_for(answered(), limit)
        except asyncio.CancelledError:
            response.cancel()
            raise
        except Exception as error:
            response.cancel()
            raise _meant(error) from error


def _meant(error: Exception) -> Exception:
    """A replica's own exception stays what it is: a fault of ours."""
    if isinstance(error, TimeoutError):
        return NoReplica("no replica is there to take the request")
    if isinstance(error, DeploymentUnavailableError):
        return NoReplica(str(error))
    if isinstance(error, RayError) and not isinstance(error, RayTaskError):
        return ReplicaLost("the replica that had the request is gone")
    return error
