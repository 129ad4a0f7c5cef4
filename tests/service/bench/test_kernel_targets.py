"""Whether a run of the benchmark shows the targets met."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pageturner.service.bench.attention_cases import MODELS, Case
from pageturner.service.bench.attention_contenders import paged_name, sdpa_name
from pageturner.service.bench.cuda_kernels import BenchMachine, Result, Timing
from pageturner.service.bench.kernel_targets import verdicts

MACHINE = BenchMachine(copy_bandwidth=4e12, matmul_flops=700e12)
LARGE = Case("decode", MODELS[1], 64, 8192)
PROMPT = Case("prefill", MODELS[1], 1, 8192)


def result(case: Case, rate: float, large_blocks: float = 1.0, gathered: float = 2.0) -> Result:
    amount = Result(case, ()).amount
    seconds = amount / rate
    return Result(
        case,
        (
            Timing(paged_name(16), seconds),
            Timing(paged_name(64), seconds * large_blocks),
            Timing(sdpa_name("flash", gathers=True), seconds * gathered),
        ),
    )


def test_verdicts_say_where_all_targets_are_met() -> None:
    results = [result(LARGE, 3.5e12), result(PROMPT, 310e12)]
    found = verdicts(results, MACHINE, (9, 0))
    assert [verdict.met for verdict in found] == [True] * 4
    assert [verdict.figure for verdict in found] == pytest.approx([0.875, 310, 2.0, 1.0])


@pytest.mark.parametrize(
    ("index", "changes"),
    [
        (0, {"rate": 3.3e12}),
        (2, {"rate": 3.5e12, "gathered": 0.9}),
        (3, {"rate": 3.5e12, "large_blocks": 0.96}),
    ],
)
def test_each_is_missed_by_its_own_figure(index: int, changes: dict[str, float]) -> None:
    results = [result(LARGE, **changes), result(PROMPT, 310e12)]
    found = verdicts(results, MACHINE, (9, 0))
    assert [verdict.met for verdict in found] == [place != index for place in range(4)]
    assert found[index].worst == str(LARGE)


def test_prefill_has_a_figure_on_hopper_only() -> None:
    results = [result(PROMPT, 200e12)]
    assert verdicts(results, MACHINE, (9, 0))[1].met is False
    assert verdicts(results, MACHINE, (8, 0))[1].met is None


def test_small_calls_are_not_held_to_bandwidth() -> None:
    small = replace(LARGE, batch=1, context=128)
    assert verdicts([result(small, 1e9)], MACHINE, (9, 0))[0].met is None
