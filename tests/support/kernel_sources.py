"""A small kernel source of our own, and a compiler that counts, for tests of compiling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from pageturner.kernels.cuda.compiler import Nvrtc, load_nvrtc

HEADER = """
#pragma once
template <class T> __device__ T twice(T value) { return value + value; }
"""
SOURCE = """
#include "twice.cuh"
struct Arguments { float* values; int count; };
template <class T> __global__ void doubled(Arguments arguments) {
#ifdef PAGETURNER_BOUNDS_CHECK
  if (int(threadIdx.x) >= arguments.count) __trap();
#endif
  arguments.values[threadIdx.x] = twice(T(arguments.values[threadIdx.x]));
}
"""
DOUBLED = ("doubled<float>", "doubled<int>")


def write_sources(folder: Path, source: str = SOURCE, header: str = HEADER) -> Path:
    """twice.cuh and doubled.cu."""
    folder.mkdir(exist_ok=True)
    (folder / "twice.cuh").write_text(header)
    (folder / "doubled.cu").write_text(source)
    return folder


class CountingNvrtc:
    """The real one, which counts what it compiles and may call itself another version."""

    def __init__(self, version: tuple[int, int] | None = None) -> None:
        self._nvrtc = load_nvrtc()
        self._version = version or self._nvrtc.getVersion()
        self.num_compiled = 0

    def getVersion(self) -> tuple[int, int]:  # noqa: N802  # NVRTC's names
        return self._version

    def compileProgram(self, program: int, options: Sequence[str]) -> None:  # noqa: N802
        self.num_compiled += 1
        self._nvrtc.compileProgram(program, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nvrtc, name)


def counting_nvrtc(version: tuple[int, int] | None = None) -> tuple[Nvrtc, CountingNvrtc]:
    """The same object twice: as NVRTC, and as what counts."""
    counting = CountingNvrtc(version)
    return cast(Nvrtc, counting), counting
