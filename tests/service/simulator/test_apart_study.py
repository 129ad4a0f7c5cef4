"""The study of prefill apart: equal servers, paired seeds, and a verdict that is what the seeds can tell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from pageturner.service.cli import main
from pageturner.service.simulator import apart_study
from pageturner.service.simulator.apart_cases import ARRANGEMENTS, CASES, NUM_SERVERS, ApartCase
from pageturner.service.simulator.apart_study import (
    JUDGED,
    NAMES,
    ApartFinding,
    apart_markdown,
    render_apart,
    run_apart_case,
    run_apart_study,
    write_apart_study,
)
from pageturner.service.simulator.experiment import ContenderRuns
from pageturner.service.simulator.machine import load_machine

MACHINE = load_machine("h100-8b")
SMALL = replace(CASES[0], recipe=replace(CASES[0].recipe, requests=6, rate=60.0, output=12))


def finding(means: Mapping[str, tuple[float, ...]], metric: str) -> ApartFinding:
    """A figure of each arrangement by seed."""
    outcomes = [
        ContenderRuns(name, tuple({metric: value} for value in runs), (), ()) for name, runs in means.items()
    ]
    return ApartFinding(SMALL, tuple(outcomes))


def test_every_arrangement_has_the_same_servers_with_the_same_memory() -> None:
    contenders = SMALL.contenders(MACHINE)
    assert tuple(contender.name for contender in contenders) == NAMES
    fleets = [contender.fleet for contender in contenders]
    assert {fleet.num_replicas for fleet in fleets if fleet} == {NUM_SERVERS}
    assert sorted({fleet.num_prefill for fleet in fleets if fleet}) == list(range(NUM_SERVERS))
    assert len({contender.machine.cache for contender in contenders}) == 1
    assert contenders[0].machine.cache.num_host_cache_blocks > 0
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_verdict_is_the_best_of_each_kind_as_far_as_seeds_tell() -> None:
    """With more_is_better as the figure has it; the arrangements of a kind are not told apart for it."""
    slow, quick, noisy = (1.0, 1.1, 1.2), (0.5, 0.6, 0.7), (0.2, 1.9, 1.0)
    together, small, *apart = NAMES
    both = {together: slow, small: slow}
    assert finding({**both, **dict.fromkeys(apart, quick)}, "itl_p99").verdict("itl_p99") == "apart"
    assert finding({**both, **dict.fromkeys(apart, quick)}, "goodput").verdict("goodput") == "together"
    assert finding({**both, **dict.fromkeys(apart, noisy)}, "itl_p99").verdict("itl_p99") == "even"
    one_is_better = {**both, small: (0.3, 0.4, 0.5), **dict.fromkeys(apart, quick)}
    assert finding(one_is_better, "itl_p99").verdict("itl_p99") == "together"
    unlike = {apart[0]: slow, apart[1]: quick, apart[2]: (0.4, 0.8, 0.7)}
    found = finding({**both, **unlike}, "itl_p99")
    assert found.best("itl_p99") == apart[1]
    assert found.winners("itl_p99") == (apart[1], apart[2])


def test_the_study_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    said: list[str] = []
    findings = run_apart_study(MACHINE, range(2), said.append, [SMALL])
    assert said[0].startswith(f"{SMALL.name}: TTFT p50 ")
    assert len(render_apart(findings).renderables) == len(JUDGED)
    picture = write_apart_study(findings, {"seeds": 2}, tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "apart.md").read_text() == apart_markdown(findings)
    told = json.loads((tmp_path / "apart.json").read_text())["loads"][0]
    assert set(told["arrangements"]) == {arrangement.name for arrangement in ARRANGEMENTS}
    assert told["arrangements"]["2:2"]["runs"][0]["handed_share"] > 0.9
    assert told["arrangements"]["together"]["runs"][0]["handed_share"] == 0.0

    monkeypatch.setattr(apart_study, "run_apart_study", lambda *_: findings)
    assert main(["study", "--only=apart", "--seeds=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["load"] == SMALL.name
    assert main(["study", "--only=apart", "--seeds=2"]) == 0
    assert "3:1" in capsys.readouterr().out


def test_a_mistake_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "--only=aprt"]) == 2
    assert "no policy axis 'aprt'; there are queue" in capsys.readouterr().err
    assert main(["study", "--only=apart", "--replicas=4"]) == 2
    assert "--replicas: is for --only routing" in capsys.readouterr().err


HEAVY = [case for case in CASES if case.name.startswith("4,000 in") and "heavy" in case.name]


@pytest.mark.slow
@pytest.mark.parametrize("case", HEAVY, ids=lambda case: case.name)
def test_tokens_come_more_evenly_apart_and_first_ones_later(case: ApartCase) -> None:
    found = run_apart_case(case, MACHINE, range(2))
    apart = [arrangement.name for arrangement in ARRANGEMENTS if arrangement.is_apart]
    for metric, best in (("itl_p99", found.best("itl_p99")), ("ttft_p50", found.best("ttft_p50"))):
        assert (best in apart) == (metric == "itl_p99"), metric
