"""Options of authentication; `service/config.py` composes them with those of the other layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AuthOptions:
    """Who may call."""

    identities: Path | None = None
    """A TOML file of tenants, their tokens as hashes, their certificates and their limits; it is read again
    when it changes. Absent, every caller that reaches the server is served."""
