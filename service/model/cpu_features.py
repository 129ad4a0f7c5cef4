"""What the CPU computes in bfloat16: where it has no instructions for it, float32 is several times faster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from pageturner.service.model.options import ModelOptions

_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""As Linux names them: the first two on x86, the last on Arm."""


def read_cpuinfo(path: Path = Path("/proc/cpuinfo")) -> str:
    """What Linux says of the processors, "" where it does not."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def has_bfloat16(cpuinfo: str) -> bool:
    """Whether the processors multiply in bfloat16. Where nothing is known of them, they are taken to."""
    flags = next(_flags(cpuinfo), None)
    return flags is None or not _BFLOAT16.isdisjoint(flags)


def cpu_identity(cpuinfo: str) -> str:
    """The kind of processor: its name and flags, "" where nothing is known of it."""
    names = (
        value.strip()
        for line in cpuinfo.splitlines()
        for name, _, value in [line.partition(":")]
        if name.strip() in ("model name", "CPU part")
    )
    return " ".join([*list(names)[:1], *sorted(next(_flags(cpuinfo), []))])


def _flags(cpuinfo: str) -> Iterator[list[str]]:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            yield value.split()


def fit_dtype(options: ModelOptions, device: torch.device, cpuinfo: str) -> tuple[ModelOptions, str | None]:
    """The options with a dtype that the device computes well in, and what an operator should know of it.

    `auto` on a CPU without bfloat16 is float32; a dtype that is named is kept.
    """
    if device.type != "cpu" or has_bfloat16(cpuinfo):
        return options, None
    slow = "this CPU has no bfloat16 instructions"
    if options.dtype == "auto":
        note = (
            f"{slow}: auto is float32; model.dtype = bfloat16 takes half the memory and several times as long"
        )
        return replace(options, dtype="float32"), note
    if options.dtype == "bfloat16":
        return options, f"{slow}: model.dtype = float32 is several times faster, in twice the memory"
    return options, None
