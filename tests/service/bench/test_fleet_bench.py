"""`pageturner bench fleet`: coarse servers are close to the scheduler, and it is printed how close."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pageturner.service.bench import fleet
from pageturner.service.bench.fleet import FleetReport, compare
from pageturner.service.cli import main
from pageturner.service.simulator.routing_cases import CASES

CHATS = next(case for case in CASES if case.name == "chats").on(2)


def test_coarse_servers_are_close_and_it_is_said_how_close(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compare(replace(CHATS, recipe=replace(CHATS.recipe, requests=6, output=40)))
    assert found.num_requests == 30
    assert all(abs(error) < 1e-6 for error in found.errors(16).values()), "chunks of a block"
    assert all(abs(error) < 0.25 for error in found.errors(256).values())
    report = FleetReport((found,), {"prefix-aware": 4000.0})
    monkeypatch.setattr(fleet, "measure_fleet", lambda _: report)
    assert main(["bench", "fleet", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["comparisons"][0]["chunks"]["256"]["errors"].keys() == found.errors(256).keys()
    assert main(["bench", "fleet"]) == 0
    assert "4000 requests/s on 50 coarse servers" in capsys.readouterr().out
