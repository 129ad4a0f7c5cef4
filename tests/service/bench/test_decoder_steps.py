"""The benchmark of a decoder's step: a tiny shape, a clock that is told."""

from __future__ import annotations

import json
import math

import pytest
from support.ops import cpu_cache_dir

from pageturner.service.bench.decoder_steps import DecoderShape, measure_steps
from pageturner.service.cli import main

TINY = DecoderShape(2, 64, 96, 4, 2, 16, 80)


def test_each_case_is_timed_and_told() -> None:
    ticks = iter(range(1000))
    told: list[object] = []
    cases = [(3, 1, 20), (1, 18, 18)]
    timings = measure_steps(TINY, cases, 2, 7.0, cpu_cache_dir(), told.append, lambda: float(next(ticks)))
    assert told == timings
    assert [(t.num_sequences, t.num_rows, t.num_keys) for t in timings] == cases
    for timing in timings:
        assert timing.milliseconds == 1000.0
        assert set(timing.phases) >= {"embed", "attention", "head"}
        assert all(math.isfinite(spent) and spent > 0 for spent in timing.phases.values())


def test_numbers_that_are_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--batches=1,x"], ["--prompts=0"], ["--context=0"], ["--threads=-1"]):
        assert main(["bench", "steps", *words]) == 2
        assert words[0].partition("=")[0] in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "steps", "--batches=1", "--prompts=", "--seconds=0.01", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["timings"][0]["num_keys"] == 200
