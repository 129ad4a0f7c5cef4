"""The benchmark of guesses: its loads, its words, and what it refuses."""

from __future__ import annotations

import pytest

from pageturner.service.bench.speculation import SpeculationLoad, SpeculationResult
from pageturner.service.cli import main
from pageturner.service.commands.bench_speculation import lines


@pytest.mark.parametrize("kind", ["quote", "story"])
def test_every_prompt_of_a_load_is_another(kind: str) -> None:
    prompts = [prompt for prompt, _ in SpeculationLoad(kind, 16, 8).requests()]
    assert len(set(prompts)) == 16
    if kind == "quote":
        assert all(prompt.startswith("Each text") and prompt.endswith("Copy:") for prompt in prompts)


def test_the_ratio_is_of_medians() -> None:
    result = SpeculationResult(SpeculationLoad("quote", 2, 8), (10, 30, 20), (40, 50, 90), 16, 12, 2)
    assert result.ratio == 2.5
    assert list(lines((result,)))[1] == (
        "quote    2 at once:    20.0    50.0, ratio 2.50; 12 of 16 guesses came true (75%); "
        "2 of 2 answers the same"
    )


@pytest.mark.parametrize("flag", ["--concurrency=0", "--concurrency=1,x", "--rounds=0"])
def test_bad_numbers_are_refused(flag: str) -> None:
    assert main(["bench", "speculation", flag]) == 2
