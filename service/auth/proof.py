"""A call's credentials become an identity, or are refused without a word of what was wrong with them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pageturner.service.auth.identities import Identities, TokenEntry
from pageturner.service.auth.tokens import MalformedToken, parse_token
from pageturner.service.errors import RefusalCause, Unauthenticated
from pageturner.service.identity import Identity

SCHEME = "bearer"
_NO_DIGEST = hashlib.sha256(b"no token has this digest").digest()
"""Compared with where the id is unknown, so that an answer takes as long as for one that is known."""


@dataclass(frozen=True, slots=True)
class Presented:
    """What a call brought with it. authorizations: values of its `authorization` metadata.

    certificate_names: the subject alternative names and the common name of a certificate that the transport
    has verified; empty without one.
    """

    authorizations: Sequence[str] = field(default=(), repr=False)
    certificate_names: Sequence[str] = ()


class Authenticator:
    """Proves identities by those in force at the moment of the call.

    identities: those in force. now: seconds of the epoch.
    """

    def __init__(self, identities: Callable[[], Identities], now: Callable[[], float]) -> None:
        self._identities = identities
        self._now = now

    def prove(self, presented: Presented) -> Identity:
        """Who calls. Where a certificate and a token are given, both must be of one tenant, and the token
        decides.

        Raises Unauthenticated, whose text is the same whatever the cause.
        """
        identities = self._identities()
        by_certificate = _by_certificate(identities, presented.certificate_names)
        if not presented.authorizations:
            if by_certificate is None:
                cause = (
                    RefusalCause.UNKNOWN_CERTIFICATE if presented.certificate_names else RefusalCause.MISSING
                )
                raise Unauthenticated(cause)
            return by_certificate
        identity = self._by_token(identities, presented.authorizations)
        if by_certificate is not None and by_certificate.tenant != identity.tenant:
            raise Unauthenticated(RefusalCause.TWO_TENANTS, identity.credential)
        return identity

    def _by_token(self, identities: Identities, authorizations: Sequence[str]) -> Identity:
        if len(authorizations) > 1:
            raise Unauthenticated(RefusalCause.MALFORMED)
        scheme, _, text = authorizations[0].partition(" ")
        try:
            if scheme.lower() != SCHEME:
                raise MalformedToken("another scheme")
            token = parse_token(text)
        except MalformedToken:
            # Without what it was raised from: a traceback must not hold the text.
            raise Unauthenticated(RefusalCause.MALFORMED) from None
        entry = identities.tokens.get(token.id)
        is_right = hmac.compare_digest(token.digest, _NO_DIGEST if entry is None else entry.digest)
        if entry is None:
            raise Unauthenticated(RefusalCause.UNKNOWN_TOKEN)
        if not is_right:
            raise Unauthenticated(RefusalCause.WRONG_SECRET, entry.identity.credential)
        if self._is_over(entry):
            raise Unauthenticated(RefusalCause.EXPIRED, entry.identity.credential)
        return entry.identity

    def _is_over(self, entry: TokenEntry) -> bool:
        return entry.expires is not None and self._now() >= entry.expires


def _by_certificate(identities: Identities, names: Sequence[str]) -> Identity | None:
    """The one whose name the certificate bears. Raises Unauthenticated where its names are of several
    tenants."""
    found = [identities.certificates[name] for name in names if name in identities.certificates]
    if len({identity.tenant for identity in found}) > 1:
        raise Unauthenticated(RefusalCause.TWO_TENANTS)
    return found[0] if found else None
