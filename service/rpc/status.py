"""Domain errors to gRPC statuses and back, each once.

A status carries google.rpc details: an ErrorInfo whose reason is the error's class, the bad field,
when to try again, and which request it was.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RequestInfo, RetryInfo
from google.rpc.status_pb2 import Status

from pageturner.service import errors
from pageturner.service.errors import PageturnerError

DOMAIN = "pageturner"
MAX_TEXT = 512
"""UTF-8 bytes of each text that is sent, since errors quote input and clients refuse trailers over 8 KiB.

A byte that is not ASCII takes three in `grpc-message`, and a text may stand there and thrice in the details.
"""

INTERNAL_TEXT = "the server met a fault of its own; its log has the cause under this request's id"


class UnknownService(PageturnerError):
    """A health check names a service that this server does not have."""


CODES: Mapping[type[PageturnerError], grpc.StatusCode] = MappingProxyType(
    {
        errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
        errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
        errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
        errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
        errors.AdapterNotFound: grpc.StatusCode.NOT_FOUND,
        errors.AdapterError: grpc.StatusCode.FAILED_PRECONDITION,
        errors.DuplicateRequest: grpc.StatusCode.ALREADY_EXISTS,
        errors.TenantLimitReached: grpc.StatusCode.RESOURCE_EXHAUSTED,  # before the kind that it is one of
        errors.DeadlineTooClose: grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.AdaptersFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.NotResumable: grpc.StatusCode.FAILED_PRECONDITION,
        errors.HandoverRefused: grpc.StatusCode.FAILED_PRECONDITION,
        errors.MixedServers: grpc.StatusCode.FAILED_PRECONDITION,
        errors.Loading: grpc.StatusCode.UNAVAILABLE,
        errors.Draining: grpc.StatusCode.UNAVAILABLE,
        errors.RankLost: grpc.StatusCode.UNAVAILABLE,  # before the kind that it is one of
        errors.NoReplica: grpc.StatusCode.UNAVAILABLE,
        errors.EngineDead: grpc.StatusCode.UNAVAILABLE,
        errors.RequestAborted: grpc.StatusCode.ABORTED,
        errors.DeadlineUnreachable: grpc.StatusCode.DEADLINE_EXCEEDED,
        errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
        errors.SlowConsumer: grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.NonFiniteLogits: grpc.StatusCode.INTERNAL,
        errors.StepFailed: grpc.StatusCode.INTERNAL,
        errors.TextFailed: grpc.StatusCode.INTERNAL,
        errors.StaleRevision: grpc.StatusCode.ABORTED,
        errors.NotRecorded: grpc.StatusCode.UNIMPLEMENTED,
        errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
        errors.ModelError: grpc.StatusCode.FAILED_PRECONDITION,
        UnknownService: grpc.StatusCode.NOT_FOUND,
    }
)

_PUBLIC_TEXT: Mapping[type[PageturnerError], str] = MappingProxyType(
    {
        errors.EngineDead: "the engine stopped after a fault; the server's log has the cause",
        errors.RankLost: "a part of the model was lost; the server's log has the cause",
        errors.StepFailed: "the model failed to compute this request; the server's log has the cause",
        errors.TextFailed: "this request's text could not be decoded; the server's log has the cause",
    }
)
"""Errors born of an arbitrary exception, whose own text is for the log only."""


_ATTRIBUTES: Mapping[type[PageturnerError], tuple[str, ...]] = MappingProxyType(
    {
        errors.InvalidArgument: ("field", "reason"),
        errors.ModelNotFound: ("model",),
        errors.AdapterNotFound: ("adapter",),
        errors.DuplicateRequest: ("request_id",),
        errors.NotResumable: ("differing",),
        errors.HandoverRefused: ("differing",),
        errors.ConfigError: ("key", "reason"),
        errors.TenantLimitReached: ("limit",),
    }
)
"""What an error carries beside its text, as strings in ErrorInfo's metadata."""


class UnknownStatus(PageturnerError):
    """A status that no error of ours explains: the network, a limit of gRPC's, or another server."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(f"{code}: {details}" if details else code)
        self.code = code
        self.details = details


def code_of(error: BaseException) -> grpc.StatusCode:
    """The gRPC status code of an error."""
    for kind, code in CODES.items():
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


def reason_of(kind: type[PageturnerError]) -> str:
    """`QueueFull` -> `QUEUE_FULL`, as google.rpc.ErrorInfo wants its reasons."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).upper()


def to_status(error: BaseException, request_id: str = "") -> Status:
    """The status that a client sees. The text of an error that is not ours stays here."""
    kind = next((kind for kind in CODES if isinstance(error, kind)), None)
    text = INTERNAL_TEXT if kind is None else _PUBLIC_TEXT.get(kind, str(error))
    info = ErrorInfo(reason="INTERNAL" if kind is None else reason_of(kind), domain=DOMAIN)
    for name in () if kind is None else _ATTRIBUTES.get(kind, ()):
        info.metadata[name] = _clip(getattr(error, name))
    details: list[Message] = [info]
    if isinstance(error, errors.InvalidArgument):
        violation = BadRequest.FieldViolation(field=_clip(error.field), description=_clip(error.reason))
        details.append(BadRequest(field_violations=[violation]))
    if isinstance(error, errors.QueueFull):
        details.append(RetryInfo(retry_delay=_duration(error.retry_after_seconds)))
    if request_id:
        details.append(RequestInfo(request_id=_clip(request_id)))
    status = Status(code=code_of(error).value[0], message=_clip(text))
    for detail in details:
        status.details.add().Pack(detail)
    return status


def from_status(code: grpc.StatusCode, text: str, packed: bytes) -> PageturnerError:
    """The error that a server of ours meant, or UnknownStatus. packed: a google.rpc.Status or nothing."""
    info, retry = ErrorInfo(), RetryInfo()
    try:
        for detail in Status.FromString(packed).details:
            detail.Unpack(info)
            detail.Unpack(retry)
    except DecodeError:
        return UnknownStatus(code.name, text)  # another server's, in a form of its own
    kind = _KINDS.get(info.reason) if info.domain == DOMAIN else None
    if kind is None and code is grpc.StatusCode.DEADLINE_EXCEEDED:
        kind = errors.DeadlineExceeded  # the channel's own clock was first
    if kind is None:
        return UnknownStatus(code.name, text)
    error = kind.__new__(kind, text)  # its constructor would write the text anew
    for name in _ATTRIBUTES.get(kind, ()):
        setattr(error, name, info.metadata[name])
    if isinstance(error, errors.QueueFull):
        error.retry_after_seconds = retry.retry_delay.ToNanoseconds() / 1e9
    return error


_KINDS: Mapping[str, type[PageturnerError]] = MappingProxyType({reason_of(kind): kind for kind in CODES})


def _clip(text: str) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= MAX_TEXT:
        return encoded.decode()
    return encoded[: MAX_TEXT - len("…".encode())].decode(errors="ignore") + "…"


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(max(0, round(seconds * 1e9)))
    return duration
