"""How long a test waits for what must come. No test passes or fails by it, unless something hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic, sleep

PATIENCE_SECONDS = 120.0
"""What is not there by then never comes, on a machine however busy. A count of looks would be a bound in time
as well, and another one on each machine."""


async def until(holds: Callable[[], bool], seconds_between: float = 0.005) -> None:
    """For what has no event: look again and again."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not holds():  # noqa: ASYNC110  # what has no event
            await asyncio.sleep(seconds_between)


def wait_until(holds: Callable[[], bool], seconds_between: float = 0.005) -> None:
    """As `until`, of what other threads and processes do."""
    ends = monotonic() + PATIENCE_SECONDS
    while not holds():
        assert monotonic() < ends, "it never came true"
        sleep(seconds_between)
