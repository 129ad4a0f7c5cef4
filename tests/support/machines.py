"""Kinds of machine whose products can be compiled, and perhaps run, on this one."""

from __future__ import annotations

from pathlib import Path

from pageturner.kernels.cpu import build

MACHINES = {
    "native": (build.NATIVE, ()),
    "avx-vnni": (("-march=x86-64-v3", "-mavxvnni"), ("avx_vnni",)),
    "avx-vnni as avx512vl": (("-march=x86-64-v3", "-mavx512vl", "-mavx512vnni"), ("avx512_vnni", "avx512vl")),
    "avx2": (("-march=x86-64-v3",), ("avx2", "fma", "f16c")),
    "portable": (("-march=x86-64",), ()),
}
"""Compiler flags, and the CPU's flags that their code needs."""


def has(features: tuple[str, ...]) -> bool:
    """Whether this CPU can run such code."""
    return set(features) <= set(Path("/proc/cpuinfo").read_text().split())
