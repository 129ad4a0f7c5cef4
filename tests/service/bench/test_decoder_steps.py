"""The benchmark of a decoder's step: a tiny shape, a clock that is told."""

from __future__ import annotations

import json
import math

import pytest
import torch
from support.ops import cpu_cache_dir

from pageturner.service.bench import machines
from pageturner.service.bench.decoder_steps import DecoderShape, StepCase, measure_steps
from pageturner.service.cli import main

TINY = DecoderShape(2, 64, 96, 4, 2, 16, 80)


def test_each_case_is_timed_and_told() -> None:
    ticks = iter(range(1000))
    told: list[object] = []
    cases = [StepCase(3, 20), StepCase(1, 18, chunk=8)]
    assert [list(case.steps()) for case in cases] == [[(1, 20)], [(8, 8), (8, 16), (2, 18)]]
    timings = measure_steps(TINY, cases, 2, 7.0, cpu_cache_dir(), told.append, lambda: float(next(ticks)))
    assert told == timings
    assert [StepCase(t.num_sequences, t.num_keys, t.chunk) for t in timings] == cases
    token_bytes = 2 * 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim
    assert [t.kv_bytes for t in timings] == [3 * 20 * token_bytes, 0]
    for timing in timings:
        assert timing.loop_bytes_per_second > 0
        assert timing.milliseconds == 1000.0
        assert set(timing.phases) >= {"embed", "attention", "head"}
        assert all(math.isfinite(spent) and spent > 0 for spent in timing.phases.values())


def test_codes_are_read_with_their_scales() -> None:
    ticks = iter(range(1000))
    (timing,) = measure_steps(
        TINY,
        [StepCase(3, 20)],
        2,
        7.0,
        cpu_cache_dir(),
        clock=lambda: float(next(ticks)),
        kv_dtype=torch.int8,
    )
    assert timing.kv_bytes == 3 * 20 * 2 * TINY.num_layers * TINY.num_kv_heads * (TINY.head_dim + 2)
    assert math.isfinite(timing.milliseconds)


def test_numbers_that_are_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["--batches=1,x"],
        ["--batches=8x0"],
        ["--prompts=0"],
        ["--context=0"],
        ["--chunk=0"],
        ["--threads=-1"],
    ):
        assert main(["bench", "steps", *words]) == 2
        assert words[0].partition("=")[0] in capsys.readouterr().err


def test_code_that_the_cpu_cannot_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machines, "cpu_flags", lambda: {"sse2", "avx2"})
    assert main(["bench", "steps", "--code=avx2"]) == 2
    assert "avx2 fma f16c" in capsys.readouterr().err
    monkeypatch.setattr(machines, "cpu_flags", lambda: {"avx2", "fma", "f16c"})
    assert machines.compiler_flags("avx2") != machines.compiler_flags("native")


@pytest.mark.slow
def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "steps", "--batches=1,2x30", "--prompts=40", "--chunk=32", "--seconds=0.01"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [timing["num_keys"] for timing in document["timings"]] == [200, 30, 40]
    assert main(words) == 0
    assert "plain loop" in capsys.readouterr().out
