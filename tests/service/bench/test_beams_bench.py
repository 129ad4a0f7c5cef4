"""The benches of searches and of scores: their loads, their words, and what they refuse."""

from __future__ import annotations

import pytest

from pageturner.service.bench.beams import BeamContender, BeamLoad, BeamResult
from pageturner.service.bench.scored_steps import ScoredStep
from pageturner.service.bench.scoring import Gaps, ScoringLoad, ScoringResult
from pageturner.service.cli import main
from pageturner.service.commands import bench_beams, bench_scoring


def test_every_contender_computes_as_many_tokens_of_each_row() -> None:
    load = BeamLoad(12, 4, 32)
    assert len(set(load.prompts())) == 12
    for options in load.contenders().values():
        assert (options["max_tokens"], options["min_tokens"]) == (32, 32)


def test_rates_count_the_tokens_of_all_rows() -> None:
    contenders = (BeamContender("one", 1, (1.0,)), BeamContender("samples", 4, (2.0, 3.0, 2.5)))
    result = BeamResult(BeamLoad(2, 4, 10), (*contenders, BeamContender("beams", 4, (5.0,))), 0.5, 0.25)
    assert [result.rate(each) for each in result.contenders] == [20.0, 32.0, 16.0]
    assert result.ratio("beams", "samples") == 0.5
    written = list(bench_beams.lines(result))
    assert " ".join(written[3].split()) == "beams 16.0, 0.50 of the samples'; 5.00 x the time of one answer"
    assert written[-1] == "beams save 50.0% of their blocks by sharing, and copy 0.25 blocks a token"


def test_ratios_are_to_a_plain_prompt_and_gaps_are_ranked() -> None:
    assert Gaps.of([0.1] * 98 + [0.5, 0.4]) == Gaps(0.1, 0.5)
    prompts = {"plain": (1.0, 2.0, 3.0), "logprobs": (3.0,), "top5": (4.0,)}
    result = ScoringResult(
        ScoringLoad(), prompts, Gaps(0.01, 0.02), Gaps(0.02, 0.1), Gaps(0.02, 0.2), 800.0, 400.0
    )
    assert result.ratio("logprobs") == 1.5
    step = ScoredStep(256, 0.2, {0: 0.05, 5: 0.1}, {0: 0.2, 5: 0.3})
    first, second, third, *_, last = bench_scoring.lines(result, step)
    assert "2.00 x as long beside calls" in last
    assert "0 takes 1.50, 5 takes 2.00 x" in first
    assert "scores add 50.0 ms (25%) with 0, 100.0 ms (50%) with 5 others" in second
    assert "by way of all logits add 200.0 ms (100%) with 0, 300.0 ms (150%) with 5 others" in third


@pytest.mark.parametrize(
    "words", [("beams", "--width=1"), ("beams", "--rounds=0"), ("scoring", "--streams=0")]
)
def test_bad_numbers_are_refused(words: tuple[str, ...]) -> None:
    assert main(["bench", *words]) == 2
