"""`pageturner bench startup`: from the start of the process to health SERVING, the model converted before."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pageturner.service.client.server_process import RunningServer, running_server
from pageturner.service.errors import PageturnerError
from pageturner.service.startup.stages import STARTED

_LOG_SECONDS = 10.0
_LOG_FLAGS = ("--log-level=info", "--log-format=json")


@dataclass(frozen=True, slots=True)
class StartupResult:
    """Seconds of each run, and of the one before them that converted the model if need be. parts: seconds of
    each run's parts by name, in their order, which make up its time."""

    first_seconds: float
    seconds: tuple[float, ...]
    parts: tuple[dict[str, float], ...]

    @property
    def median_seconds(self) -> float:
        """Of the runs that count."""
        return statistics.median(self.seconds)

    def median_parts(self) -> dict[str, float]:
        """Of each part over the runs, which need not make up the median of the whole."""
        return {name: statistics.median(run[name] for run in self.parts) for name in self.parts[0]}


def measure_startup(
    runs: int, arguments: Sequence[str] = (), on_start: Callable[[str], None] = lambda _: None
) -> StartupResult:
    """Start a server once for the caches, then `runs` times, one after the other; on_start: told of each."""

    def once() -> tuple[float, dict[str, float]]:
        with running_server([*arguments, *_LOG_FLAGS]) as server:
            on_start(f"SERVING after {server.ready_seconds:.2f} s")
            return server.ready_seconds, await_parts(server)

    first, _ = once()
    found = [once() for _ in range(runs)]
    return StartupResult(first, tuple(seconds for seconds, _ in found), tuple(parts for _, parts in found))


def await_parts(server: RunningServer) -> dict[str, float]:
    """The parts of its start by name, once it has logged them: a thread that may be behind writes the log.

    Raises PageturnerError for a server that does not log them within some seconds.
    """
    deadline = time.monotonic() + _LOG_SECONDS
    while time.monotonic() < deadline:
        if parts := parts_of(server.ready_seconds, server.log()):
            return parts
        time.sleep(0.02)
    raise PageturnerError("the server did not log the parts of its start")


def parts_of(ready_seconds: float, log: str) -> dict[str, float]:
    """Parts by name, from what a server has logged; what it did before it looked at a clock comes first.
    Empty if it has not logged them."""
    events = [line for line in map(_json, log.splitlines()) if line.get("event") == STARTED]
    if not events:
        return {}
    told = {name: value for name, value in events[0].items() if isinstance(value, float)}
    return {"interpreter and command line": max(0.0, ready_seconds - sum(told.values())), **told}


def _json(line: str) -> dict[str, Any]:
    """An event of the log; empty for a line that is none, such as a library's warning."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}
