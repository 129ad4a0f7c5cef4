"""coded_decode, coded_prefill and coded_write_kv, emulated, against the definition."""

from __future__ import annotations

import math

import pytest
import torch
from support.coded import check_coded_writes, same_bytes
from support.coded_kernels import BF16, FP8, FP16, INT8, CodedCase, check_coded_kernels, run_coded
from support.cuda_cases import cuda_ops, gpu_launcher
from support.emulation import emulated_launcher
from support.paged import make_case

from pageturner.kernels.cuda.emulation.schedule import SCHEDULES
from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.layout import KvLayout

BOUNDED = AttentionSpec(scale=0.3, sliding_window=139, logit_softcap=3.0)
RAGGED = ((1, 1), (1, 15), (1, 17), (3, 90), (1, 350))
PROMPTS = ((40, 40), (33, 150), (1, 9))
CASES = {
    "decode": CodedCase(RAGGED, INT8),
    "decode-window": CodedCase(RAGGED, FP8, FP16, 128, group=5, block_size=32, spec=BOUNDED),
    "prefill": CodedCase(PROMPTS, FP8),
    "prefill-window": CodedCase(((70, 210),), INT8, FP16, 128, block_size=64, spec=BOUNDED),
}
MORE_CASES = {
    f"{kind}-{head_dim}-{code}": CodedCase(sequences, code, head_dim=head_dim, group=2)
    for kind, sequences in (("decode", RAGGED), ("prefill", ((33, 200),)))
    for head_dim in (96, 256)
    for code in (INT8, FP8)
}


@pytest.mark.parametrize("name", CASES)
def test_attention_over_codes_under_every_schedule(name: str) -> None:
    expected = check_coded_kernels(emulated_launcher(), CASES[name])
    for schedule in SCHEDULES[1:]:
        assert torch.equal(run_coded(emulated_launcher(schedule), CASES[name])[0], expected), schedule


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES | MORE_CASES)
def test_attention_over_codes_on_a_gpu(name: str) -> None:
    check_coded_kernels(gpu_launcher(), (CASES | MORE_CASES)[name])


@pytest.mark.gpu
@pytest.mark.parametrize("code", [INT8, FP8], ids=["int8", "fp8"])
def test_writes_of_codes_on_a_gpu(code: torch.dtype) -> None:
    check_coded_writes(cuda_ops(gpu_launcher()), KvLayout(2, 2, 64, 16, code), BF16)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_CASES)
def test_attention_over_codes_at_other_widths(name: str) -> None:
    check_coded_kernels(emulated_launcher(), MORE_CASES[name])


@pytest.mark.parametrize("code", [INT8, FP8], ids=["int8", "fp8"])
def test_writes_have_the_bits_of_the_definition(code: torch.dtype) -> None:
    for head_dim, block_size in ((64, 16), (80, 32), (256, 16)):
        check_coded_writes(cuda_ops(emulated_launcher()), KvLayout(2, 2, head_dim, block_size, code), BF16)


@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_a_token_that_is_no_number_changes_its_own_sequence_alone(part: int) -> None:
    ops, layout = cuda_ops(emulated_launcher()), KvLayout(1, 1, 64, 16, INT8)
    case = make_case([(1, 40), (1, 30), (1, 20)], layout=layout, num_heads=3, row_dtype=BF16)
    clean = ops.attention(case.query, case.kv_layer, case.batch, AttentionSpec(scale=0.2))
    rows = torch.zeros(2, 3, 1, 64, dtype=BF16)
    rows[part, 1, 0, 5] = math.inf
    before = case.kv_layer.clone()
    ops.write_kv(rows[0], rows[1], case.kv_layer, case.batch)
    for sequence in (0, 2):  # as they were
        block = int(case.batch.block_tables[sequence, (case.batch.seq_lens[sequence] - 1) // 16])
        case.kv_layer[block] = before[block]
    result = ops.attention(case.query, case.kv_layer, case.batch, AttentionSpec(scale=0.2))
    assert not torch.isfinite(result[1]).any()
    assert torch.equal(result[0], clean[0])
    assert torch.equal(result[2], clean[2])


def test_copies_and_swaps_take_scales_along() -> None:
    ops, layout = cuda_ops(emulated_launcher()), KvLayout(2, 2, 64, 16, FP8)
    pool = torch.empty(layout.pool_shape(6), dtype=FP8)
    pool.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(1))
    expected, host = pool.clone(), torch.empty_like(pool)
    ops.copy_blocks(pool, [(0, 1), (1, 2)])
    assert same_bytes(pool[1], expected[0])
    assert same_bytes(pool[2], expected[1])
    ops.transfer_blocks(pool, host, [(2, 5), (4, 0)])
    assert same_bytes(host[5], pool[2])
    assert same_bytes(host[0], pool[4])
