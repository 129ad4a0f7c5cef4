"""The bench of monitoring measures what it says."""

from __future__ import annotations

import json

import pytest

from pageturner.service.bench.monitoring import NUM_REQUESTS
from pageturner.service.cli import main


def test_the_costs_of_monitoring_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "monitoring", "--steps=3", "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)
    assert cost.keys() == {
        *("loop_ns", "metrics_ns", "traced_ns", "accept_us", "scrape_us", "text_ms", "text_bytes")
    }
    assert cost["text_bytes"] > 1000 * NUM_REQUESTS / 8
    assert main(["bench", "monitoring", "--steps=3"]) == 0
    assert "a scrape of" in capsys.readouterr().out
    assert main(["bench", "monitoring", "--steps=0"]) == 2
