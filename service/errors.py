"""Every way a request or the service can fail, as types.

`rpc/status.py` maps each to a gRPC status once. Nothing here knows gRPC. Errors of `kernels` and
`policies` are their own; an assertion failing is a bug of ours, never a user's.
"""

from __future__ import annotations

import re
from enum import Enum


class PageturnerError(Exception):
    """Base of all errors that a user or an operator may meet; str() is fit to be shown to them.

    counted_as: its label where requests are counted by how they ended, the class's name unless it says else.
    """

    counted_as: str = "error"

    def __init_subclass__(cls) -> None:
        if "counted_as" not in vars(cls):
            cls.counted_as = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def __reduce__(self) -> tuple[object, ...]:
        """Copied and unpickled from its text and attributes: the constructor's arguments are others."""
        return type(self).__new__, (type(self), *self.args), self.__dict__


class InvalidArgument(PageturnerError):
    """A request that can never be served as it stands; `field` names the culprit as on the wire."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class ModelNotFound(PageturnerError):
    """The request names a model that this server does not serve."""

    def __init__(self, model: str, served: str) -> None:
        super().__init__(f"model {model!r} is not served here; this server has {served!r}")
        self.model = model


class AdapterNotFound(PageturnerError):
    """The request names an adapter that is not loaded here, or that its caller may not use."""

    def __init__(self, adapter: str) -> None:
        super().__init__(f"adapter {adapter!r} is not loaded here")
        self.adapter = adapter


class AdapterError(PageturnerError):
    """An adapter cannot be loaded; says which setting or tensor is wrong, or is not served here."""


class DuplicateRequest(PageturnerError):
    """A live request already has this id."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request id {request_id!r} is in use")
        self.request_id = request_id


class QueueFull(PageturnerError):
    """The bound on waiting requests or on queued prompt tokens is reached; try again later."""

    def __init__(self, reason: str, retry_after_seconds: float, counted_as: str = "") -> None:
        super().__init__(reason)
        self.retry_after_seconds = retry_after_seconds
        if counted_as:
            self.counted_as = counted_as


class DeadlineTooClose(QueueFull):
    """Before the request so much work waits that it would likely end after its deadline: it was not begun."""


class AdaptersFull(QueueFull):
    """The request's adapter is not in memory, and those that are there all have live requests."""


class TenantLimitReached(QueueFull):
    """A bound of the caller's own tenant is reached, whatever others do; `limit` names it."""

    def __init__(self, limit: str, reason: str, retry_after_seconds: float) -> None:
        super().__init__(reason, retry_after_seconds, f"tenant_{limit}")
        self.limit = limit


class NotResumable(PageturnerError):
    """This server would not go on with the very tokens that would have come; says what differs.

    differing: names of the fingerprint's parts that differ, with commas between them; empty if none is known.
    """

    def __init__(self, reason: str, differing: str) -> None:
        super().__init__(reason)
        self.differing = differing


class HandoverRefused(PageturnerError):
    """KV of this server would mean nothing on the one that asks for it; says what differs.

    differing: names of the parts that differ, with commas between them; empty where nothing is handed over.
    """

    def __init__(self, reason: str, differing: str) -> None:
        super().__init__(reason)
        self.differing = differing


class MixedServers(PageturnerError):
    """A server among several would give other tokens than the others do; says what differs. Of a client."""


class Loading(PageturnerError):
    """The server is up, its model is not: it takes no work yet; try again, or wait for its health."""


class Draining(PageturnerError):
    """The server is shutting down: it takes no new work, and ends what outlasts its grace."""


class NoReplica(PageturnerError):
    """No server may take the request: none is known, or all of them drain."""


class EngineDead(PageturnerError):
    """The engine met a fault it cannot recover from; every stream ends with this."""


class RankLost(EngineDead):
    """A rank that holds a part of the model is gone, or does not answer: nothing can be computed any more."""


class RequestAborted(PageturnerError):
    """The request was aborted by its id, or its client left."""


class DeadlineExceeded(PageturnerError):
    """The request's deadline passed before it was done."""


class DeadlineUnreachable(DeadlineExceeded):
    """The request waited until its deadline could no longer be met; it was ended before it took memory."""


class SlowConsumer(PageturnerError):
    """The client did not read its stream for longer than slow_consumer_timeout."""


class NonFiniteLogits(PageturnerError):
    """The model produced NaN or infinite logits for this request."""


class StepFailed(PageturnerError):
    """The model's forward failed for this request, alone, again and again."""


class TextFailed(PageturnerError):
    """The request's tokens could not be turned into text: the tokenizer raised; says what."""


class RefusalCause(Enum):
    """Why a caller was refused: for the log and the counters. The caller is not told which part was wrong."""

    MISSING = "missing"
    MALFORMED = "malformed"
    UNKNOWN_TOKEN = "unknown_token"  # noqa: S105 # the name of a cause
    WRONG_SECRET = "wrong_secret"  # noqa: S105 # the name of a cause
    EXPIRED = "expired"
    UNKNOWN_CERTIFICATE = "unknown_certificate"
    TWO_TENANTS = "two_tenants"
    OTHER_TENANT = "other_tenant"
    NOT_ADMIN = "not_admin"


class Unauthenticated(PageturnerError):
    """The call brought no credentials that are known here.

    cause: None at a client, which is not told. credential: which one it claimed to be, where that is known.
    """

    cause: RefusalCause | None = None
    credential: str = ""

    def __init__(self, cause: RefusalCause, credential: str = "") -> None:
        super().__init__("no valid credentials: this server wants a bearer token, or a client's certificate")
        self.cause = cause
        self.credential = credential


class PermissionDenied(PageturnerError):
    """The caller is known, and may not do this. cause: None at a client."""

    cause: RefusalCause | None = None

    def __init__(self, reason: str, cause: RefusalCause) -> None:
        super().__init__(reason)
        self.cause = cause


class ConfigError(PageturnerError):
    """The configuration is wrong; `key` is the dotted key (e.g. `cache.block_size`)."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key = key
        self.reason = reason


class StaleRevision(PageturnerError):
    """Policies were to be changed from a state that is no longer the one in force: read it again."""

    def __init__(self, expected: int, revision: int) -> None:
        super().__init__(
            f"the policies are at revision {revision}, not {expected}: another caller changed them"
        )


class NotRecorded(PageturnerError):
    """The flight recorder is off on this server."""


class ModelError(PageturnerError):
    """The model cannot be loaded, or was found at start-up not to run correctly; says why."""
