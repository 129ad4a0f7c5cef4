"""The benchmark of the kernels, every line of it: emulated kernels, tiny shapes, a clock that is told."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from pageturner.kernels.cuda.emulation.runtime import EmulatedRuntime
from pageturner.kernels.cuda.ops import CudaOps
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.errors import KernelsUnavailable
from pageturner.kernels.layout import AttentionBatch
from pageturner.kernels.ops import AttentionSpec
from pageturner.kernels.torch_ops import TorchOps
from pageturner.service.bench import cuda_kernels, kernels, paper_estimate
from pageturner.service.bench.attention_cases import (
    MODELS,
    Case,
    Heads,
    Inputs,
    cases,
    contiguous,
    make_inputs,
)
from pageturner.service.bench.attention_contenders import (
    Contender,
    NotAtHand,
    Paged,
    Sdpa,
    TritonPaged,
    contenders,
    paged_name,
    sdpa_name,
)
from pageturner.service.bench.cuda_kernels import Machine, Result, Timing, measure_cases, measure_machine
from pageturner.service.bench.kernel_targets import verdicts
from pageturner.service.bench.paper_estimate import (
    GPUS,
    TileInstructions,
    count_instructions,
    estimate,
    kernels_of,
    read_machine_code,
)
from pageturner.service.bench.stopwatch import CudaStopwatch
from pageturner.service.cli import main
from pageturner.service.commands import bench_kernels
from pageturner.service.errors import PageturnerError
from support.ops import cpu_cache_dir

CPU = torch.device("cpu")
TINY = Heads("tiny", 4, 2, 64)


class ToldTime:
    """Every call is run once and took `seconds`."""

    def __init__(self, seconds: float = 1e-3) -> None:
        self.seconds = seconds
        self.num_calls = 0

    def median_seconds(self, call: Callable[[], object]) -> float:
        self.num_calls += 1
        call()
        return self.seconds


def _no_compiler(*_: object) -> dict[str, tuple[int, int]]:
    raise KernelsUnavailable("no NVRTC")


@pytest.fixture(scope="module")
def ops() -> CudaOps:
    return CudaOps(Launcher(EmulatedRuntime.cached(cpu_cache_dir())))


@pytest.mark.parametrize("case", [Case("decode", TINY, 3, 70), Case("prefill", TINY, 1, 130)], ids=str)
def test_everybody_who_takes_part_computes_the_same(ops: CudaOps, case: Case) -> None:
    everybody = contenders(ops)
    (result,) = measure_cases((case,), everybody, CPU, ToldTime(), lambda: 1 << 40)
    assert [timing.contender for timing in result.timings] == [contender.name for contender in everybody]
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

    group: tuple[Contender, ...] = (Greedy(), Paged(ops, 16))
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
    def test_without_vllm_it_is_not_at_hand(self) -> None:
        with pytest.raises(NotAtHand, match="vllm"):
            TritonPaged().prepare(make_inputs(Case("decode", TINY, 1, 20), 16, CPU))

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


@dataclass
class FakeCuda:
    """torch.cuda for the stopwatch: each event is a tick later than the one before."""

    log: list[str] = field(default_factory=list)
    ticks: int = 0

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(L2_cache_size=4096)

    def get_device_name(self, device: torch.device) -> str:
        return "Fake 9000"

    def get_device_capability(self, device: torch.device) -> tuple[int, int]:
        return (9, 0)

    def empty_cache(self) -> None:
        self.log.append("empty")

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return (1 << 30, 1 << 31)

    def _sleep(self, cycles: int) -> None:
        self.log.append("sleep")

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def Event(self, *, enable_timing: bool) -> FakeEvent:  # noqa: N802 - torch's name
        assert enable_timing
        return FakeEvent(self)


@dataclass
class FakeEvent:
    cuda: FakeCuda
    tick: int = -1

    def record(self) -> None:
        self.cuda.ticks += 1
        self.tick = self.cuda.ticks
        self.cuda.log.append("event")

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.cuda.log[-1] == "synchronize"
        return float(end.tick - self.tick)


def test_the_stopwatch_fills_the_cache_waits_and_times_the_call_alone() -> None:
    cuda = FakeCuda()
    stopwatch = CudaStopwatch(CPU, cuda)
    assert stopwatch.median_seconds(lambda: cuda.log.append("call")) == 1e-3
    joined = " ".join(cuda.log)
    assert joined.startswith("call call call sleep event call event synchronize")
    assert joined.count("sleep event call event") == 1 + 50  # one to see how long, then the most


def test_the_machine_is_measured_by_a_copy_and_a_product() -> None:
    machine = measure_machine(CPU, ToldTime(0.5), copy_bytes=1000, matmul_size=32)
    assert machine == Machine(copy_bandwidth=4000.0, matmul_flops=4 * 32**3)


class TestTargets:
    MACHINE = Machine(copy_bandwidth=4e12, matmul_flops=700e12)
    LARGE = Case("decode", MODELS[1], 64, 8192)
    PROMPT = Case("prefill", MODELS[1], 1, 8192)

    def result(self, case: Case, rate: float, large_blocks: float = 1.0, gathered: float = 2.0) -> Result:
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

    def test_all_met(self) -> None:
        results = [self.result(self.LARGE, 3.5e12), self.result(self.PROMPT, 310e12)]
        found = verdicts(results, self.MACHINE, (9, 0))
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
    def test_each_is_missed_by_its_own_figure(self, index: int, changes: dict[str, float]) -> None:
        results = [self.result(self.LARGE, **changes), self.result(self.PROMPT, 310e12)]
        found = verdicts(results, self.MACHINE, (9, 0))
        assert [verdict.met for verdict in found] == [place != index for place in range(4)]
        assert found[index].worst == str(self.LARGE)

    def test_prefill_has_a_figure_on_hopper_only(self) -> None:
        results = [self.result(self.PROMPT, 200e12)]
        assert verdicts(results, self.MACHINE, (9, 0))[1].met is False
        assert verdicts(results, self.MACHINE, (8, 0))[1].met is None

    def test_small_calls_are_not_held_to_bandwidth(self) -> None:
        small = replace(self.LARGE, batch=1, context=128)
        assert verdicts([self.result(small, 1e9)], self.MACHINE, (9, 0))[0].met is None


class TestPaper:
    INSTRUCTIONS = TileInstructions({v.expression: (1000, 3000) for v in kernels_of(MODELS)}, "a test")

    def test_decode_counts_each_key_tile_of_each_kv_head_once(self) -> None:
        found = estimate(Case("decode", MODELS[1], 3, 33), GPUS["H200"], self.INSTRUCTIONS)
        assert found.warp_tiles == 3 * 8 * 3
        moved = 3 * 33 * 8 * 128 * 2 * 2 + 3 * 32 * 128 * 2 * 2
        assert found.memory == pytest.approx(moved / 4.8e12)
        assert found.issue == pytest.approx(72 * 1000 / (132 * 4 * 1.98e9))
        assert found.issue_of_all == pytest.approx(3 * found.issue)

    def test_prefill_counts_the_turns_that_its_row_tiles_take(self) -> None:
        """Row by row, by the definition of the tiles, against the closed form."""
        case, gpu = Case("prefill", MODELS[1], 2, 100), GPUS["A100"]
        rows, keys, group, warps = 128, 32, 4, 4
        turns = 0
        for first in range(0, 100 * group, rows):
            last_position = (min(first + rows, 100 * group) - 1) // group
            turns += len({position // keys for position in range(last_position + 1)})
        found = estimate(case, gpu, self.INSTRUCTIONS)
        assert found.warp_tiles == 2 * 8 * warps * turns
        assert found.products * gpu.tensor_flops >= case.flops  # masked products are products, too
        assert found.seconds == max(found.memory, found.issue, found.products)

    def test_without_a_compiler_the_budgets_stand_in(self) -> None:
        found = count_instructions(kernels_of(MODELS), "sm_90", _no_compiler)
        assert "budgets" in found.source
        assert "no NVRTC" in found.source
        assert min(found.by_expression.values()) > (100, 100)


@pytest.mark.slow
def test_instructions_are_counted_in_the_machine_code(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    counted = count_instructions(kernels_of(MODELS), "sm_90", read_machine_code(tmp_path))
    allowed = count_instructions(kernels_of(MODELS), "sm_90", _no_compiler)
    assert counted.source == "counted in the machine code for sm_90, on the shortest path and on all"
    for expression, (_, most) in allowed.by_expression.items():
        shortest, all_paths = counted.by_expression[expression]
        assert 50 < shortest <= all_paths <= most
        assert all_paths > most / 2


class TestCommand:
    ARGUMENTS = ("bench", "kernels", "--batches", "1,2", "--contexts", "32,64", "--json")

    @pytest.fixture
    def gpu(self, ops: CudaOps, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        cuda = FakeCuda()
        found = bench_kernels.describe_gpu(CPU, cuda, lambda device: ops)
        monkeypatch.setattr(bench_kernels, "find_gpu", lambda *, wanted: replace(found, stopwatch=ToldTime()))
        monkeypatch.setattr(cuda_kernels, "COPY_BYTES", 1 << 10)
        monkeypatch.setattr(cuda_kernels, "MATMUL_SIZE", 32)
        return cuda

    def test_on_a_gpu(self, gpu: FakeCuda, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        output, plot = tmp_path / "kernels.json", tmp_path / "kernels.png"
        pytest.importorskip("matplotlib")
        assert main([*self.ARGUMENTS, "--output", str(output), "--plot", str(plot)]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document == json.loads(output.read_text())
        assert plot.read_bytes().startswith(b"\x89PNG")
        assert document["measured"] is True
        assert document["origin"]["device"] == "Fake 9000"
        assert document["origin"]["command"].startswith("pageturner ")
        assert len(document["results"]) == 2 * (2 * 2 + 2)
        ours = document["results"][0]["timings"][0]
        assert ours["rate"] == pytest.approx(document["results"][0]["bytes_moved"] / ours["seconds"])
        assert "empty" in gpu.log

    def test_what_was_measured_before_the_device_failed_is_kept(
        self, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        plain, calls = make_inputs, iter([True] * 5)

        def failing(*given: Any) -> Inputs:
            if not next(calls, False):
                raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")
            return plain(*given)

        monkeypatch.setattr(cuda_kernels, "make_inputs", failing)
        assert main(list(self.ARGUMENTS)) == 1
        document = json.loads(capsys.readouterr().out)
        assert len(document["results"]) == 1
        assert document["stopped"] == "CUDA error: an illegal memory access was encountered"

    def test_on_a_gpu_as_text(self, gpu: FakeCuda, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "kernels", "--batches", "1", "--contexts", "32"]) == 0
        text = capsys.readouterr().out
        assert "this machine: a plain copy" in text
        assert "pageturner, blocks of 16" in text
        assert "not at hand: " in text
        assert "no case decode: fraction of a copy's bandwidth" in " ".join(text.split())

    @pytest.fixture
    def paper(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(paper_estimate, "read_machine_code", lambda cache_dir: _no_compiler)
        monkeypatch.setattr(kernels, "SHAPES", ((1, 1, 32),))

    def test_without_a_gpu(self, paper: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = [*self.ARGUMENTS[:-1], "--device", "cpu", "--gpu", "H200"]
        assert main(arguments) == 0
        text = capsys.readouterr().out
        assert text.startswith("PAPER ESTIMATE for one H200: nothing below was measured on a GPU.")
        assert "MEASURED on this machine's CPU" in text
        pytest.importorskip("matplotlib")
        plot = tmp_path / "paper.svg"
        assert main([*arguments, "--json", "--plot", str(plot)]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["measured"] is False
        assert len(document["estimates"]) == 12
        assert "<svg" in plot.read_text()

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            (["--device", "cpu", "--gpu", "H2000"], "'H2000' is none of A100, H100, H200"),
            (["--contexts", "0"], "'0' is no list of numbers above 0"),
            (["--device", "cpu", "--output", "/no/such/folder/x.json"], "/no/such/folder/x.json"),
        ],
    )
    def test_a_mistake_is_one_line(
        self,
        paper: None,
        arguments: list[str],
        error: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        try:
            code = main(["bench", "kernels", "--batches", "1", "--contexts", "32", *arguments])
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
        assert code != 0
        assert error in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_asked_for_and_not_there_is_named() -> None:
    assert bench_kernels.find_gpu(wanted=False) is None
    with pytest.raises(PageturnerError, match="cuda cannot be used"):
        bench_kernels.find_gpu(wanted=True)
    with pytest.raises(PageturnerError):
        bench_kernels.make_ops(torch.device("cuda", 0))


def test_the_cases_are_those_of_the_issue() -> None:
    found = list(cases())
    assert len(found) == 2 * (9 * 9 + 9)
    assert max(case.context for case in found) == 32768
    assert max(case.batch for case in found) == 256
