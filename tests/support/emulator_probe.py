"""Launches the kernels of emulator_probe.cu."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from pageturner.kernels.cuda.emulation.build import Builder
from pageturner.kernels.cuda.emulation.runtime import EmulatedRuntime
from pageturner.kernels.cuda.emulation.schedule import IN_ORDER, Schedule
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.cuda.variants import Variant
from support.ops import cpu_cache_dir

SOURCES = Path(__file__).parents[1] / "kernels" / "cuda"
SOURCE = "emulator_probe.cu"
THREADS = 128


class EmulatorArguments(ctypes.Structure):
    """The struct of emulator_probe.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("output", "input", "counter")),
        ("count", ctypes.c_int32),
    )


def run(
    expression: str,
    given: torch.Tensor | None = None,
    *,
    count: int = 0,
    schedule: Schedule = IN_ORDER,
    blocks: int = 1,
    shared_bytes: int = 1024,
    num_outputs: int = 256,
    flags: tuple[str, ...] = (),
    os_threads: int = 1,
    threads: int = THREADS,
    races: bool = True,
) -> torch.Tensor:
    """The output of the kernel, which is -1 where nothing was written."""
    output = torch.full((num_outputs,), -1.0)
    counter = torch.zeros(1, dtype=torch.int32)
    builder = Builder(cpu_cache_dir(), SOURCES, races, flags)
    runtime = EmulatedRuntime(builder, schedule=schedule, os_threads=os_threads)
    variant = Variant(SOURCE, expression, threads, shared_bytes, EmulatorArguments)
    pointer = None if given is None else given.data_ptr()
    arguments = EmulatorArguments(output.data_ptr(), pointer, counter.data_ptr(), count)
    Launcher(runtime).launch(variant, (blocks, 1, 1), arguments)
    return output


def line(mark: str) -> str:
    """`file:line` of the comment `// at: mark`."""
    (number,) = (
        number
        for number, text in enumerate((SOURCES / SOURCE).read_text().splitlines(), start=1)
        if text.endswith(f"// at: {mark}")
    )
    return f"{SOURCE}:{number}"
