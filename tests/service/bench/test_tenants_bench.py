"""The benchmark of two tenants: its figures, and the whole on a virtual clock."""

from __future__ import annotations

import json
import math

import pytest

from pageturner.service.bench.simulated_tenants import simulate_tenants
from pageturner.service.bench.tenants import Answers, TenantsLoad, percentile
from pageturner.service.cli import main
from pageturner.service.simulator.machine import load_machine

LOAD = TenantsLoad(1.0, 2, 32, 16, 40, 64, 32)


def test_figures_are_medians_and_what_failed_is_infinite() -> None:
    answers = Answers((0.1, 0.2, 0.3), (1.0, 2.0, math.inf))
    assert answers.figures() == {
        "ttft_p50": 0.2, "ttft_p90": 0.3, "latency_p50": 2.0, "latency_p90": math.inf, "failed": 1,
    }  # fmt: skip
    assert percentile((3.0, 1.0, 2.0), 0.5) == 2.0


def test_equal_shares_keep_the_quiet_tenant_within_twice_its_latency() -> None:
    machine = load_machine("cpu-smollm2-135m")
    shared, in_turn = (simulate_tenants(LOAD, machine, shares=shares) for shares in (True, False))
    assert float(str(shared.figures()["latency_p50_ratio"])) < 2
    assert float(str(in_turn.figures()["latency_p50_ratio"])) > 4


def test_the_command_prints_both(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--requests=1", "--prompt-tokens=8", "--output-tokens=4", "--open=4"]
    command = ["bench", "tenants", "--machine=cpu-smollm2-135m", *flags, "--flood-output-tokens=400"]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal shares"]["beside"]["failed"] == 0
    assert main(command) == 0
    assert "first come first served:" in capsys.readouterr().out
    assert main(["bench", "tenants", "--open=0"]) == 2
