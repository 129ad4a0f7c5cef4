"""Requests that make no tokens since their readers lag, and when each is given up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LAST_WAIT = 0.25
"""Share of its time that a request gets once more when it has passed. Where the process gets no processor,
or is stopped, clocks go on while its reader's progress goes unnoticed: it is heard of in this time."""


@dataclass(slots=True)
class _Pause:
    until: float
    is_last: bool = False


class PausedRequests:
    """seconds: a request is given up that is paused for so long, and LAST_WAIT of it more."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pauses: dict[str, _Pause] = {}

    def pause(self, request_id: str, until: float) -> None:
        """Its reader lags; until: when this has lasted for `seconds`."""
        self._pauses[request_id] = _Pause(until)

    def forget(self, request_id: str) -> bool:
        """Its reader has caught up, or it has ended; whether it was paused."""
        return self._pauses.pop(request_id, None) is not None

    def moments(self) -> Iterable[float]:
        """When to ask again."""
        return (pause.until for pause in self._pauses.values())

    def take_late(self, now: float) -> list[str]:
        """Those that are to be given up; they are forgotten."""
        late = []
        for request_id, pause in list(self._pauses.items()):
            if pause.until > now:
                continue
            if pause.is_last:
                late.append(request_id)
                del self._pauses[request_id]
            else:
                self._pauses[request_id] = _Pause(now + LAST_WAIT * self._seconds, is_last=True)
        return late
