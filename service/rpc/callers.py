"""Who makes the call under way: proved once, before its request is parsed, and read by what serves it."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

import grpc
from grpc_health.v1 import health_pb2

from pageturner.service.auth.proof import Authenticator, Presented
from pageturner.service.errors import PermissionDenied, RefusalCause
from pageturner.service.identity import ANONYMOUS, Identity
from pageturner.v1 import admin_pb2

Context = grpc.aio.ServicerContext

OPEN_SERVICES = frozenset({health_pb2.DESCRIPTOR.services_by_name["Health"].full_name})
"""For probes, which have no credentials: they learn whether the server serves, and nothing else."""

CHANNELZ = "grpc.channelz.v1.Channelz"
ADMIN_SERVICES = frozenset({admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name, CHANNELZ})

LOCAL_ADMIN = Identity(credential="socket file", is_admin=True)
"""Who may open the admin listener's socket file."""

_caller: ContextVar[Identity] = ContextVar("caller")


def current_caller() -> Identity:
    """The identity of the call that this task serves. Raises LookupError outside of one."""
    return _caller.get()


def bind_caller(identity: Identity) -> None:
    """Until the end of this task, which is one call's. For the interceptor, and tests of servicers."""
    _caller.set(identity)


class Gatekeeper:
    """Admits a call to a service, or raises Unauthenticated or PermissionDenied.

    Whatever is not open to all wants an identity, so that a service which is added is not forgotten.
    authenticator: None where authentication is off. trusts_socket: callers are those who may open a file that
    only the server's own user may.
    """

    def __init__(self, authenticator: Authenticator | None, *, trusts_socket: bool = False) -> None:
        self._authenticator = authenticator
        self._trusts_socket = trusts_socket

    def admit(self, service: str, context: Context[object, object]) -> Identity:
        """Who calls. service: its full name."""
        if service in OPEN_SERVICES:
            return Identity()
        if self._authenticator is None:
            return ANONYMOUS
        identity = LOCAL_ADMIN if self._trusts_socket else self._authenticator.prove(_presented(context))
        if service in ADMIN_SERVICES and not identity.is_admin:
            raise PermissionDenied(f"{service} is for admin identities", RefusalCause.NOT_ADMIN)
        return identity


def _presented(context: Context[object, object]) -> Presented:
    metadata = context.invocation_metadata() or ()
    authorizations = [value for key, value in metadata if key == "authorization" and isinstance(value, str)]
    return Presented(authorizations, _certificate_names(context.auth_context()))


def _certificate_names(auth_context: Mapping[str, object]) -> list[str]:
    """Of a certificate that the transport verified: its subject alternative names, then its common name."""
    names: list[str] = []
    for key in ("x509_subject_alternative_name", "x509_common_name"):
        values = auth_context.get(key, ())
        assert isinstance(values, (list, tuple)), "gRPC's auth context has lists"
        names.extend(value.decode("utf-8", "backslashreplace") for value in values)
    return names
