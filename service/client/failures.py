"""What gRPC says went wrong, as the errors that callers of a client meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import grpc

from pageturner.service.client.targets import Target
from pageturner.service.errors import (
    DeadlineExceeded,
    Draining,
    EngineDead,
    Loading,
    PageturnerError,
    QueueFull,
)
from pageturner.service.rpc.load_report import OWN_TRAILER
from pageturner.service.rpc.status import UnknownStatus, from_status
from pageturner.v1 import admin_pb2

REASON_SECONDS = 1.0
"""For the answer to why a server is not ready, once the time to wait for it is over."""

RETRY_SECONDS = 0.2
"""Between two looks at the health of a server that is there and ended the first."""

CHECK_SECONDS = 2.0
"""How long one of several servers may take to say whether it is ready."""

ABORT_SECONDS = 5.0
"""How long the end of a request is waited for on a server that still has it."""

_ADMIN_METHODS = f"/{admin_pb2.DESCRIPTOR.services_by_name['AdminService'].full_name}/"
_NO_CONNECTION = "failed to connect to all addresses"
_STATUS_KEY = "grpc-status-details-bin"


@contextmanager
def typed_errors(target: Target, path: str) -> Iterator[None]:
    """A failed call, of either kind of channel, raises the error that the server meant, or UnknownStatus.

    path: of the method, as gRPC spells it.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise _meant(error, target, path) from error


def tell_load(trailers: Iterable[tuple[str, str | bytes]] | None, on_load: Callable[[bytes], object]) -> None:
    """Hand on the load that a server told with the end of a call, if it did."""
    for key, value in trailers or ():
        if key == OWN_TRAILER and isinstance(value, bytes):
            on_load(value)


def _meant(error: grpc.RpcError, target: Target, path: str) -> PageturnerError:
    status = cast(grpc.Call, error)  # the errors of both kinds of channel have its accessors
    # The pairs, as dict() of aio's Metadata fails in grpcio 1.72.
    packed = [value for key, value in status.trailing_metadata() or () if key == _STATUS_KEY]
    found = from_status(
        status.code(), status.details() or "", packed[0] if packed and isinstance(packed[0], bytes) else b""
    )
    if isinstance(found, UnknownStatus) and is_away(found):
        return UnknownStatus(found.code, found.details + proxy_hint(target) + _handshake_hint(found.details))
    if isinstance(found, UnknownStatus) and found.code == grpc.StatusCode.UNIMPLEMENTED.name:
        return UnknownStatus(found.code, found.details + _listener_hint(target, path))
    return found


def _handshake_hint(details: str) -> str:
    """What to say of a connection that ended before any call, of which gRPC tells no more than how."""
    if not details.startswith(_NO_CONNECTION):
        return ""
    if "Socket closed" in details:
        return " (it may want an encrypted connection, or a client's certificate)"
    if "WRONG_VERSION_NUMBER" in details:
        return " (it is not encrypted, as no socket file is: leave out what has to do with TLS)"
    return ""


def _listener_hint(target: Target, path: str) -> str:
    """What to say of an admin's call to a server that has no such method there."""
    if not path.startswith(_ADMIN_METHODS):
        return ""
    return f" AdminService is not at {target.address}: it may have a listener of its own (server.admin_host)"


def is_away(error: PageturnerError) -> bool:
    """Whether the server cannot be reached now, is starting or about to go: waiting may help."""
    return isinstance(error, Draining | Loading) or (
        isinstance(error, UnknownStatus) and error.code == grpc.StatusCode.UNAVAILABLE.name
    )


def is_temporary(error: PageturnerError) -> bool:
    """Whether the same call may succeed a moment later or on another server.

    A connection that is lost in the middle of a call shows in several ways, some of them known by their text.
    """
    if isinstance(error, EngineDead | QueueFull) or is_away(error):
        return True
    return isinstance(error, UnknownStatus) and any(
        error.code == code.name and text in error.details for code, text in _LOST_CONNECTIONS
    )


_LOST_CONNECTIONS = (
    (grpc.StatusCode.UNKNOWN, "Stream removed"),
    (grpc.StatusCode.INTERNAL, "RST_STREAM"),
    # Ray Serve's proxy, of an ingress whose process was lost (service/scale).
    (grpc.StatusCode.INTERNAL, "The actor died unexpectedly before finishing this task"),
    # A server that begins to drain has taken the call and gives it to no handler any more.
    (grpc.StatusCode.CANCELLED, grpc.StatusCode.CANCELLED.name),
)


def retry_after(error: PageturnerError) -> float | None:
    """Seconds after which the server wants to be asked again; None where it said nothing."""
    return error.retry_after_seconds if isinstance(error, QueueFull) else None


def proxy_hint(target: Target) -> str:
    """What to say of a proxy where a server was not reached; empty where none is set."""
    variable = target.proxy_variable()
    if not variable:
        return ""
    host = target.host or "the host"
    return f" ({variable} is set: gRPC goes through that proxy unless no_proxy names {host})"


def never_ready(target: Target, timeout_seconds: float, reason: str) -> DeadlineExceeded:
    """The error of a server that did not become ready in time."""
    return DeadlineExceeded(
        f"no server at {target.address} was ready within {timeout_seconds:g} s{proxy_hint(target)}: {reason}"
    )
