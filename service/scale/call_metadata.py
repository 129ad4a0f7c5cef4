"""What a client's call says in its metadata, since Ray's proxy passes on nothing else of a call."""

from __future__ import annotations

from pageturner.service.client.credentials import DEADLINE_KEY
from pageturner.service.errors import InvalidArgument

Metadata = tuple[tuple[str, str | bytes], ...]

SESSION_KEY = "session_id"
"""As Ray itself calls it: requests of one session go to one replica where the routing policy heeds
sessions."""


def session_of(metadata: Metadata) -> str:
    """The session that the call belongs to; empty for none."""
    return next((str(value) for key, value in metadata if key == SESSION_KEY), "")


def deadline_of(metadata: Metadata) -> float | None:
    """Seconds that the client leaves; None where it states none. Raises InvalidArgument."""
    stated = next((value for key, value in metadata if key == DEADLINE_KEY), None)
    if stated is None:
        return None
    try:
        seconds = float(stated)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InvalidArgument(DEADLINE_KEY, f"{stated!r} of the metadata is not a time in seconds")
    return seconds
