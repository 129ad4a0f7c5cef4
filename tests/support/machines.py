"""Kinds of machine whose code can be compiled, and perhaps run, on this one."""

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
"""For products: compiler flags, and the CPU's flags that their code needs."""

ATTENTION_MACHINES = {
    "native": (build.NATIVE, ()),
    "avx512": (("-march=x86-64-v4",), ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd")),
    "avx2": (("-march=x86-64-v3",), ("avx2", "fma", "f16c")),
    "portable": (("-march=x86-64",), ()),
}
"""The same for attention."""

BFLOAT16_PAIRS = ("avx512_bf16", "avx512bw")
"""The CPU's flags that attention in pairs of bfloat16 needs."""


def has(features: tuple[str, ...]) -> bool:
    """Whether this CPU can run such code."""
    return set(features) <= set(Path("/proc/cpuinfo").read_text().split())
