"""Tokens with known texts, the identities file that has their hashes, and an authenticator of it."""

from __future__ import annotations

from datetime import UTC, datetime

from pageturner.service.auth.identities import Identities, parse_identities
from pageturner.service.auth.proof import Authenticator
from pageturner.service.auth.tokens import BearerToken, parse_token

NOW = datetime(2026, 6, 1, tzinfo=UTC).timestamp()


def token(token_id: str, secret: str = "s") -> BearerToken:
    """Always the same for an id and a secret."""
    return parse_token(f"pt_{token_id}_{secret:_<43}")


SEARCH, SEARCH_OLD, MAIL, OPERATOR, STRANGER = map(token, ("search", "old", "mail", "operator", "stranger"))

FILE = f"""
[tenants.search]
tokens = [
    {{ id = "search", sha256 = "{SEARCH.digest.hex()}", expires = 2026-06-02 }},
    {{ id = "old", sha256 = "{SEARCH_OLD.digest.hex()}", expires = 2026-06-01 }},
]
certificates = ["search.internal"]
limits = {{ max_concurrent_requests = 4, min_priority = -5, max_priority = 5, adapters = ["a", "b"] }}

[tenants.mail]
tokens = [{{ id = "mail", sha256 = "{MAIL.digest.hex().upper()}" }}]
certificates = ["mail.internal", "spiffe://cluster/mail"]

[tenants.operators]
admin = true
tokens = [{{ id = "operator", sha256 = "{OPERATOR.digest.hex()}", expires = 2027-01-01T00:00:00+02:00 }}]
"""


def authenticator(identities: Identities | None = None) -> Authenticator:
    """By FILE unless others are given, on 2026-06-01."""
    found = parse_identities(FILE) if identities is None else identities
    return Authenticator(lambda: found, lambda: NOW)


def bearer(held: BearerToken) -> tuple[tuple[str, str], ...]:
    """A call's metadata."""
    return (("authorization", f"Bearer {held.text}"),)
