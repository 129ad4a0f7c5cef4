"""Bearer tokens: `pt_ID_SECRET`, of which a server keeps the hash of the whole.

A fast hash is enough: a secret is 256 random bits, so that there is nothing to guess it from (NIST SP
800-63B, section 5.1.4.2, asks for slow hashes of what people choose).
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass, field

PREFIX = "pt"
"""So that scanners of sources and logs can tell that a text is one of these."""

SECRET_BYTES = 32
MIN_SECRET_CHARACTERS = 32
"""192 bits, where a secret is made elsewhere of the characters that are allowed here."""

MAX_CHARACTERS = 512

ID = re.compile(r"[A-Za-z0-9-]{1,64}")
_TOKEN = re.compile(rf"{PREFIX}_({ID.pattern})_([A-Za-z0-9_-]{{{MIN_SECRET_CHARACTERS},}})")


class MalformedToken(ValueError):
    """The text is no token: its form alone says so."""


@dataclass(frozen=True, slots=True)
class BearerToken:
    """A token as its holder has it. text: all of it, the secret included."""

    id: str
    text: str = field(repr=False)

    @property
    def digest(self) -> bytes:
        """What the server keeps of it: SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).digest()


def new_token() -> BearerToken:
    """A token with an id and a secret that nobody has."""
    token_id = secrets.token_hex(6)
    return BearerToken(token_id, f"{PREFIX}_{token_id}_{secrets.token_urlsafe(SECRET_BYTES)}")


def parse_token(text: str) -> BearerToken:
    """Raises MalformedToken, which does not repeat the text."""
    match = _TOKEN.fullmatch(text) if len(text) <= MAX_CHARACTERS else None
    if match is None:
        raise MalformedToken(
            f"not of the form {PREFIX}_ID_SECRET with a secret of {MIN_SECRET_CHARACTERS} characters or more"
        )
    return BearerToken(match[1], text)
