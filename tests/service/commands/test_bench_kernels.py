"""`pageturner bench kernels`, with a GPU and without one: emulated kernels, tiny shapes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_timing import FakeCuda, ToldTime
from support.ops import cpu_cache_dir

from pageturner.kernels.cuda.emulation.runtime import EmulatedRuntime
from pageturner.kernels.cuda.ops import CudaOps
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.errors import KernelsUnavailable
from pageturner.service.bench import cuda_kernels, kernels, paper_estimate
from pageturner.service.bench.attention_cases import Inputs, make_inputs
from pageturner.service.cli import EXIT_USER_ERROR, main
from pageturner.service.commands import bench_kernels
from pageturner.service.errors import PageturnerError
from pageturner.service.model import backend

CPU = torch.device("cpu")


def _no_compiler(*_: object) -> dict[str, tuple[int, int]]:
    raise KernelsUnavailable("no NVRTC")


@pytest.fixture(scope="module")
def ops() -> CudaOps:
    return CudaOps(Launcher(EmulatedRuntime.cached(cpu_cache_dir())))


ARGUMENTS = ("bench", "kernels", "--batches", "1,2", "--contexts", "32,64", "--json")


@pytest.fixture
def gpu(ops: CudaOps, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    found = bench_kernels.describe_gpu(CPU, cuda, lambda device: ops)
    monkeypatch.setattr(bench_kernels, "find_gpu", lambda *, wanted: replace(found, stopwatch=ToldTime()))
    monkeypatch.setattr(cuda_kernels, "COPY_BYTES", 1 << 10)
    monkeypatch.setattr(cuda_kernels, "MATMUL_SIZE", 32)
    return cuda


def test_on_a_gpu(gpu: FakeCuda, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plot = tmp_path / "kernels.json", tmp_path / "kernels.png"
    pytest.importorskip("matplotlib")
    assert main([*ARGUMENTS, "--output", str(output), "--plot", str(plot)]) == 0
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
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, calls = make_inputs, iter([True] * 5)

    def failing(*given: Any) -> Inputs:
        if not next(calls, False):
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")
        return plain(*given)

    monkeypatch.setattr(cuda_kernels, "make_inputs", failing)
    assert main(list(ARGUMENTS)) == 1
    document = json.loads(capsys.readouterr().out)
    assert len(document["results"]) == 1
    assert document["stopped"] == "CUDA error: an illegal memory access was encountered"


def test_on_a_gpu_as_text(gpu: FakeCuda, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--batches", "1", "--contexts", "32"]) == 0
    text = capsys.readouterr().out
    assert "this machine: a plain copy" in text
    assert "pageturner, blocks of 16" in text
    assert "not at hand: " in text
    assert "no case decode: fraction of a copy's bandwidth" in " ".join(text.split())


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_estimate, "read_machine_code", lambda cache_dir: _no_compiler)
    monkeypatch.setattr(kernels, "SHAPES", ((1, 1, 32),))


def test_without_a_gpu_the_paper_estimate_is_shown(
    paper: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*ARGUMENTS[:-1], "--device", "cpu", "--gpu", "H200"]
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


def test_files_are_looked_at_before_minutes_are_spent(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(bench_kernels, "find_gpu")
    for option in ("--output", "--plot"):
        assert main([*ARGUMENTS, option, "/no/such/folder/x.png"]) == EXIT_USER_ERROR


def test_what_was_measured_is_shown_though_it_cannot_be_saved(
    gpu: FakeCuda, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ARGUMENTS, "--output", "/dev/full"]) == EXIT_USER_ERROR
    assert json.loads(capsys.readouterr().out)["measured"] is True


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--device", "cpu", "--gpu", "H2000"], "'H2000' is none of A100, H100, H200"),
        (["--contexts", "0"], "'0' is no list of numbers from 1 to 16777216"),
        (["--contexts", "1" + 22 * "0"], "is no list of numbers from 1 to"),
        (
            ["--device", "cpu", "--output", "/no/such/folder/x.json"],
            "--output: /no/such/folder/x.json: there",
        ),
        (["--device", "cpu", "--output", "/dev"], "Is a directory"),
        (
            ["--device", "cpu", "--plot", "/no/such/folder/x.png"],
            "--plot: /no/such/folder/x.png: there is no",
        ),
        (["--device", "cpu", "--plot", "x.xyz"], "--plot: x.xyz is none of .png, .svg, .pdf"),
    ],
)
def test_a_mistake_is_one_line(
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


def test_a_gpu_that_is_asked_for_and_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "gpu_trouble", lambda index: "no driver")
    assert bench_kernels.find_gpu(wanted=False) is None
    with pytest.raises(PageturnerError, match="cuda cannot be used: no driver"):
        bench_kernels.find_gpu(wanted=True)


def test_kernels_that_cannot_be_had_are_named() -> None:
    with pytest.raises(PageturnerError, match=r"CUDA|cuda:99"):
        bench_kernels.make_ops(torch.device("cuda", 99))
