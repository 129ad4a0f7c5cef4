"""Kinds of machine whose code can be compiled here, and run where this CPU has what it needs."""

from __future__ import annotations

from pathlib import Path

from pageturner.kernels.cpu.build import NATIVE
from pageturner.service.errors import ConfigError

MACHINES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "avx2": (("-march=x86-64-v3",), ("avx2", "fma", "f16c")),
    "portable": (("-march=x86-64",), ()),
}
"""Beside this machine: what an older one's compiler would make, and the CPU flags that running it needs."""


def cpu_flags() -> set[str]:
    """What this CPU can do, as Linux names it."""
    return set(Path("/proc/cpuinfo").read_text().split())


def compiler_flags(machine: str) -> tuple[str, ...]:
    """Of `native` or one of MACHINES. Raises ConfigError if this CPU cannot run its code."""
    if machine == "native":
        return NATIVE
    flags, needed = MACHINES[machine]
    if not cpu_flags().issuperset(needed):
        raise ConfigError("--code", f"this CPU cannot run code for {machine}: it lacks {' '.join(needed)}")
    return flags
