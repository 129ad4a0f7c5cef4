"""The colours of the view, which are those of the live page, too."""

from __future__ import annotations

from typing import Literal

from pageturner.service.client import BlockUse, RequestState
from pageturner.service.engine.api import EngineHealth

Colouring = Literal["use", "owner"]

USE_NAMES = {
    BlockUse.LIVE: "held",
    BlockUse.SHARED: "shared",
    BlockUse.PENDING: "pending",
    BlockUse.EVICTABLE: "cached",
    BlockUse.FREE: "free",
}
USE_STYLES = {
    BlockUse.LIVE: "#2fb9a5",
    BlockUse.SHARED: "#6f9cf5",
    BlockUse.PENDING: "#e0b83c",
    BlockUse.EVICTABLE: "#5c6f82",
    BlockUse.FREE: "#37424e",
}
OWNER_STYLES = (
    *("#2fb9a5", "#6f9cf5", "#e0a03c", "#c678dd", "#7cc35c", "#e0637a"),
    *("#4cc2e8", "#d4c34a", "#9a8cf0", "#e08a5c", "#58b98a", "#d478b0"),
)
"""By the number of a request: the same colour from one look to the next, on the page as in the terminal."""

STATE_NAMES = {RequestState.RUNNING: "runs", RequestState.WAITING: "waits", RequestState.SWAPPED: "swapped"}
STATE_STYLES = {
    RequestState.RUNNING: "#2fb9a5",
    RequestState.WAITING: "#e0b83c",
    RequestState.SWAPPED: "#6f9cf5",
}
HEALTH_STYLES = {
    EngineHealth.STARTING: "#e0b83c",
    EngineHealth.SERVING: "#2fb9a5",
    EngineHealth.STALLED: "bold #e0637a",
    EngineHealth.DRAINING: "#e0b83c",
    EngineHealth.DEAD: "bold #e0637a",
}


def owner_style(number: int) -> str:
    """Of a request's blocks."""
    return OWNER_STYLES[number % len(OWNER_STYLES)]
