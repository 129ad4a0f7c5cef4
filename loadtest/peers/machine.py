"""What the machine is, and who used its processors: read from Linux's /proc, below `root` for tests."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_FEATURES = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "i8mm",
)


@dataclass(frozen=True, slots=True)
class Machine:
    """features: those of its instruction sets that products of matrices depend on."""

    processor: str
    num_processors: int
    features: tuple[str, ...]

    @property
    def has_bfloat16(self) -> bool:
        """Products of bfloat16 are instructions, not emulated."""
        return not {"avx512_bf16", "amx_bf16"}.isdisjoint(self.features)


def read_machine(root: Path = _PROC) -> Machine:
    """As far as the system tells."""
    text = _text(root / "cpuinfo")
    named = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    listed = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    flags = set(listed[1].split()) if listed else set()
    return Machine(
        processor=named[1] if named else "unknown",
        num_processors=len(os.sched_getaffinity(0)),
        features=tuple(name for name in _FEATURES if name in flags),
    )


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Seconds of all processors since the machine began. others: those that neither the session of a server
    nor this process used, what the host took away included."""

    busy: float
    own: float

    @property
    def others(self) -> float:
        return self.busy - self.own


def processor_time(session: int, root: Path = _PROC) -> ProcessorTime:
    """session: whose processes are the server's."""
    tick = os.sysconf("SC_CLK_TCK")
    _, user, nice, system, _idle, _wait, irq, softirq, steal, *_ = _text(root / "stat").split()
    busy = sum(map(int, (user, nice, system, irq, softirq, steal)))
    own = sum(_ticks(folder / "stat", session) for folder in root.glob("[0-9]*"))
    return ProcessorTime(busy / tick, own / tick)


def _ticks(file: Path, session: int) -> int:
    """Of a process, where it is of the session or is this one."""
    fields = _text(file).rpartition(") ")[2].split()
    if not fields or (int(fields[3]) != session and file.parent.name != str(os.getpid())):
        return 0
    return int(fields[11]) + int(fields[12])


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""  # the process has ended
