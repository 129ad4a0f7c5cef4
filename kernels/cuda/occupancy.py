"""How many blocks of a kernel one multiprocessor holds, from its registers, shared memory and threads."""

from __future__ import annotations

from dataclasses import dataclass

WARP_SIZE = 32
_REGISTERS = 65_536
_WARP_REGISTERS_UNIT = 256
"""A warp's registers are handed out in units of so many: eight a thread."""
_BLOCK_RESERVED_BYTES = 1024
"""Shared memory that the system keeps of every block."""
_SHARED_UNIT = 128


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """Limits of one, and of a block on it (CUDA programming guide, "Compute Capabilities")."""

    arch: str
    shared_bytes: int
    block_shared_bytes: int
    warps: int
    blocks: int

    def resident_blocks(self, threads: int, registers: int, shared_bytes: int) -> int:
        """Blocks at a time; 0 where not even one fits. registers: a thread. shared_bytes: a block."""
        if shared_bytes > self.block_shared_bytes:
            return 0
        warps = -(-threads // WARP_SIZE)
        warp_registers = _round_up(max(registers, 1) * WARP_SIZE, _WARP_REGISTERS_UNIT)
        shared = _round_up(shared_bytes + _BLOCK_RESERVED_BYTES, _SHARED_UNIT)
        # Each of the four schedulers has a quarter of the registers, and whole warps go to one.
        resident_warps = min(self.warps, _REGISTERS // 4 // warp_registers * 4)
        return min(self.blocks, resident_warps // warps, self.shared_bytes // shared)


def _kib(arch: str, shared: int, block_shared: int, warps: int, blocks: int) -> Multiprocessor:
    return Multiprocessor(arch, shared * 1024, block_shared * 1024, warps, blocks)


MULTIPROCESSORS = {
    machine.arch: machine
    for machine in (
        _kib("sm_80", 164, 163, warps=64, blocks=32),  # A100
        _kib("sm_86", 100, 99, warps=48, blocks=16),  # A10, RTX 30
        _kib("sm_89", 100, 99, warps=48, blocks=24),  # L4, L40, RTX 40
        _kib("sm_90", 228, 227, warps=64, blocks=32),  # H100, H200
        _kib("sm_100", 228, 227, warps=64, blocks=32),  # B200
        _kib("sm_120", 100, 99, warps=48, blocks=24),  # RTX 50
    )
}


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
