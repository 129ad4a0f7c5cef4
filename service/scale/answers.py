"""An answer that outlives its replica: asked for at one replica after another, until all of it has come.

What an answer is and how it goes on is the client's `PartialAnswer`; which replica is asked is the router's
to say. Here is how often, and when to give up. Knows nothing of Ray.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Protocol

from pageturner.service.client.failures import is_temporary, retry_after
from pageturner.service.client.partial_answer import PartialAnswer
from pageturner.service.core.clock import Clock
from pageturner.service.core.outputs import FinishedEvent
from pageturner.service.engine.api import StreamEvent
from pageturner.service.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    NoReplica,
    NotResumable,
    PageturnerError,
    QueueFull,
    TenantLimitReached,
)
from pageturner.service.scale.calls import Begun, Call, Failure, ReplicaLost, RouteHint
from pageturner.v1 import generation_pb2 as pb

MAX_LOSSES = 8
"""In a row, without a word of the answer between them: what kills so many replicas is the request itself."""

MAX_ROUNDS = 60
SHORTEST_WAIT, LONGEST_WAIT = 0.05, 2.0
"""How often, and between which seconds, full replicas are asked for the rest of an answer that has begun."""


class Replicas(Protocol):
    """The engines behind the ingress. Methods raise ReplicaLost for one that died or can't be reached."""

    def follow(
        self, method: str, request: bytes, call: Call, hint: RouteHint
    ) -> AsyncGenerator[Begun | bytes | Failure, None]:
        """The messages of a stream of one replica, Begun first, a Failure last where it failed. Closing it
        ends the request there. Raises NoReplica too."""
        ...

    async def ask(
        self, method: str, request: bytes, call: Call, hint: RouteHint
    ) -> tuple[str, bytes | Failure]:
        """(id of the replica that was chosen, its answer). Raises NoReplica too."""
        ...

    async def ask_all(self, method: str, request: bytes, call: Call) -> list[bytes | Failure]:
        """The answers of all replicas that gave one."""
        ...


class Answers:
    """replicas: that are asked. sleep: waits before a replica is asked again. on_taken: told of each replica
    that has taken a request, and of the hint that chose it."""

    def __init__(
        self,
        replicas: Replicas,
        clock: Clock,
        sleep: Callable[[float], Awaitable[object]],
        on_taken: Callable[[str, RouteHint], object] | None = None,
    ) -> None:
        self._replicas = replicas
        self._clock = clock
        self._sleep = sleep
        self._on_taken = on_taken

    async def stream(
        self, request: pb.GenerateStreamRequest, call: Call, hint: RouteHint
    ) -> AsyncGenerator[StreamEvent, None]:
        """The events of one answer, of however many replicas. The request has an id.

        Raises the PageturnerError that ended it: a refusal once every replica has refused, the loss of a
        replica where the rest of the answer can't be asked for.
        """
        answer, tries, ends_at = PartialAnswer(request), _Tries(hint), _end(self._clock, call)
        while True:
            part = _Part(partial(self._taken, tries.hint))
            left = _left(self._clock, ends_at)
            parts = self._replicas.follow(
                "GenerateStream",
                answer.next_request().SerializeToString(),
                replace(call, deadline_seconds=left, request_id=answer.request_id),
                tries.hint,
            )
            async with aclosing(_events(parts, answer, part)) as events:
                try:
                    async for event in events:
                        tries.succeed()
                        yield event
                    failure: PageturnerError = ReplicaLost("the stream ended before the answer did")
                except PageturnerError as error:
                    failure = error
            if part.is_finished:
                return  # whatever became of the replica behind the last word
            if isinstance(failure, DuplicateRequest) and tries.has_failed:
                # A replica that lost its ingress, or was given up, still has it: nobody reads that stream.
                abort = pb.AbortRequest(request_ids=[answer.request_id])
                await self._replicas.ask_all("Abort", abort.SerializeToString(), call)
            wait = tries.after(
                failure, part.replica_id, can_go_on=answer.can_be_resumed, has_begun=answer.has_begun
            )
            await self._sleep(wait)

    async def ask(self, method: str, request: bytes, call: Call, hint: RouteHint) -> bytes:
        """The answer to a call that may be repeated. Raises as `stream` does."""
        tries, ends_at = _Tries(hint), _end(self._clock, call)
        while True:
            left = _left(self._clock, ends_at)
            replica_id = ""
            try:
                replica_id, found = await self._replicas.ask(
                    method, request, replace(call, deadline_seconds=left), tries.hint
                )
                if isinstance(found, Failure):
                    raise found.error()
            except PageturnerError as error:
                await self._sleep(tries.after(error, replica_id, can_go_on=True))
            else:
                self._taken(tries.hint, replica_id)
                return found

    def _taken(self, hint: RouteHint, replica_id: str) -> None:
        if self._on_taken is not None:
            self._on_taken(replica_id, hint)


class _Part:
    """What one replica's stream has come to. on_begun: told of the replica that has it."""

    replica_id = ""
    is_finished = False

    def __init__(self, on_begun: Callable[[str], object]) -> None:
        self._on_begun = on_begun

    def begun(self, replica_id: str) -> None:
        """A replica has the request."""
        self.replica_id = replica_id
        self._on_begun(replica_id)


async def _events(
    parts: AsyncGenerator[Begun | bytes | Failure, None], answer: PartialAnswer, part: _Part
) -> AsyncGenerator[StreamEvent, None]:
    """What the parts say that is new. Raises what a Failure means."""
    async with aclosing(parts) as open_parts:
        async for each in open_parts:
            if isinstance(each, Begun):
                part.begun(each.replica_id)
            elif isinstance(each, Failure):
                raise each.error()
            else:
                event = answer.take(pb.GenerateStreamResponse.FromString(each))
                part.is_finished = part.is_finished or isinstance(event, FinishedEvent)
                if event is not None:
                    yield event


class _Tries:
    """Those of one request.

    hint: for the next one, which avoids the replicas that have failed it. has_failed: any did.
    """

    def __init__(self, hint: RouteHint) -> None:
        self.hint = hint
        self.has_failed = False
        self._num_lost = 0
        self._num_rounds = 0
        self._refusals: dict[str, PageturnerError] = {}

    def succeed(self) -> None:
        """A part of the answer has come: what was lost before it counts no more."""
        self._num_lost = self._num_rounds = 0

    def after(
        self, error: PageturnerError, replica_id: str, *, can_go_on: bool, has_begun: bool = False
    ) -> float:
        """How long to wait before the next try. Raises the error that ends the request.

        has_begun: a part of the answer is told; it is not given up because all are full for a moment.
        """
        is_first, self.has_failed = not self.has_failed, True
        if not can_go_on:
            raise error
        if isinstance(error, ReplicaLost):
            self._num_lost += 1
            if self._num_lost >= MAX_LOSSES:
                raise error
            self._avoid(replica_id)
            return 0.0
        if isinstance(error, DuplicateRequest) and not is_first:
            self._num_lost += 1
            if self._num_lost >= MAX_LOSSES:
                raise error
            return 0.1
        is_elsewhere = isinstance(error, NotResumable) or is_temporary(error)
        # A tenant's own bound is kept at each replica; going round them would get it another share of each.
        if not is_elsewhere or isinstance(error, TenantLimitReached | NoReplica) or not replica_id:
            raise error
        if replica_id in self._refusals:  # the router had no other to offer: all have refused
            kindest = self._kindest()
            self._num_rounds += 1
            if not has_begun or not isinstance(kindest, QueueFull) or self._num_rounds > MAX_ROUNDS:
                raise kindest
            self._refusals.clear()
            self.hint = replace(self.hint, avoid=frozenset())
            return min(max(_wait(kindest), SHORTEST_WAIT), LONGEST_WAIT)
        self._refusals[replica_id] = error
        self._avoid(replica_id)
        return 0.0

    def _avoid(self, replica_id: str) -> None:
        if replica_id:
            self.hint = replace(self.hint, avoid=self.hint.avoid | {replica_id})

    def _kindest(self) -> PageturnerError:
        """Of all refusals the one that lets the client come back soonest."""
        return min(
            self._refusals.values(), key=lambda error: (not isinstance(error, QueueFull), _wait(error))
        )


def _wait(error: PageturnerError) -> float:
    return retry_after(error) or 0.0


def _end(clock: Clock, call: Call) -> float | None:
    return None if call.deadline_seconds is None else clock.now() + call.deadline_seconds


def _left(clock: Clock, ends_at: float | None) -> float | None:
    """Raises DeadlineExceeded once nothing is."""
    if ends_at is None:
        return None
    left = ends_at - clock.now()
    if left <= 0:
        raise DeadlineExceeded("the deadline passed before a replica could take the request")
    return left
