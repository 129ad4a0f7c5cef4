"""Who calls, as the layers below the wire see it: frozen values that an authenticator makes once a call."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import quote


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one tenant may ask for at most; None is no bound of its own beside the server's."""

    max_concurrent_requests: int | None = None
    """Requests that wait or run at once."""
    max_queued_tokens: int | None = None
    """Prompt tokens of its waiting requests together."""
    tokens_per_minute: int | None = None
    """Prompt and output tokens, as a bucket that holds one minute's worth and fills evenly."""
    max_tokens: int | None = None
    """Output tokens of one choice."""
    min_priority: int | None = None
    """The least urgent priority that it may give."""
    max_priority: int | None = None
    """The most urgent priority that it may give."""
    adapters: tuple[str, ...] | None = None
    """Names of the adapters that it may use."""
    tokenized_per_minute: int | None = None
    """Characters that Tokenize is given, and ids that Detokenize is; a bucket like tokens_per_minute's."""


@dataclass(frozen=True, slots=True)
class Identity:
    """One caller, as its credential proved it.

    tenant: on whose account its requests run, and whose request ids and cached blocks it can meet; empty
    where authentication is off. credential: which of the tenant's credentials it was, for logs; never a
    secret. is_admin: it may call AdminService, and abort any tenant's request there.
    """

    tenant: str = ""
    credential: str = ""
    is_admin: bool = False
    limits: TenantLimits = field(default_factory=TenantLimits)

    @property
    def is_anonymous(self) -> bool:
        """Whether authentication is off, so that a request's own tenant field is taken."""
        return not self.tenant


ANONYMOUS = Identity(is_admin=True)
"""Every caller of a server without authentication: who reaches it is served."""


def scoped_id(tenant: str, request_id: str) -> str:
    """The id of a tenant's request among all tenants', as the scheduler, its records and operators know it.

    That is TENANT/ID, the tenant percent-encoded (RFC 3986) so that no two pairs come out alike; the plain
    id where there is no tenant.
    """
    return f"{quote(tenant, safe='')}/{request_id}" if tenant else request_id


def is_id_of(scoped: str, request_id: str) -> bool:
    """Whether a scoped id may be what `scoped_id` made of a client's: for who searches by that alone."""
    return request_id in (scoped, scoped.partition("/")[2] or scoped)
