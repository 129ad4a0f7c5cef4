"""What ptxas gave each kernel, read from the log of a compilation with --ptxas-options=-v."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_\d+\w*'")
_MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_STATIC_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one kernel.

    registers: of a thread. spill_bytes: stored and loaded for lack of registers. stack_bytes: arrays and
    calls that live in (slow) local memory. static_shared_bytes: beside what the launch asks for.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared_bytes: int


def read_resources(log: str) -> dict[str, Resources]:
    """Of each kernel by its lowered name."""
    entries = list(_ENTRY.finditer(log))
    ends = [entry.start() for entry in entries[1:]] + [len(log)]
    return {entry[1]: _resources(log[entry.end() : end]) for entry, end in zip(entries, ends, strict=True)}


def _resources(remarks: str) -> Resources:
    memory, registers = _MEMORY.search(remarks), _REGISTERS.search(remarks)
    if memory is None or registers is None:
        raise ValueError(f"not what ptxas is known to say of a kernel: {remarks[:300]!r}")
    stack, stores, loads = map(int, memory.groups())
    shared = _STATIC_SHARED.search(remarks)
    return Resources(int(registers[1]), stores + loads, stack, int(shared[1]) if shared else 0)
