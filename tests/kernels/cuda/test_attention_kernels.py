"""paged_decode, decode_merge and paged_prefill, emulated, against the definition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pageturner.kernels.cuda.emulation.build import Builder
from pageturner.kernels.cuda.emulation.runtime import EmulatedRuntime
from pageturner.kernels.cuda.emulation.schedule import SCHEDULES, Schedule
from pageturner.kernels.cuda.runtime import Launcher

from support.attention_kernels import AttentionCase, check_attention_kernels, run_attention

BF16, FP16 = torch.bfloat16, torch.float16
RAGGED = ((1, 1), (1, 15), (1, 16), (1, 17), (1, 350))
"""One row each; 350 keys are 22 tiles: 5 or more a warp, so that every ring goes round more than once."""
PREFILL = ((40, 40), (33, 200), (1, 9))
"""A prompt, a chunk of one, and a decode beside them."""

CASES = {
    "decode": AttentionCase(RAGGED),
    "decode-fp16": AttentionCase(RAGGED, dtype=FP16, head_dim=128, group=4, block_size=32),
    "decode-96": AttentionCase(RAGGED, head_dim=96, group=5, block_size=64),
    "decode-256": AttentionCase(RAGGED, head_dim=256, group=16, num_kv_heads=1),
    "decode-split": AttentionCase(RAGGED, head_dim=128, group=8, split=48, sinks=True),
    "decode-rows": AttentionCase(((5, 5), (4, 19), (2, 130), (1, 64)), group=3, split=32, dtype=FP16),
    "decode-window": AttentionCase(((3, 300), (4, 20)), group=4, window=37, split=16, sinks=True),
    "decode-chunk": AttentionCase(((4, 195), (1, 64), (1, 65)), group=2, chunk=64, head_dim=96, dtype=FP16),
    "decode-softcap": AttentionCase(RAGGED, group=2, softcap=3.0, scale=0.5, split=160, head_dim=256),
    "prefill": AttentionCase(PREFILL, group=3),
    "prefill-fp16": AttentionCase(PREFILL, group=1, dtype=FP16, head_dim=128, block_size=64),
    "prefill-96": AttentionCase(PREFILL, group=2, head_dim=96, block_size=32, sinks=True),
    "prefill-256": AttentionCase(PREFILL, group=4, head_dim=256, num_kv_heads=1),
    "prefill-window": AttentionCase(((70, 210),), group=3, window=50, dtype=FP16, sinks=True),
    "prefill-chunk": AttentionCase(((90, 190),), group=1, chunk=48, window=40, head_dim=128),
    "prefill-softcap": AttentionCase(PREFILL, group=5, softcap=2.0, scale=0.4),
}


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    cache_dir: Path = tmp_path_factory.mktemp("kernels")
    return Builder(cache_dir)


def launcher(builder: Builder, schedule: Schedule = SCHEDULES[0]) -> Launcher:
    return Launcher(EmulatedRuntime(builder, schedule=schedule))


@pytest.mark.parametrize("name", CASES)
def test_matches_the_definition_under_every_schedule(builder: Builder, name: str) -> None:
    results = [check_attention_kernels(launcher(builder, schedule), CASES[name]) for schedule in SCHEDULES]
    for schedule, result in zip(SCHEDULES, results, strict=True):
        assert torch.equal(result, results[0]), schedule


@pytest.mark.parametrize("group", range(1, 17))
def test_every_group_size(builder: Builder, group: int) -> None:
    case = AttentionCase(((1, 33), (17, 40)), group=group, num_kv_heads=1)
    check_attention_kernels(launcher(builder), case)


def test_scores_that_rise_and_fall_by_hundreds_of_powers_of_two(builder: Builder) -> None:
    """Far beyond the anchor's slack, both ways, tile after tile."""
    for sequences in (((1, 350),), ((20, 150),)):
        check_attention_kernels(launcher(builder), AttentionCase(sequences, scale=30.0))


def test_a_row_has_the_same_bits_whatever_runs_beside_it(builder: Builder) -> None:
    """Anchors move row by row."""
    case, spec = AttentionCase(((5, 120),), group=3, scale=2.0).build()
    whole = run_attention(launcher(builder), case, spec)
    one = replace(case, query=case.query.clone())
    one.query[1:] = 0
    assert torch.equal(run_attention(launcher(builder), one, spec)[0], whole[0])
