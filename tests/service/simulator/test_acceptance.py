"""Drafts of simulated answers: what comes true is drawn, the same whoever schedules, and only saves time."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from pageturner.policies import registry
from pageturner.service.cli import main
from pageturner.service.core.options import CacheOptions, SchedulerOptions, SpeculationOptions
from pageturner.service.errors import ConfigError
from pageturner.service.simulator import acceptance
from pageturner.service.simulator.acceptance import Acceptance, parse_acceptance
from pageturner.service.simulator.contenders import parse_policies, sweep
from pageturner.service.simulator.errors import MachineError
from pageturner.service.simulator.figures import figures_of
from pageturner.service.simulator.machine import SimulatedMachine, load_machine
from pageturner.service.simulator.simulation import SimulationResult, simulate
from pageturner.service.simulator.step_time import StepTimeModel
from pageturner.service.simulator.synthetic import Synthetic

MACHINE = SimulatedMachine(
    "test",
    (),
    StepTimeModel(a_step=1.0, a_token=0.001),
    block_bytes=1 << 20,
    cache=CacheOptions(num_blocks=64, block_size=4),
    scheduler=SchedulerOptions(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64),
    speculation=SpeculationOptions("ngram", num_tokens=4),
)
LOAD = Synthetic(requests=6, rate=0.2, prompt=8, output=40, prompt_sigma=0.5, output_sigma=0.5, choices=2)
ALWAYS = Acceptance(repeating=1.0, repeat_odds=1.0, repeat_found=1.0)
NEVER = Acceptance(odds=0.0, found=1.0)


def run(guesses: Acceptance, machine: SimulatedMachine = MACHINE) -> SimulationResult:
    workload = replace(LOAD.make("test", 1), acceptance=guesses)
    return simulate(workload, machine, registry.default_policies())


def test_answers_are_those_without_drafts_and_come_sooner() -> None:
    plain = run(ALWAYS, replace(MACHINE, speculation=SpeculationOptions()))
    fast = run(ALWAYS)
    for before, after in zip(plain.requests, fast.requests, strict=True):
        assert (after.error, after.num_output_tokens) == (None, before.num_output_tokens)
        assert len(after.token_times) == len(before.token_times)
        assert after.ended_at is not None
        assert before.ended_at is not None
        assert after.ended_at < before.ended_at
    assert fast.stats.num_accepted_drafts_total == fast.stats.num_drafted_tokens_total > 0


def test_a_step_yields_the_drafts_that_come_true_and_a_token() -> None:
    """One choice of 40 tokens: one by the prompt, then five a step while there is room, four in the last."""
    workload = replace(
        replace(LOAD, requests=1, choices=1, output_sigma=0.0).make("test", 1), acceptance=ALWAYS
    )
    times = simulate(workload, MACHINE, registry.default_policies()).requests[0].token_times
    steps = sorted(set(times))
    assert [times.count(at) for at in steps] == [1, *[5] * 7, 4]


def test_drafts_that_fail_cost_their_rows_and_compute_nothing_again() -> None:
    result = run(NEVER)
    assert result.stats.num_drafted_tokens_total > 0
    assert result.stats.num_accepted_drafts_total == 0
    assert result.num_recomputed_tokens == 0
    figures = figures_of(result)
    assert figures["draft_share"] > figures["accepted_share"] == 0.0
    dearer = replace(MACHINE, step_time=replace(MACHINE.step_time, a_sample=0.004))
    assert run(NEVER, dearer).seconds > run(replace(NEVER, found=0.0), dearer).seconds


def test_luck_is_of_the_position_whatever_else_runs() -> None:
    one, other = Acceptance(seed=1), Acceptance(seed=2)
    drawn = [one.num_right("7", 0, position) for position in range(2000)]
    assert drawn == [one.num_right("7", 0, position) for position in range(2000)]
    assert drawn != [other.num_right("7", 0, position) for position in range(2000)]
    assert drawn != [one.num_right("7", 1, position) for position in range(2000)]
    results = [run(Acceptance(repeating=0.5)) for _ in range(2)]
    assert results[0].requests == results[1].requests


@pytest.mark.parametrize(("repeating", "found", "odds"), [(1.0, 0.9, 0.8), (0.0, 0.4, 0.5)])
def test_lengths_are_drawn_by_the_odds(repeating: float, found: float, odds: float) -> None:
    """The share of positions with drafts, and the mean of the geometric lengths, by five deviations."""
    guesses = Acceptance(repeating, repeat_odds=0.8, odds=0.5, repeat_found=0.9, found=0.4)
    drawn = [guesses.num_right("r", 0, position) for position in range(4000)]
    lengths = [length for length in drawn if length is not None]
    assert abs(len(lengths) / 4000 - found) < 5 * math.sqrt(found * (1 - found) / 4000)
    deviation = math.sqrt(odds) / (1 - odds) / math.sqrt(len(lengths))
    assert abs(sum(lengths) / len(lengths) - odds / (1 - odds)) < 5 * deviation


def test_a_draft_too_many_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run in which all drafts are said to fail, one comes true."""
    monkeypatch.setattr(acceptance, "true_token", lambda request, position: request.new.seed + position - 1)
    assert run(NEVER).stats.num_accepted_drafts_total > 0


def test_shares_are_written_as_they_are_read() -> None:
    assert parse_acceptance("repeating=0.5, odds=0.25") == Acceptance(repeating=0.5, odds=0.25)
    assert parse_acceptance("") == Acceptance()
    for text, complaint in [("luck=1", "there is no 'luck'"), ("odds=x", "is no"), ("odds=2", r"\[0, 1\]")]:
        with pytest.raises(ConfigError, match=complaint):
            parse_acceptance(text)


def test_speculation_is_swept_and_checked_like_other_bounds() -> None:
    setups = sweep([parse_policies("")], "speculation.method=none,ngram")
    assert [s.on(MACHINE).machine.speculation.method for s in setups] == ["none", "ngram"]
    with pytest.raises(ConfigError, match=r"speculation\.method"):
        sweep([parse_policies("")], "speculation.method=oracle")[0].on(MACHINE)
    with pytest.raises(ConfigError, match="num_tokens"):
        sweep([parse_policies("")], "speculation.num_tokens=0")[0].on(MACHINE)


def test_a_machine_file_may_speculate(tmp_path: pytest.TempPathFactory) -> None:
    path = f"{tmp_path}/machine.json"
    for table, is_good in [({"method": "ngram"}, True), ({"method": "ngram", "num_tokens": 0}, False)]:
        plain = json.loads(MACHINE.to_json()) | {"speculation": table}
        with open(path, "w", encoding="utf-8") as file:
            json.dump(plain, file)
        if is_good:
            assert load_machine(path).speculation == SpeculationOptions("ngram")
        else:
            with pytest.raises(MachineError, match="num_tokens"):
                load_machine(path)


def test_simulate_shows_what_drafts_do(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["simulate", "--workload=mixed:requests=20,longest=500", "--seeds=2", "--json"]
    assert main([*small, "--drafts=repeating=1", "--sweep=speculation.method=none,ngram"]) == 0
    none, ngram = json.loads(capsys.readouterr().out)["contenders"]
    assert none["metrics"]["draft_share"]["mean"] == 0.0
    assert ngram["metrics"]["accepted_share"]["mean"] > 0.3
    assert ngram["metrics"]["tpot_p50"]["mean"] < none["metrics"]["tpot_p50"]["mean"]
