"""The engines behind the ingress as Ray has them: handles, and Ray's errors in our words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from pageturner.service.errors import NoReplica
from pageturner.service.scale import asking
from pageturner.service.scale.agreement import Agreement
from pageturner.service.scale.calls import Begun, Call, Failure, ReplicaLost, RouteHint

COORDINATOR, ENGINE, INGRESS = "Coordinator", "Engine", "Ingress"
"""Names of the application's deployments."""


ANSWER_SECONDS = 20.0
"""How long all replicas together may take to answer what changes or reads a little."""


def own_replica_id() -> str:
    """Of the replica that this process is; the request router knows it by the same."""
    replica_id: str = serve.get_replica_context().replica_id.unique_id
    return replica_id


def own_actor_name() -> str:
    """Of this process among all of Ray's; `is_gone` knows it by the same."""
    name: str = serve.get_replica_context().replica_id.to_full_id_str()
    return name


def is_gone(actor_name: str) -> bool:
    """Whether Ray has no such process any more: one that hangs is there until Ray has ended it. Blocks."""
    try:
        ray.get_actor(actor_name, namespace=SERVE_NAMESPACE)
    except ValueError:
        return True
    return False


def engines() -> DeploymentHandle:
    """Of the application that this process belongs to; for a deployment that is built before the engines."""
    return serve.get_deployment_handle(ENGINE)


@dataclass(frozen=True, slots=True)
class RayNeighbours:
    """Implements `ingress.Neighbours`. patience_seconds: how long a request waits for a process to be
    there."""

    patience_seconds: float
    has_other_ingresses: bool

    def engines(self, handle: DeploymentHandle) -> RayReplicas:
        """To ask the engines."""
        return RayReplicas(handle, self.patience_seconds)

    def coordinator(self, handle: DeploymentHandle) -> RayCoordinator:
        """To ask the coordinator."""
        return RayCoordinator(handle, self.patience_seconds)

    @property
    def own_name(self) -> str:
        """Of this process."""
        return own_actor_name()

    @property
    def ingresses(self) -> Callable[[], RayReplicas] | None:
        """To tell all ingresses; None where there is no other."""
        return self._ingresses if self.has_other_ingresses else None

    def _ingresses(self) -> RayReplicas:
        return RayReplicas(serve.get_deployment_handle(INGRESS), self.patience_seconds)


class RayCoordinator:
    """The one coordinator. patience_seconds: how long a call waits for it, as while Ray starts it anew."""

    def __init__(self, handle: DeploymentHandle, patience_seconds: float) -> None:
        self._handle = handle
        self._patience_seconds = patience_seconds

    async def join(self) -> Agreement:
        """The agreement in force. Raises NoReplica, ReplicaLost."""
        agreement: Agreement = await self._answer(self._handle.join.remote())
        return agreement

    async def set_policies(self, request: bytes, call: Call) -> bytes | Failure:
        """As `Coordinator.set_policies`. Raises ReplicaLost where it died meanwhile: what came into force the
        replicas know."""
        answer: bytes | Failure = await self._answer(self._handle.set_policies.remote(request, call))
        return answer

    async def _answer(self, response: Any) -> Any:
        return await _answer(response, self._patience_seconds, "the coordinator")


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
        answer: tuple[str, bytes | Failure] = await _answer(
            handle.remote(method, request, call, hint=hint), limit
        )
        return answer

    async def one(self, method_name: str, *arguments: object) -> Any:
        """What a method of any replica returns."""
        response = self._handle.options(method_name=method_name).remote(*arguments)
        return await _answer(response, self._patience_seconds)

    async def ask_all(self, method: str, request: bytes, call: Call) -> list[bytes | Failure]:
        """The answers of all replicas that give one."""
        answers = await self.all("ask", method, request, call)
        return [each[1] for each in answers if isinstance(each, tuple)]

    async def all(self, method_name: str, *arguments: object, seconds: float = ANSWER_SECONDS) -> list[Any]:
        """What a method of all replicas returns; the exception in place of an answer that did not come, or
        not in so many seconds: one that hangs takes no other's answer away."""
        answers = await asking.all_of(await self._each(method_name, arguments, seconds), seconds)
        late = ReplicaLost(f"a replica did not answer {method_name} in {seconds:g} s")
        return [late if isinstance(each, TimeoutError) else each for each in answers]

    async def has_one(self, method_name: str, holds: Callable[[Any], bool], seconds: float) -> bool:
        """Whether what a method returns holds of one replica at least; those that hang are not waited for."""
        return await asking.any_of(await self._each(method_name, (), seconds), holds, seconds)

    async def _each(
        self, method_name: str, arguments: tuple[object, ...], seconds: float
    ) -> list[Coroutine[Any, Any, Any]]:
        """The calls of a method, one for each replica; none where there is none."""
        try:
            broadcast: Any = self._handle.broadcast(method_name, *arguments)
            # Ray's own `results_async` waits for all of them or has none, so one that hangs would take away
            # the answers of the others.
            results = await asyncio.wait_for(broadcast._fetch_replica_results_async(), seconds)
        except (DeploymentUnavailableError, TimeoutError):
            return []
        return [each.get_async() for each in results]


async def _answer(response: Any, limit: float | None, whose: str = "a replica") -> Any:
    async def answered() -> Any:
        return await response

    try:
        return await asyncio.wait_for(answered(), limit)
    except asyncio.CancelledError:
        response.cancel()
        raise
    except Exception as error:
        response.cancel()
        raise _meant(error, whose) from error


def _meant(error: Exception, whose: str = "a replica") -> Exception:
    """A replica's own exception stays what it is: a fault of ours."""
    if isinstance(error, TimeoutError):
        return NoReplica(f"{whose} is not there to take the request")
    if isinstance(error, DeploymentUnavailableError):
        return NoReplica(str(error))
    if isinstance(error, RayError) and not isinstance(error, RayTaskError):
        return ReplicaLost(f"{whose} that had the request is gone")
    return error
