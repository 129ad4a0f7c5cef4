"""The kernels on a GPU: loaded and launched by CuPy, on memory and streams that are torch's.

CuPy allocates nothing here. A kernel's arguments are addresses of torch tensors in a struct, its machine code
comes from `Compiler`, and its stream is torch's current one.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from pageturner.kernels.cuda.compiler import Compiled, Compiler, import_cupy, reason_of
from pageturner.kernels.cuda.runtime import Dim3, Kernel, Struct
from pageturner.kernels.cuda.variants import Variant
from pageturner.kernels.errors import KernelsUnavailable

OLDEST_CAPABILITY = (8, 0)
"""Ampere: the first with cp.async, and with bfloat16 in its tensor cores."""
ALWAYS_GRANTED_SHARED_BYTES = 48 * 1024
"""Dynamic shared memory that a launch gets without asking for more beforehand."""
_MODULE_NAME_DIGITS = 32


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device that the kernels run on. capability: (9, 0) for sm_90. driver: the CUDA version that it
    supports, such as (13, 2). *_bytes: of one multiprocessor, of one block, and of the whole memory."""

    name: str
    capability: tuple[int, int]
    num_multiprocessors: int
    multiprocessor_shared_bytes: int
    block_shared_bytes: int
    memory_bytes: int
    driver: tuple[int, int]

    @property
    def arch(self) -> str:
        return "sm_{}{}".format(*self.capability)


def probe_gpu(device: torch.device) -> Gpu:
    """What `device` is. Raises KernelsUnavailable with the reason where the kernels can't run on it."""
    cupy = import_cupy()
    try:
        return _probe(cupy, device)
    except KernelsUnavailable:
        raise
    except (AssertionError, OSError, RuntimeError) as error:  # as torch and CuPy tell of what CUDA refuses
        raise KernelsUnavailable(f"CUDA cannot be used: {reason_of(error)}") from error


def _probe(cupy: Any, device: torch.device) -> Gpu:
    runtime = cupy.cuda.runtime
    needed, driver = _version(runtime.runtimeGetVersion()), _version(runtime.driverGetVersion())
    if driver == (0, 0):
        raise KernelsUnavailable("no CUDA driver is loaded: no NVIDIA GPU here, or no driver for it")
    if driver[0] < needed[0]:
        raise KernelsUnavailable(
            f"the driver supports CUDA {driver[0]}.{driver[1]}, CuPy {cupy.__version__} needs {needed[0]}.0: "
            "update the driver"
        )
    if torch.version.cuda is None:
        raise KernelsUnavailable(f"torch {torch.__version__} is a build for the CPU; install one for CUDA")
    if not torch.cuda.is_available():
        raise KernelsUnavailable(f"torch {torch.__version__} finds no CUDA device that it can use")
    if not hasattr(cupy.cuda.Stream, "from_external") or not hasattr(torch.cuda.Stream, "__cuda_stream__"):
        raise KernelsUnavailable(
            f"CuPy {cupy.__version__} and torch {torch.__version__} do not share streams by the CUDA stream "
            "protocol; install a newer one (CuPy has it from 14.0 on)"
        )
    index = _index(device)
    count = min(torch.cuda.device_count(), runtime.getDeviceCount())
    if index >= count:
        raise KernelsUnavailable(f"there is no cuda:{index}: torch and CuPy both see {count} device(s)")
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST_CAPABILITY:
        raise KernelsUnavailable(
            f"{torch.cuda.get_device_name(index)} has compute capability {capability[0]}.{capability[1]}; "
            f"needed: {OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} or newer"
        )
    # One driver numbers the devices for both. Asked all the same: a launch on another device's memory is a
    # fault that shows far from here.
    holder = runtime.pointerGetAttributes(_address_on(device)).device
    if holder != index:
        raise KernelsUnavailable(f"torch's cuda:{index} is device {holder} to CuPy")
    properties = runtime.getDeviceProperties(index)
    return Gpu(
        name=torch.cuda.get_device_name(index),
        capability=capability,
        num_multiprocessors=int(properties["multiProcessorCount"]),
        multiprocessor_shared_bytes=int(properties["sharedMemPerMultiprocessor"]),
        block_shared_bytes=int(properties["sharedMemPerBlockOptin"]),
        memory_bytes=int(properties["totalGlobalMem"]),
        driver=driver,
    )


class CupyRuntime:
    """`Runtime` on a GPU. Raises KernelsUnavailable where `probe_gpu` does."""

    name = "cuda"

    def __init__(self, device: torch.device, compiler: Compiler) -> None:
        self.gpu = probe_gpu(device)
        self._cupy = import_cupy()
        self._device = torch.device("cuda", _index(device))
        self._compiler = compiler

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def num_multiprocessors(self) -> int:
        return self.gpu.num_multiprocessors

    def load(self, variants: Sequence[Variant]) -> Mapping[Variant, Kernel]:
        for variant in variants:
            if variant.shared_bytes > self.gpu.block_shared_bytes:
                raise KernelsUnavailable(
                    f"{variant.expression} needs {variant.shared_bytes} bytes of shared memory, "
                    f"a block of {self.gpu.name} gets at most {self.gpu.block_shared_bytes}"
                )
        by_source = {
            source: tuple(group) for source, group in groupby(sorted(variants, key=_source), key=_source)
        }
        with ThreadPoolExecutor(max_workers=len(by_source) or 1) as pool:
            compiled = pool.map(self._compile, by_source.items())
            loaded = dict[Variant, Kernel]()
            for (source, group), result in zip(by_source.items(), compiled, strict=True):
                try:
                    loaded.update(self._load(group, result))
                except RuntimeError as error:  # CuPy's errors of the driver are
                    raise KernelsUnavailable(
                        f"the driver of {self.gpu.name} refuses the kernels of {source}: {reason_of(error)}"
                    ) from error
                except OSError as error:
                    raise KernelsUnavailable(
                        f"the machine code of {source} cannot be put in a file for CuPy: {reason_of(error)}"
                    ) from error
        return loaded

    def _compile(self, group: tuple[str, tuple[Variant, ...]]) -> Compiled:
        source, variants = group
        expressions = tuple(variant.expression for variant in variants)
        return self._compiler.compile(source, expressions, self.gpu.arch)

    def _load(self, variants: Sequence[Variant], compiled: Compiled) -> dict[Variant, Kernel]:
        kernels = dict[Variant, Kernel]()
        # CuPy loads modules from files, and remembers them by path: hence a path of its own for each cubin.
        # Once get_function has returned, the driver has its copy.
        name = hashlib.sha256(compiled.cubin).hexdigest()[:_MODULE_NAME_DIGITS]
        with tempfile.TemporaryDirectory() as folder, self._cupy.cuda.Device(self._device.index):
            path = Path(folder) / f"{name}.cubin"
            path.write_bytes(compiled.cubin)
            module = self._cupy.RawModule(path=str(path))
            for variant in variants:
                kernel = module.get_function(compiled.lowered[variant.expression])
                if variant.shared_bytes > ALWAYS_GRANTED_SHARED_BYTES:
                    kernel.max_dynamic_shared_size_bytes = variant.shared_bytes
                kernels[variant] = _OnTorchStream(self._cupy, self._device, kernel)
        return kernels


class _OnTorchStream:
    """A kernel that is launched on whatever stream is torch's current one at that moment."""

    def __init__(self, cupy: Any, device: torch.device, kernel: Kernel) -> None:
        self._cuda = cupy.cuda
        self._device = device
        self._kernel = kernel

    def __call__(self, grid: Dim3, block: Dim3, args: tuple[Struct, ...], *, shared_mem: int) -> None:
        current = torch.cuda.current_stream(self._device)
        # The device first: CuPy takes a stream for one of the device that is current when it is entered.
        with self._cuda.Device(self._device.index), self._cuda.Stream.from_external(current):
            self._kernel(grid, block, args, shared_mem=shared_mem)


def _source(variant: Variant) -> str:
    return variant.source


def _index(device: torch.device) -> int:
    if device.type != "cuda":
        raise KernelsUnavailable(f"{device} is no CUDA device")
    return torch.cuda.current_device() if device.index is None else device.index


def _address_on(device: torch.device) -> int:
    """Of some byte of its memory."""
    return torch.empty(1, dtype=torch.uint8, device=device).data_ptr()


def _version(number: int) -> tuple[int, int]:
    """CUDA writes 13.2 as 13020."""
    return number // 1000, number % 1000 // 10
