"""paged_decode, decode_merge and paged_prefill, emulated, against the definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.attention_kernels import AttentionCase, check_attention_kernels, run_attention
from support.emulation import emulated_launcher
from support.pairwise import pairwise_cases

from pageturner.kernels.cuda import tiles
from pageturner.kernels.cuda.emulation.schedule import SCHEDULES, Schedule
from pageturner.kernels.errors import KernelFault

BF16, FP16 = torch.bfloat16, torch.float16

RAGGED = ((1, 1), (1, 15), (1, 16), (1, 17), (1, 350))
"""One row each; 350 keys are 22 tiles: 5 or more a warp, so that every ring goes round more than once."""
ROWS = ((5, 5), (4, 17), (2, 130), (1, 64))
"""Speculative rows, whose causal limits differ within one mma; of 4, the last alone sees all of a tile."""
PROMPTS = ((40, 40), (33, 200), (1, 9))
"""A prompt, a chunk of one, and a decode beside them."""

CASES = {
    "decode": AttentionCase(RAGGED, scale=1.0),  # steep: anchors move
    "decode-split": AttentionCase(
        RAGGED, dtype=FP16, head_dim=128, group=8, split=48, sinks=True, block_size=32
    ),
    "decode-96": AttentionCase(RAGGED, head_dim=96, group=5, block_size=64, num_kv_heads=1),
    "decode-256-softcap": AttentionCase(
        RAGGED, head_dim=256, group=16, num_kv_heads=1, softcap=3.0, scale=0.3
    ),
    "decode-rows": AttentionCase(ROWS, split=32, dtype=FP16),
    # The rows of 300 keys see from 159, 160 and 161 on: a tile begins with a key that the last does not see.
    "decode-window": AttentionCase(((3, 300), (4, 20)), group=4, window=139, split=48, sinks=True),
    "decode-chunk": AttentionCase(((4, 195), (1, 64), (1, 65)), group=2, chunk=64, head_dim=96, dtype=FP16),
    "prefill": AttentionCase(PROMPTS, num_kv_heads=1, scale=1.0),
    "prefill-chunk": AttentionCase(((90, 190),), group=1, chunk=48, window=40, head_dim=128, dtype=FP16),
    "prefill-96": AttentionCase(
        ((33, 200),), group=2, head_dim=96, block_size=32, sinks=True, num_kv_heads=1
    ),
    "prefill-256": AttentionCase(PROMPTS, group=3, head_dim=256, num_kv_heads=1, block_size=64),
    "prefill-window-softcap": AttentionCase(
        ((70, 330),), window=200, dtype=FP16, sinks=True, softcap=2.0, scale=0.4, num_kv_heads=1
    ),
}


def check_under_every_schedule(case: AttentionCase) -> None:
    """Right under the first, and under the others the same to the bit."""
    paged, spec = case.build()
    expected = check_attention_kernels(emulated_launcher(), case)
    for schedule in SCHEDULES[1:]:
        result = run_attention(emulated_launcher(schedule), paged, spec, split=case.split)
        assert torch.equal(result, expected), schedule


@pytest.mark.parametrize("name", CASES)
def test_matches_the_definition_under_every_schedule(name: str) -> None:
    check_under_every_schedule(CASES[name])


@pytest.mark.parametrize("group", range(1, 17))
def test_every_group_size(group: int) -> None:
    case = AttentionCase(((1, 33), (17, 34)), group=group, num_kv_heads=1)
    check_attention_kernels(emulated_launcher(), case)


@pytest.mark.parametrize("sequences", [((1, 350),), ((20, 100),)], ids=["decode", "prefill"])
@pytest.mark.parametrize("scale", [30.0, 1e-6])
def test_scores_far_beyond_the_anchors_slack_and_far_within(
    sequences: tuple[tuple[int, int], ...], scale: float
) -> None:
    """They rise and fall by hundreds of powers of two, tile after tile, or differ by nothing."""
    check_attention_kernels(emulated_launcher(), AttentionCase(sequences, scale=scale, num_kv_heads=1))


@pytest.mark.parametrize("rows", [5, 20], ids=["decode", "prefill"])
def test_a_row_has_the_same_bits_with_any_other_rows_in_its_tile(rows: int) -> None:
    """Anchors move row by row."""
    case, spec = AttentionCase(((rows, 120),), scale=2.0, num_kv_heads=1).build()
    whole = run_attention(emulated_launcher(), case, spec)
    alone = case.query.clone()
    alone[1:] *= 0.01
    assert torch.equal(run_attention(emulated_launcher(), replace(case, query=alone), spec)[0], whole[0])


@pytest.mark.parametrize("mask", [{}, {"window": 50}, {"chunk": 48}], ids=["all", "window", "chunk"])
def test_a_prompt_cut_in_chunks_has_the_bits_of_the_whole(mask: dict[str, Any]) -> None:
    """Of chunks that are prefilled: 16 packed rows and fewer are decoded, in other steps."""
    case, spec = AttentionCase(((120, 120),), group=2, num_kv_heads=1, **mask).build()
    whole = run_attention(emulated_launcher(), case, spec)
    for start, stop in ((0, 47), (47, 111), (111, 120)):
        chunk = case.rows(start, stop)
        assert torch.equal(run_attention(emulated_launcher(), chunk, spec), whole[start:stop])


@pytest.mark.parametrize("rows", [1, 20], ids=["decode", "prefill"])
@pytest.mark.parametrize("block", [-1, 10**6])
def test_a_block_that_is_not_there_is_a_fault(rows: int, block: int) -> None:
    case, spec = AttentionCase(((rows, 70),)).build()
    case.batch.block_tables[0, 2] = block
    with pytest.raises(KernelFault, match=r"bounds check: 0 <= block && block < num_blocks"):
        run_attention(emulated_launcher(), case, spec)


@pytest.mark.parametrize("rows", [1, 20], ids=["decode", "prefill"])
def test_a_table_that_is_too_narrow_is_a_fault(rows: int) -> None:
    case, spec = AttentionCase(((rows, 70),)).build()
    tables = case.batch.block_tables[0, :3].reshape(1, 3)  # of stride 3
    narrow = replace(case, batch=replace(case.batch, block_tables=tables))
    with pytest.raises(KernelFault, match=r"bounds check: 0 <= entry && entry < table_width"):
        run_attention(emulated_launcher(), narrow, spec)


MASKS: dict[str, dict[str, Any]] = {
    "all": {},
    "window": {"window": 29},
    "chunk": {"chunk": 32},
    "both": {"window": 60, "chunk": 96},
}
PRODUCT = pairwise_cases(
    {
        "sequences": (RAGGED, ROWS, PROMPTS, ((130, 131), (1, 400))),
        "head_dim": tiles.HEAD_DIMS,
        "dtype": (BF16, FP16),
        "group": (1, 2, 3, 5, 7, 8, 12, 16),
        "block_size": (16, 32, 64),
        "mask": tuple(MASKS),
        "softcap": (None, 2.5),
        "sinks": (False, True),
        "split": (None, 16, 64),
        "schedule": SCHEDULES,
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(PRODUCT)))
def test_every_two_choices_together(index: int) -> None:
    choices = dict(PRODUCT[index])
    schedule: Schedule = choices.pop("schedule")
    case = AttentionCase(**MASKS[choices.pop("mask")], **choices)
    check_attention_kernels(emulated_launcher(schedule), case, seed=index)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", tiles.HEAD_DIMS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("softcap", [None, 2.5])
def test_every_kernel_under_every_schedule(
    head_dim: int, dtype: torch.dtype, mask: str, softcap: float | None
) -> None:
    for sequences in (((1, 350), (2, 33)), ((40, 150),)):
        case = AttentionCase(
            sequences,
            head_dim=head_dim,
            dtype=dtype,
            softcap=softcap,
            num_kv_heads=1,
            split=112,
            sinks=True,
            **MASKS[mask],
        )
        check_under_every_schedule(case)
