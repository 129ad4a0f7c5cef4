"""Who makes the call under way: proved once, before its request is parsed, and read by what serves it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from pageturner.service.auth.proof import Authenticator, Presented
from pageturner.service.errors import PermissionDenied, RefusalCause
from pageturner.service.identity import ANONYMOUS, Identity
from pageturner.v1 import admin_pb2, transfer_pb2

Context = grpc.aio.ServicerContext
Metadata = Iterable[tuple[str, str | bytes]]

OPEN_SERVICES = frozenset({health_pb2.DESCRIPTOR.services_by_name["Health"].full_name})
"""For probes, which have no credentials: they learn whether the server serves, and nothing else."""

CHANNELZ = "grpc.channelz.v1.Channelz"
ADMIN_SERVICES = frozenset(
    {
        admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
        transfer_pb2.DESCRIPTOR.services_by_name["TransferService"].full_name,  # on behalf of any tenant
        CHANNELZ,
    }
)

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
    only the server's own user may. has_certificates: clients have certificates, which only the context of a
    call tells.
    """

    def __init__(
        self,
        authenticator: Authenticator | None,
        *,
        trusts_socket: bool = False,
        has_certificates: bool = False,
    ) -> None:
        self._authenticator = authenticator
        self._trusts_socket = trusts_socket
        self._has_certificates = has_certificates

    def admit_early(self, service: str, metadata: Metadata) -> Identity | None:
        """Who calls, before a byte of the request is taken in; None where `admit` has to say."""
        if self._has_certificates and self._needs_proof(service):
            return None
        return self._admit(service, metadata, {})

    def admit(self, service: str, context: Context[Any, Any]) -> Identity:
        """Who calls. service: its full name."""
        # Its certificates cost some microseconds to read.
        connection = context.auth_context() if self._has_certificates and self._needs_proof(service) else {}
        return self._admit(service, context.invocation_metadata() or (), connection)

    def _needs_proof(self, service: str) -> bool:
        return self._authenticator is not None and not self._trusts_socket and service not in OPEN_SERVICES

    def _admit(self, service: str, metadata: Metadata, connection: Mapping[str, Iterable[bytes]]) -> Identity:
        if service in OPEN_SERVICES:
            return Identity()
        if self._authenticator is None:
            return ANONYMOUS
        if self._trusts_socket:
            return LOCAL_ADMIN
        authorizations = [
            value for key, value in metadata if key == "authorization" and isinstance(value, str)
        ]
        identity = self._authenticator.prove(Presented(authorizations, _certificate_names(connection)))
        if service in ADMIN_SERVICES and not identity.is_admin:
            raise PermissionDenied(f"{service} is for admin identities", RefusalCause.NOT_ADMIN)
        return identity


def _certificate_names(connection: Mapping[str, Iterable[bytes]]) -> list[str]:
    """Of a certificate that the transport verified: its subject alternative names, then its common name."""
    names: list[str] = []
    for key in ("x509_subject_alternative_name", "x509_common_name"):
        names.extend(value.decode("utf-8", "backslashreplace") for value in connection.get(key, ()))
    return names
