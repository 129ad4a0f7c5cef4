"""The study of routing: every policy has its place, and a verdict is what paired seeds can tell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from pageturner.service.cli import main
from pageturner.service.simulator import routing_study
from pageturner.service.simulator.experiment import ContenderRuns
from pageturner.service.simulator.figures import METRIC
from pageturner.service.simulator.machine import load_machine
from pageturner.service.simulator.routing_cases import CASES, RoutingCase
from pageturner.service.simulator.routing_study import (
    POLICIES,
    RoutingFinding,
    render_routing,
    run_routing_case,
    run_routing_study,
    write_routing_study,
)

MACHINE = load_machine("h100-8b")
CHATS = next(case for case in CASES if case.name == "chats")


def small(case: RoutingCase) -> RoutingCase:
    return replace(case, recipe=replace(case.recipe, requests=case.recipe.requests // 10)).on(4)


def finding(means: Mapping[str, tuple[float, ...]]) -> RoutingFinding:
    """ttft_mean of each policy by seed."""
    outcomes = [
        ContenderRuns(name, tuple({"ttft_mean": m} for m in runs), (), ()) for name, runs in means.items()
    ]
    return RoutingFinding(CHATS, tuple(outcomes))


def test_every_policy_is_claimed_to_win_somewhere() -> None:
    assert {case.best for case in CASES} == set(POLICIES)
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(METRIC[case.metric].more_is_better is False for case in CASES)


def test_winners_are_those_that_the_seeds_do_not_tell_from_the_best() -> None:
    found = finding({"a": (1.0, 2.0, 3.0), "b": (1.1, 1.9, 3.1), "c": (1.5, 2.5, 3.6), "d": (9.0, 1.0, 2.0)})
    assert found.best == "a"
    assert found.winners == ("a", "b", "d"), "c is worse by half a second with every seed, d by chance"


def test_a_case_on_other_servers_has_the_same_load_a_server() -> None:
    case = CHATS.on(160)
    assert case.recipe.rate == 10 * CHATS.recipe.rate
    assert case.recipe.requests == 10 * CHATS.recipe.requests
    assert case.fleet.num_replicas == 160


def test_conversations_are_best_sent_where_their_prefix_is() -> None:
    found = run_routing_case(small(CHATS), MACHINE, range(2))
    assert "prefix-aware" in found.winners
    assert "round-robin" not in found.winners
    base = found.interval("round-robin")
    difference = found.difference("prefix-aware", "round-robin")
    assert difference.mean == pytest.approx(found.interval("prefix-aware").mean - base.mean)


def test_the_study_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    one = replace(CHATS, recipe=replace(CHATS.recipe, requests=30))
    said: list[str] = []
    findings = run_routing_study(MACHINE, range(2), said.append, [one], num_servers=2)
    assert said[0].startswith("chats: ")
    assert render_routing(findings).row_count == 1
    picture = write_routing_study(findings, {"seeds": 2}, tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "conversations of five turns" in (tmp_path / "routing.md").read_text()
    told = json.loads((tmp_path / "routing.json").read_text())["settings"][0]
    assert set(told["policies"]) == set(POLICIES)

    monkeypatch.setattr(routing_study, "run_routing_study", lambda *_, **__: findings)
    assert main(["study", "--only=routing", "--seeds=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["setting"] == "chats"
    assert main(["study", "--only=routing", "--seeds=2"]) == 0
    assert "prefix-aware" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--only=queue", "--replicas=4"], "--replicas: is for --only routing"),
        (["--only=routing", "--replicas=1"], "routing needs two servers at least"),
    ],
)
def test_a_mistake_is_named(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_claimed_of_each_setting_holds(case: RoutingCase) -> None:
    assert case.best in run_routing_case(case, MACHINE, range(5)).winners
