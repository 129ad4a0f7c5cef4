"""The study covers every built-in, its verdicts are those of the intervals, and its page stands alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pageturner.policies import registry
from pageturner.policies.interfaces import FLEET_AXES
from pageturner.service.simulator.contenders import parse_policies
from pageturner.service.simulator.figures import METRIC, Interval
from pageturner.service.simulator.machine import load_machine
from pageturner.service.simulator.study import Finding, render, run_case, write_study
from pageturner.service.simulator.study_cases import CASES, Case

MACHINE = load_machine("h100-8b")


def policy_of(case: Case) -> str:
    contender = parse_policies(f"{case.others};{case.axis}={case.policy}").on(MACHINE)
    return registry.name_of(getattr(contender.policies, case.axis))


def test_every_built_in_but_the_defaults_has_one_case() -> None:
    built_in = {
        (axis, policy.name)
        for axis, classes in registry.BUILT_IN.items()
        for policy in classes
        if axis not in FLEET_AXES and policy.name != registry.DEFAULTS[axis]
    }
    covered = [(case.axis, policy_of(case)) for case in CASES]
    assert sorted(covered) == sorted(built_in)
    assert all(METRIC[case.metric].more_is_better is not None for case in CASES)


def finding(metric: str, low: float, high: float) -> Finding:
    case = next(case for case in CASES if case.metric == metric)
    return Finding(case, "some", Interval(10, 9, 11, 5), Interval((low + high) / 2, low, high, 5))


@pytest.mark.parametrize(
    ("metric", "low", "high", "is_win", "gain"),
    [
        ("ttft_mean", -3, -1, True, 0.2),
        ("ttft_mean", -3, 1, False, 0.1),
        ("ttft_mean", 1, 3, False, -0.2),
        ("throughput", 1, 3, True, 0.2),
        ("throughput", -3, -1, False, -0.2),
    ],
)
def test_a_win_is_an_interval_on_the_better_side(
    metric: str, low: float, high: float, is_win: bool, gain: float
) -> None:
    found = finding(metric, low, high)
    assert found.is_win == is_win
    assert found.gain.mean == pytest.approx(gain)
    assert found.gain.low < found.gain.mean < found.gain.high


def test_a_case_runs_and_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    case = next(case for case in CASES if case.policy == "shortest-job-first")
    found = run_case(case, MACHINE, range(2))
    assert found.default.mean > 0
    page = write_study([found], {"seeds": 2}, tmp_path)
    assert "data:image/png" in page.read_text()
    assert case.why in (tmp_path / "study.md").read_text()
    assert json.loads((tmp_path / "study.json").read_text())["findings"][0]["policy"] == "shortest-job-first"
    assert render([found]).row_count == 1
