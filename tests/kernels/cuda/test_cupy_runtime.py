"""The runtime of a GPU, here with a CuPy that keeps what it is told; its refusals; and CuPy's own names."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.fake_cupy import FakeGpu, FakeTorchStream
from support.kernel_sources import write_sources

from pageturner.kernels.cuda.compiler import Compiler, load_nvrtc
from pageturner.kernels.cuda.cupy_runtime import CupyRuntime, Gpu, probe_gpu
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.cuda.variants import Variant
from pageturner.kernels.errors import KernelsUnavailable

CUDA = torch.device("cuda", 0)


class DoubledArguments(ctypes.Structure):
    _fields_ = (("values", ctypes.c_void_p), ("count", ctypes.c_int32))


FLOATS = Variant("doubled.cu", "doubled<float>", 64, 0, DoubledArguments)
INTS = replace(FLOATS, expression="doubled<int>", shared_bytes=96 * 1024)


def struct(address: int, count: int) -> DoubledArguments:
    """Not one of the kernels', but launched as they are."""
    return DoubledArguments(address, count)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    return gpu


@pytest.fixture
def runtime(gpu: FakeGpu, tmp_path: Path) -> CupyRuntime:
    return CupyRuntime(CUDA, Compiler(tmp_path / "cache", sources=write_sources(tmp_path / "sources")))


def test_what_the_gpu_is(runtime: CupyRuntime) -> None:
    assert runtime.gpu == Gpu(
        name="NVIDIA H200",
        capability=(9, 0),
        num_multiprocessors=132,
        multiprocessor_shared_bytes=228 * 1024,
        block_shared_bytes=227 * 1024,
        memory_bytes=141 * 10**9,
        driver=(13, 2),
    )
    assert runtime.gpu.arch == "sm_90"
    assert (runtime.name, runtime.device, runtime.num_multiprocessors) == ("cuda", CUDA, 132)


def test_a_device_without_a_number_is_the_current_one(gpu: FakeGpu, tmp_path: Path) -> None:
    assert CupyRuntime(torch.device("cuda"), Compiler(tmp_path)).device == CUDA


def test_a_launch_reaches_the_kernel_by_value(runtime: CupyRuntime, gpu: FakeGpu) -> None:
    Launcher(runtime).launch(FLOATS, (3, 2, 1), struct(0x1234, 5))
    (launch,) = gpu.launches
    assert (launch.grid, launch.block, launch.shared_mem) == ((3, 2, 1), (64, 1, 1), 0)
    assert launch.argument == bytes(DoubledArguments(0x1234, 5))
    assert "doubled" in launch.kernel
    assert (launch.stream, launch.device) == (7, 0)


def test_the_stream_is_sampled_at_every_launch(runtime: CupyRuntime, gpu: FakeGpu) -> None:
    launcher = Launcher(runtime)
    launcher.prepare((FLOATS,))
    for handle in (11, 12, 11):
        gpu.current_stream = FakeTorchStream(handle)
        launcher.launch(FLOATS, (1, 1, 1), struct(1, 1))
    assert [launch.stream for launch in gpu.launches] == [11, 12, 11]
    assert gpu.active_stream is None


def test_a_file_is_one_module(runtime: CupyRuntime, gpu: FakeGpu) -> None:
    kernels = runtime.load((FLOATS, INTS))
    assert set(kernels) == {FLOATS, INTS}
    assert len(gpu.modules) == 1


def test_nothing_to_load(runtime: CupyRuntime, gpu: FakeGpu) -> None:
    assert runtime.load(()) == {}


def test_more_shared_memory_is_asked_for_once_it_is_needed(runtime: CupyRuntime, gpu: FakeGpu) -> None:
    launcher = Launcher(runtime)
    launcher.prepare((FLOATS, INTS))
    assert list(gpu.granted_shared_bytes.values()) == [96 * 1024]
    launcher.launch(INTS, (1, 1, 1), struct(1, 1))
    assert gpu.launches[0].shared_mem == 96 * 1024


def test_more_shared_memory_than_there_is(gpu: FakeGpu, tmp_path: Path) -> None:
    gpu.block_shared_bytes = 64 * 1024
    runtime = CupyRuntime(CUDA, Compiler(tmp_path))
    with pytest.raises(
        KernelsUnavailable, match=r"doubled<int> needs 98304 bytes .* NVIDIA H200 gets .* 65536"
    ):
        runtime.load((INTS,))
    assert not gpu.modules


def test_a_driver_that_refuses_the_machine_code(runtime: CupyRuntime, gpu: FakeGpu) -> None:
    """As one that is older than the compiler may: at start-up, where the service can still fall back."""
    gpu.refusal = "CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image is available for execution on the device"
    with pytest.raises(KernelsUnavailable, match=r"NVIDIA H200 refuses .*doubled\.cu: CUDA_ERROR_NO_BINARY"):
        runtime.load((FLOATS,))


def change(**fields: object) -> Callable[[FakeGpu], FakeGpu]:
    return lambda gpu: replace(gpu, **fields)  # type: ignore[arg-type]  # fields of several types


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (change(driver=0), "no CUDA driver is loaded"),
        (change(driver=12_080), r"the driver supports CUDA 12\.8, CuPy 14\.2\.0 needs 13\.0: update"),
        (change(torch_cuda=None), r"torch .* is a build for the CPU"),
        (change(torch_available=False), "finds no CUDA device"),
        (change(num_devices=0), "there is no cuda:0"),
        (
            change(trouble="cudaErrorInitializationError: driver error\nand more"),
            "^CUDA cannot be used: cudaErrorInitializationError: driver error$",
        ),
        (change(capability=(7, 5)), r"NVIDIA H200 has compute capability 7\.5; needed: 8\.0 or newer"),
        (change(address_holder=1), r"torch's cuda:0 is device 1 to CuPy"),
    ],
)
def test_what_is_missing_or_too_old_is_named(
    broken: Callable[[FakeGpu], FakeGpu], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(FakeGpu()).install(monkeypatch)
    with pytest.raises(KernelsUnavailable, match=reason):
        probe_gpu(CUDA)


def test_an_old_torch_or_cupy_shares_no_streams(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda.Stream, "__cuda_stream__")
    with pytest.raises(KernelsUnavailable, match="do not share streams"):
        probe_gpu(CUDA)


def test_a_device_of_another_kind(gpu: FakeGpu) -> None:
    with pytest.raises(KernelsUnavailable, match="cpu is no CUDA device"):
        probe_gpu(torch.device("cpu"))


def test_without_cupy_the_probe_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(KernelsUnavailable, match=r"CuPy cannot be imported .*pageturner\[cuda13\]"):
        probe_gpu(CUDA)


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        ("raise ImportError('====\\nFailed to import CuPy.') from ImportError('libcudart.so.13: absent')",
         r"\(libcudart\.so\.13: absent\)"),
        ("raise ValueError('numpy.dtype size changed')", r"\(numpy\.dtype size changed\)"),
        ("raise AttributeError", r"\(AttributeError\)"),
        ("import nothing_of_this_name", r"\(No module named 'nothing_of_this_name'\)"),
    ],
)  # fmt: skip
def test_a_cupy_that_fails_to_import_is_named_with_its_reason(
    raised: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its page of advice is left out; what stopped it is not."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "cupy.py").write_text(raised)
    monkeypatch.syspath_prepend(tmp_path)
    for ask in (load_nvrtc, lambda: probe_gpu(CUDA)):
        with pytest.raises(KernelsUnavailable, match=f"^CuPy cannot be imported {shown}; pip install .*$"):
            ask()


def test_cupy_imports_only_where_it_can_write(tmp_path: Path) -> None:
    """It makes its cache's folder on import. In a container whose home is read-only, a variable helps."""
    environment = os.environ | {"HOME": os.devnull}
    environment.pop("CUPY_CACHE_DIR", None)
    needed = "CuPy needs a folder to write in .*; name one in CUPY_CACHE_DIR"
    assert re.search(needed, run_load_nvrtc(environment))
    assert run_load_nvrtc(environment | {"CUPY_CACHE_DIR": str(tmp_path)}) == ""


def run_load_nvrtc(environment: dict[str, str]) -> str:
    """What a fresh process says of it."""
    program = "from pageturner.kernels.cuda.compiler import load_nvrtc; load_nvrtc()"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stderr


def test_nowhere_to_put_machine_code(
    runtime: CupyRuntime, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(KernelsUnavailable, match=r"machine code of doubled\.cu cannot be put in a file"):
        runtime.load((FLOATS,))
    assert not gpu.modules


def test_any_machine_says_why_it_lacks_the_hundredth_gpu() -> None:
    """By the real CuPy and torch."""
    with pytest.raises(KernelsUnavailable, match=r"driver|build for the CPU|no CUDA device|no cuda:99"):
        probe_gpu(torch.device("cuda", 99))


def test_the_real_cupy_has_the_names_that_the_fake_one_has() -> None:
    import cupy

    for name in ("runtimeGetVersion", "driverGetVersion", "getDeviceCount", "getDeviceProperties"):
        assert callable(getattr(cupy.cuda.runtime, name))
    assert callable(cupy.cuda.runtime.pointerGetAttributes)
    assert "device" in dir(cupy.cuda.runtime.PointerAttributes)
    assert callable(cupy.cuda.Stream.from_external)
    for manager in (cupy.cuda.Device, cupy.cuda.Stream):
        assert hasattr(manager, "__enter__")
    assert callable(cupy.RawModule.get_function)
    assert hasattr(cupy.RawKernel, "max_dynamic_shared_size_bytes")
    module = cupy.RawModule(path="/no/such/file")  # lazy: the file is opened by get_function
    assert module.file_path == "/no/such/file"
