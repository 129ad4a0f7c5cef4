"""What crosses between the ingress and an engine's replica, beside messages of the wire as bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc
from google.rpc.status_pb2 import Status

from pageturner.service.errors import Draining, PageturnerError
from pageturner.service.identity import ANONYMOUS, Identity
from pageturner.service.rpc.status import from_status, to_status

_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class Call:
    """Of a client's call, what its servicer asks for.

    caller: as the ingress proved it. deadline_seconds: left when this was sent, None for no limit.
    trace_parent: the W3C trace context; empty where the call is not traced. request_id: of a stream.
    follower: the ingress that follows it, as `on_ray.is_gone` knows it; empty for one that is never gone.
    """

    caller: Identity = ANONYMOUS
    deadline_seconds: float | None = None
    peer: str = ""
    trace_parent: str = ""
    request_id: str = ""
    follower: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a call that the service itself decided. status: a google.rpc.Status, serialized."""

    status: bytes

    @classmethod
    def unimplemented(cls, reason: str) -> Failure:
        """Of a method that there is and that this service does not offer."""
        return cls(Status(code=grpc.StatusCode.UNIMPLEMENTED.value[0], message=reason).SerializeToString())

    @classmethod
    def too_large(cls, size: int, limit: int) -> Failure:
        """Of a request beyond server.max_request_bytes, in gRPC's own words: no error of ours has it, since
        with one server gRPC refuses it before any of ours is asked."""
        reason = f"SERVER: Received message larger than max ({size} vs. {limit})"
        code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        return cls(Status(code=code, message=reason).SerializeToString())

    @classmethod
    def of(cls, error: BaseException, request_id: str = "") -> Failure:
        """As the client of one server would be told."""
        return cls(to_status(error, request_id).SerializeToString())

    def error(self) -> PageturnerError:
        """The error that the replica raised."""
        status = Status.FromString(self.status)
        return from_status(_CODES[status.code], status.message, self.status)


class Refused(Exception):
    """The call ends so, with what no error of ours says."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Begun:
    """The first of a stream: which replica has taken it."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class Sent:
    """A prompt that a replica was sent. fingerprints: of its full blocks, as summaries tell them, packed."""

    replica_id: str
    block_size: int
    fingerprints: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class RouteHint:
    """What the choice of a replica goes by.

    digests: of the prompt's full blocks, in order, under the key that all replicas' caches share.
    session: of the caller's choosing, empty for none. avoid: replicas that have failed this request. router,
    number: who chose the replica and how many choices it made before, so that a report can say what it
    counts. news: what other ingresses sent, for the router; no replica is told of it.
    """

    num_prompt_tokens: int = 0
    digests: tuple[bytes, ...] = ()
    block_size: int = 16
    session: str = ""
    tenant: str = ""
    priority: int = 0
    avoid: frozenset[str] = field(default_factory=frozenset)
    router: str = ""
    number: int = -1
    news: tuple[Sent, ...] = field(default=(), repr=False)


class ReplicaLost(Draining):
    """The replica that had the request died, or cannot be reached. To clients a server that goes away."""
