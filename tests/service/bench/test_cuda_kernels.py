"""The benchmark of the kernels: emulated kernels, tiny shapes, a clock that is told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from support.fake_timing import FakeCuda, ToldTime
from support.ops import cpu_cache_dir

from pageturner.kernels.cuda.emulation.runtime import EmulatedRuntime
from pageturner.kernels.cuda.ops import CudaOps
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.layout import AttentionBatch
from pageturner.kernels.torch_ops import TorchOps
from pageturner.service.bench.attention_cases import Case, Heads, Inputs, cases, contiguous, make_inputs
from pageturner.service.bench.attention_contenders import (
    AttentionContender,
    NotAtHand,
    Paged,
    Sdpa,
    TritonPaged,
    contenders,
    paged_name,
    sdpa_name,
)
from pageturner.service.bench.cuda_kernels import BenchMachine, measure_cases, measure_machine
from pageturner.service.bench.stopwatch import CudaStopwatch

CPU = torch.device("cpu")
TINY = Heads("tiny", 4, 2, 64)


@pytest.fixture(scope="module")
def ops() -> CudaOps:
    return CudaOps(Launcher(EmulatedRuntime.cached(cpu_cache_dir())))


@pytest.mark.parametrize("case", [Case("decode", TINY, 3, 70), Case("prefill", TINY, 1, 130)], ids=str)
def test_all_contenders_compute_the_same(ops: CudaOps, case: Case) -> None:
    compared = contenders(ops)
    (result,) = measure_cases((case,), compared, CPU, ToldTime(), lambda: 1 << 40)
    assert [timing.contender for timing in result.timings] == [contender.name for contender in compared]
    took_part = {timing.contender for timing in result.timings if timing.seconds is not None}
    assert {paged_name(16), paged_name(64), sdpa_name("flash", gathers=True)} <= took_part
    for timing in result.timings:
        if timing.seconds is None:
            assert timing.why_not
        else:
            assert timing.difference is not None
            assert timing.difference < 0.03


def test_a_contender_that_is_wrong_shows(ops: CudaOps) -> None:
    @dataclass(frozen=True)
    class Wrong:
        name: str = "wrong"
        block_size: int = 16

        def prepare(self, inputs: Inputs) -> Callable[[], torch.Tensor]:
            return lambda: torch.zeros_like(inputs.query)

    case = Case("decode", TINY, 2, 40)
    (result,) = measure_cases((case,), (Paged(ops, 16), Wrong()), CPU, ToldTime(), lambda: 1 << 40)
    assert result.timings[1].difference is not None
    assert result.timings[1].difference > 0.1


def test_a_case_that_does_not_fit_is_skipped_and_says_so(ops: CudaOps) -> None:
    case = Case("decode", TINY, 2, 40)
    clock = ToldTime()
    (result,) = measure_cases((case,), contenders(ops), CPU, clock, lambda: case.memory_bytes - 1)
    assert result.timings == ()
    assert result.skipped is not None
    assert "are free" in result.skipped
    assert clock.num_calls == 0


def test_running_out_of_memory_is_the_contenders_own(ops: CudaOps) -> None:
    @dataclass(frozen=True)
    class Greedy:
        name: str = "greedy"
        block_size: int = 16

        def prepare(self, inputs: Inputs) -> Callable[[], torch.Tensor]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    group: tuple[AttentionContender, ...] = (Greedy(), Paged(ops, 16))
    (result,) = measure_cases((Case("decode", TINY, 1, 20),), group, CPU, ToldTime(), lambda: 1 << 40)
    assert result.timings[0].why_not == "CUDA out of memory"
    assert result.timings[1].seconds is not None


def test_inputs_of_any_block_size_gather_into_what_the_tables_say() -> None:
    for block_size in (16, 64):
        inputs = make_inputs(Case("decode", TINY, 3, 70), block_size, CPU)
        _, keys, values = contiguous(inputs)
        assert keys.shape == values.shape == (3, 2, 70, 64)
        block = inputs.batch.block_tables[1, 69 // block_size]
        for side, gathered in ((0, keys), (1, values)):
            assert torch.equal(gathered[1, :, 69], inputs.kv_layer[block, side, :, 69 % block_size])


def test_what_sdpa_cannot_do_is_told_by_its_own_reason() -> None:
    inputs = make_inputs(Case("decode", TINY, 1, 20), 16, CPU)
    with pytest.raises(NotAtHand, match=r"\w+"):
        Sdpa("cudnn", gathers=True).prepare(inputs)()


def test_sdpa_is_not_asked_for_more_than_it_can_address() -> None:
    inputs = make_inputs(Case("decode", TINY, 1, 20), 16, CPU)
    huge = replace(inputs, kv_layer=torch.empty(2**21, 2, 8, 16, 64, device="meta", dtype=torch.bfloat16))
    with pytest.raises(NotAtHand, match="2\\^31"):
        Sdpa("flash", gathers=False).prepare(huge)


class TestTriton:
    def test_without_vllm_its_contender_is_unavailable(self) -> None:
        with pytest.raises(NotAtHand, match="vllm"):
            TritonPaged().prepare(make_inputs(Case("decode", TINY, 1, 20), 16, CPU))

    def test_a_vllm_with_another_signature_counts_as_unavailable(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = ModuleType("triton_unified_attention")
        module.__dict__["unified_attention"] = lambda query, key_cache: None
        monkeypatch.setitem(sys.modules, "vllm.v1.attention.ops.triton_unified_attention", module)
        call = TritonPaged().prepare(make_inputs(Case("decode", TINY, 1, 20), 16, CPU))
        with pytest.raises(NotAtHand, match=r"TypeError: .* unexpected keyword argument"):
            call()

    def test_it_gets_tokens_before_heads_and_the_tables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A stand-in that takes vLLM's arguments by name and attends by the definition."""

        def unified_attention(**given: Any) -> None:
            kv_layer = torch.stack((given["k"], given["v"]), dim=1).transpose(2, 3)
            starts, lengths = given["cu_seqlens_q"], given["seqused_k"]
            batch = AttentionBatch(
                query_start_loc=starts,
                seq_lens=lengths,
                block_tables=given["block_table"],
                slot_mapping=torch.full((len(given["q"]),), -1),
                positions=torch.zeros(len(given["q"]), dtype=torch.int64),
                max_query_len=given["max_seqlen_q"],
                max_seq_len=given["max_seqlen_k"],
            )
            spec = AttentionSpec(given["softmax_scale"])
            given["out"].copy_(TorchOps().attention(given["q"], kv_layer.contiguous(), batch, spec))
            assert given["softmax_segm_output"].shape[1:] == (4, 16, 64)
            assert given["softmax_segm_max"].shape == given["softmax_segm_output"].shape[:3]

        module = ModuleType("triton_unified_attention")
        module.__dict__["unified_attention"] = unified_attention
        monkeypatch.setitem(sys.modules, "vllm.v1.attention.ops.triton_unified_attention", module)
        inputs = make_inputs(Case("decode", TINY, 3, 70), 16, CPU)
        expected = TorchOps().attention(inputs.query, inputs.kv_layer, inputs.batch, inputs.spec)
        assert torch.equal(TritonPaged().prepare(inputs)(), expected)


def test_the_stopwatch_fills_the_cache_waits_and_times_the_call_alone() -> None:
    cuda = FakeCuda()
    stopwatch = CudaStopwatch(CPU, cuda)
    assert stopwatch.median_seconds(lambda: cuda.log.append("call")) == 1e-3
    joined = " ".join(cuda.log)
    assert joined.startswith("call call call sleep event call event synchronize")
    assert joined.count("sleep event call event") == 1 + 50  # one to see how long, then the most


def test_the_machine_is_measured_by_a_copy_and_a_product() -> None:
    machine = measure_machine(CPU, ToldTime(0.5), copy_bytes=1000, matmul_size=32)
    assert machine == BenchMachine(copy_bandwidth=4000.0, matmul_flops=4 * 32**3)


def test_the_cases_are_those_of_the_issue() -> None:
    found = list(cases())
    assert len(found) == 2 * (9 * 9 + 9)
    assert max(case.context for case in found) == 32768
    assert max(case.batch for case in found) == 256
