"""A Runtime whose GPU is this machine's CPU."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pageturner.kernels.cuda.emulation.build import Builder
from pageturner.kernels.cuda.emulation.schedule import IN_ORDER, Schedule
from pageturner.kernels.cuda.runtime import Dim3, Kernel, Struct
from pageturner.kernels.cuda.variants import Variant
from pageturner.kernels.errors import KernelFault, KernelsUnavailable

_REPORT_BYTES = 4096


class _Launch(ctypes.Structure):
    """simt::Launch of machine.h."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("order", "seed", "greedy", "eager_copies", "os_threads")),
    )


@dataclass(frozen=True)
class EmulatedKernel:
    """One compiled kernel, called as a cupy.RawKernel is; done when the call returns.

    Raises KernelFault, with the place and the thread, where a GPU would stop, hang or read what was not
    written: a bounds check, a deadlock, a divergent barrier, a race on shared memory, a misaligned copy, too
    little shared memory, undefined behaviour.
    """

    name: str
    path: Path
    library: ctypes.CDLL
    schedule: Schedule
    os_threads: int

    def __call__(self, grid: Dim3, block: Dim3, args: tuple[Struct, ...], *, shared_mem: int) -> None:
        (arguments,) = args
        launch = _Launch(
            (ctypes.c_uint32 * 3)(*grid),
            (ctypes.c_uint32 * 3)(*block),
            shared_mem,
            self.schedule.order,
            self.schedule.seed,
            self.schedule.greedy,
            self.schedule.eager_copies,
            self.os_threads,
        )
        report = ctypes.create_string_buffer(_REPORT_BYTES)
        address = ctypes.c_void_p(arguments.ctypes.data)
        if self.library.simt_launch(ctypes.byref(launch), address, report, ctypes.c_uint64(_REPORT_BYTES)):
            told = re.sub(r"code\+(0x[0-9a-f]+)", self._line, report.value.decode())
            raise KernelFault(f"{self.name}: {told}")

    def _line(self, address: re.Match[str]) -> str:
        """The line of code at an address in the library, as `file:line`; the address where none is known."""
        addr2line = shutil.which("addr2line")
        if addr2line is None:
            return address.group()
        # The tool beside the compiler, with our own library and a number.
        command = [addr2line, "-e", str(self.path), address[1]]
        found = subprocess.run(command, capture_output=True, text=True).stdout  # noqa: S603
        return Path(found.split(" ")[0].strip()).name or address.group()


@dataclass(frozen=True)
class EmulatedRuntime:
    """Runs kernels on fibers, block after block. schedule: who runs when.

    num_multiprocessors: what plans are made for. os_threads: blocks that run at once; 1 gives the same
    interleaving every time.
    """

    builder: Builder
    num_multiprocessors: int = 4
    schedule: Schedule = IN_ORDER
    os_threads: int = 1
    name: str = field(default="cuda-emulated", init=False)

    @classmethod
    def cached(cls, cache_dir: Path) -> EmulatedRuntime:
        return cls(Builder(cache_dir))

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def load(self, variants: Sequence[Variant]) -> Mapping[Variant, Kernel]:
        libraries = self.builder.build(variants)
        return {
            variant: self._kernel(variant, path) for variant, path in zip(variants, libraries, strict=True)
        }

    def _kernel(self, variant: Variant, path: Path) -> EmulatedKernel:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelsUnavailable(str(error)) from error
        library.simt_argument_bytes.restype = ctypes.c_uint64
        taken, given = library.simt_argument_bytes(), ctypes.sizeof(variant.arguments)
        assert taken == given, f"{variant.expression} takes {taken} bytes, {variant.arguments} has {given}"
        return EmulatedKernel(variant.expression, path, library, self.schedule, self.os_threads)
