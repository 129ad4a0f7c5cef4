"""As much of CuPy and of torch.cuda as a runtime asks for, without a GPU; what it is asked is kept."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pageturner.kernels.cuda import cupy_runtime
from pageturner.kernels.cuda.compiler import load_nvrtc
from pageturner.kernels.cuda.runtime import Dim3, Struct


@dataclass(frozen=True)
class FakeTorchStream:
    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@dataclass(frozen=True)
class Launch:
    """One launch. argument: the bytes of the struct."""

    kernel: str
    grid: Dim3
    block: Dim3
    argument: bytes
    shared_mem: int
    stream: int
    device: int


@dataclass
class FakeGpu:
    """The machine: change a field to break it. refusal: why its driver loads nothing, if it does not.
    trouble: why it tells nothing of its devices, if it does not. modules: the cubins that were loaded."""

    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    driver: int = 13_020
    runtime: int = 13_020
    num_devices: int = 1
    torch_cuda: str | None = "13.0"
    torch_available: bool = True
    address_holder: int = 0
    refusal: str | None = None
    trouble: str | None = None
    block_shared_bytes: int = 227 * 1024
    current_stream: FakeTorchStream = field(default_factory=lambda: FakeTorchStream(7))
    modules: list[bytes] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    granted_shared_bytes: dict[str, int] = field(default_factory=dict)
    current_device: int = 0
    active_stream: int | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As `cupy`, and as `torch.cuda`. NVRTC stays the real one, imported before its parent is gone."""
        load_nvrtc()

        fake = SimpleNamespace(
            __version__="14.2.0",
            cuda=SimpleNamespace(
                runtime=SimpleNamespace(
                    runtimeGetVersion=lambda: self.runtime,
                    driverGetVersion=lambda: self.driver,
                    getDeviceCount=self._count,
                    getDeviceProperties=self._properties,
                    pointerGetAttributes=lambda address: SimpleNamespace(device=self.address_holder),
                ),
                Device=lambda index: _Device(self, index),
                Stream=_stream_type(self),
            ),
            RawModule=lambda *, path: _Module(self, Path(path)),
        )
        monkeypatch.setitem(sys.modules, "cupy", fake)
        monkeypatch.setattr(torch.version, "cuda", self.torch_cuda)
        for name, answer in {
            "is_available": lambda: self.torch_available,
            "device_count": lambda: self.num_devices,
            "current_device": lambda: 0,
            "get_device_capability": lambda index: self.capability,
            "get_device_name": lambda index: self.name,
            "current_stream": lambda device: self.current_stream,
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(cupy_runtime, "_address_on", lambda device: 0x7F00)

    def _count(self) -> int:
        if self.trouble is not None:
            raise RuntimeError(self.trouble)  # as CuPy's errors of the runtime are
        return self.num_devices

    def _properties(self, index: int) -> Mapping[str, Any]:
        return {
            "name": self.name.encode(),
            "multiProcessorCount": 132,
            "sharedMemPerMultiprocessor": 228 * 1024,
            "sharedMemPerBlockOptin": self.block_shared_bytes,
            "totalGlobalMem": 141 * 10**9,
        }


class _Device:
    def __init__(self, gpu: FakeGpu, index: int) -> None:
        self._gpu, self._index, self._outer = gpu, index, gpu.current_device

    def __enter__(self) -> None:
        self._outer, self._gpu.current_device = self._gpu.current_device, self._index

    def __exit__(self, *raised: object) -> None:
        self._gpu.current_device = self._outer


def _stream_type(gpu: FakeGpu) -> type:
    class Stream:
        def __init__(self, handle: int) -> None:
            self._handle = handle

        @classmethod
        def from_external(cls, stream: FakeTorchStream) -> Stream:
            version, handle = stream.__cuda_stream__()
            assert version == 0
            return cls(handle)

        def __enter__(self) -> None:
            gpu.active_stream = self._handle

        def __exit__(self, *raised: object) -> None:
            gpu.active_stream = None

    return Stream


class _Module:
    """Like CuPy's, it reads the file when the first function is asked for."""

    def __init__(self, gpu: FakeGpu, path: Path) -> None:
        self._gpu, self._path = gpu, path

    def get_function(self, name: str) -> _Kernel:
        if self._gpu.refusal is not None:
            raise RuntimeError(self._gpu.refusal)
        cubin = self._path.read_bytes()
        if cubin not in self._gpu.modules:
            self._gpu.modules.append(cubin)
        assert name.encode() in cubin
        return _Kernel(self._gpu, name)


class _Kernel:
    def __init__(self, gpu: FakeGpu, name: str) -> None:
        self._gpu, self._name = gpu, name

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self._gpu.granted_shared_bytes.get(self._name, 48 * 1024)

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, value: int) -> None:
        self._gpu.granted_shared_bytes[self._name] = value

    def __call__(self, grid: Dim3, block: Dim3, args: tuple[Struct, ...], *, shared_mem: int) -> None:
        gpu, (argument,) = self._gpu, args
        assert shared_mem <= self.max_dynamic_shared_size_bytes, "as the driver would refuse it"
        assert argument.shape == (1,)
        assert gpu.active_stream is not None
        launch = Launch(
            self._name, grid, block, argument.tobytes(), shared_mem, gpu.active_stream, gpu.current_device
        )
        gpu.launches.append(launch)
