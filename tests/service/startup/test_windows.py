"""Whether what a sliding window passed is given back: where every layer has one, and no tier is behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import structlog
from structlog.testing import capture_logs

from pageturner.service.core.options import CacheOptions
from pageturner.service.startup.parts import windowed

POOL = CacheOptions(num_blocks=64)
TIERED = replace(POOL, num_host_blocks=16, num_host_cache_blocks=8)


@pytest.mark.parametrize(
    ("cache", "window", "expected", "events"),
    [
        (POOL, 32, 32, [("info", "sliding_window")]),
        (POOL, None, None, []),
        (POOL, 256, None, []),
        (TIERED, 32, None, [("warning", "sliding_window_kept")]),
        (TIERED, 256, None, []),
    ],
)
def test_a_window_counts_where_it_can_and_its_absence_is_told(
    cache: CacheOptions, window: int | None, expected: int | None, events: list[tuple[str, str]]
) -> None:
    """Sequences have 256 tokens at most."""
    with capture_logs() as entries:
        found = windowed(cache, window, 256, structlog.get_logger())
    assert found == replace(cache, window=expected)
    assert [(entry["log_level"], entry["event"]) for entry in entries] == events
    assert all("host_cache_memory" in entry["reason"] for entry in entries if entry["log_level"] == "warning")
