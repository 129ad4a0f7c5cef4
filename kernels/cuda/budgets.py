"""What each kernel may cost: the one statement of it, held against machine code by `report.py`.

No kernel may spill or use local memory: a single spilled register in a main loop goes through the cache at
every tile. Ceilings are what NVRTC 13.5 makes of the sources for sm_80, sm_90 and sm_100 and a little more (a
few registers, 5 % of the instructions), so that a change that costs more is seen when it is made.

Registers matter by steps. With the 128 threads that the attention kernels have, a multiprocessor holds by its
registers 5 blocks up to 96, 4 up to 128, 3 up to 168, and 2 above.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pageturner.kernels.cuda import tiles
from pageturner.kernels.cuda.occupancy import MULTIPROCESSORS
from pageturner.kernels.cuda.ptxas import Resources
from pageturner.kernels.cuda.sass import KernelCode
from pageturner.kernels.cuda.variants import Variant

ARCHS = ("sm_80", "sm_90", "sm_100")
"""What the budgets are stated for."""

_PRODUCT_ROWS, _PRODUCT_COLUMNS, _PRODUCT_DEPTH = 16, 8, 16  # of mma.m16n8k16


@dataclass(frozen=True, slots=True)
class Budget:
    """Ceilings of one template.

    registers: of a thread. instructions: of a warp, for one tile of the main loop where there are tensor-core
    products (all of its paths count, rare ones too), of the whole kernel elsewhere. softcap: so many more
    where scores are capped. sm_100: instructions there, where the compiler makes another loop of the source.
    """

    registers: int
    instructions: int
    softcap: int = 0
    sm_100: int | None = None

    def instructions_on(self, arch: str, *, softcap: bool) -> int:
        """Instructions of the main loop that are allowed on an architecture, such as "sm_90"."""
        base = self.sm_100 if arch == "sm_100" and self.sm_100 is not None else self.instructions
        return base + (self.softcap if softcap else 0)


BUDGETS: Mapping[tuple[str, int | None], Budget] = {
    # Decode waits for memory, so what counts is bytes in flight: rings in shared memory, not blocks. Nowhere
    # do registers allow fewer blocks of sm_90 than the rings do, which is what the comments say.
    ("paged_decode", 64): Budget(registers=115, instructions=397, softcap=20),  # rings allow 4 blocks
    ("paged_decode", 96): Budget(registers=132, instructions=421, softcap=20),  # 3
    ("paged_decode", 128): Budget(registers=168, instructions=478, softcap=20),  # 3
    ("paged_decode", 256): Budget(registers=249, instructions=690, softcap=20),  # 3, of half the warps
    # Prefill is bound by the tensor cores and wants large tiles in registers, so it takes what a thread can
    # have and gets two blocks of 4 warps. Two instructions cap a score; a lane has row_tiles * keys / 2.
    ("paged_prefill", 64): Budget(registers=255, instructions=1105, softcap=130, sm_100=1370),
    ("paged_prefill", 96): Budget(registers=240, instructions=800, softcap=66, sm_100=918),
    ("paged_prefill", 128): Budget(registers=255, instructions=898, softcap=66, sm_100=993),
    ("paged_prefill", 256): Budget(registers=250, instructions=740, softcap=34),
    # Over codes a tile's bytes are half as many, and to make numbers of them takes instructions: in the time
    # that an H200 needs for a tile's bytes it issues 460 at head_dim 64, 1,800 at 256.
    ("coded_decode", 64): Budget(registers=118, instructions=620),
    ("coded_decode", 96): Budget(registers=132, instructions=740),
    ("coded_decode", 128): Budget(registers=168, instructions=940),
    ("coded_decode", 256): Budget(registers=252, instructions=1590),
    ("coded_prefill", 64): Budget(registers=255, instructions=1330),
    ("coded_prefill", 96): Budget(registers=236, instructions=940),
    ("coded_prefill", 128): Budget(registers=255, instructions=1060),
    ("coded_prefill", 256): Budget(registers=252, instructions=1160),
    ("coded_write_kv", None): Budget(registers=60, instructions=1400),
    # The rest moves bytes with little to compute. 64 registers leave room for 8 blocks of 128 threads, 1,024
    # threads a multiprocessor, each with a load or more of 16 bytes on its way.
    ("decode_merge", 64): Budget(registers=64, instructions=915),
    ("decode_merge", 96): Budget(registers=36, instructions=1090),
    ("decode_merge", 128): Budget(registers=36, instructions=1040),
    ("decode_merge", 256): Budget(registers=36, instructions=1040),
    ("write_kv", None): Budget(registers=36, instructions=150),
    ("rope_and_write_kv", None): Budget(registers=60, instructions=415),
    ("rms_norm", None): Budget(registers=60, instructions=2465),
    ("silu_and_mul", None): Budget(registers=36, instructions=505),
    # One block a piece and a tile: small grids, so that what counts is the latency of a few loads.
    ("low_rank_shrink", None): Budget(registers=60, instructions=520),
    ("low_rank_expand", None): Budget(registers=64, instructions=610),
    ("copy_blocks", None): Budget(registers=52, instructions=148),
    ("gather_blocks", None): Budget(registers=36, instructions=68),
    ("scatter_blocks", None): Budget(registers=36, instructions=68),
}

_TENSOR_CORE = {
    "tensor-core products": r"HMMA\.16816\.F32",
    "asynchronous 16-byte copies": r"LDGSTS\.E(\.\w+)*\.128",
    "matrix loads": r"LDSM\.16\.M88\.4",
    "transposed matrix loads": r"LDSM\.16\.MT88\.4",
}
_WIDE_ACCESS = {"16-byte loads": r"LDG\.E(\.\w+)*\.128", "16-byte stores": r"STG\.E(\.\w+)*\.128"}
_GROUPED = {
    "tensor-core products": _TENSOR_CORE["tensor-core products"],
    "16-byte loads": _WIDE_ACCESS["16-byte loads"],
}
EXPECTED: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("paged_decode", "paged_prefill", "coded_decode", "coded_prefill"), _TENSOR_CORE),
    **dict.fromkeys(("write_kv", "rope_and_write_kv", "rms_norm", "silu_and_mul"), _WIDE_ACCESS),
    **dict.fromkeys(("low_rank_shrink", "low_rank_expand"), _GROUPED),
    **dict.fromkeys(("copy_blocks", "gather_blocks", "scatter_blocks"), _WIDE_ACCESS),
}
"""Instructions that a kernel is built around, as patterns of opcodes: their absence means that the compiler
understood something else."""

_LOCAL_MEMORY = r"(LDL|STL)\b"


@dataclass(frozen=True, slots=True)
class Instructions:
    """all: on whatever path, what a `Budget` counts. shortest: of the shortest path, see `sass.Loop`."""

    all: int
    shortest: int


def instructions_of(variant: Variant, code: KernelCode) -> Instructions | None:
    """Of a tile, or of the whole kernel where it has none; None where the main loop is not to be found.

    The main loop is the smallest that holds the products of a tile. Where the compiler unrolled it, a turn is
    divided by its tiles.
    """
    products = products_of_tile(variant)
    if not products:
        return Instructions(len(code.opcodes), len(code.opcodes))
    loops = [loop for loop in code.loops if loop.products >= products]
    if not loops:
        return None
    loop = min(loops, key=lambda loop: loop.instructions)
    tiles_of_turn = loop.products / products
    return Instructions(round(loop.instructions / tiles_of_turn), round(loop.shortest / tiles_of_turn))


def products_of_tile(variant: Variant) -> int:
    """mma instructions that a warp needs for one tile, scores and outputs; 0 for kernels without."""
    head_dim = head_dim_of(variant)
    if head_dim is None or variant.kernel == "decode_merge":
        return 0
    if variant.kernel in ("paged_decode", "coded_decode"):
        row_tiles, keys = 1, tiles.DECODE_KEYS
    else:
        row_tiles, keys = tiles.PREFILL[head_dim].row_tiles, tiles.PREFILL[head_dim].keys
    scores = keys // _PRODUCT_COLUMNS * (head_dim // _PRODUCT_DEPTH)
    outputs = head_dim // _PRODUCT_COLUMNS * (keys // _PRODUCT_DEPTH)
    return row_tiles * (scores + outputs)


def head_dim_of(variant: Variant) -> int | None:
    """The second template argument of the attention kernels; None for the others."""
    match = re.match(r"\w+<\w+, (\d+)\b", variant.expression)
    return int(match[1]) if match else None


def budget_of(variant: Variant) -> Budget:
    """The budget of a variant. Raises KeyError for a kernel without one."""
    return BUDGETS[variant.kernel, head_dim_of(variant)]


def violations(variant: Variant, arch: str, resources: Resources, code: KernelCode) -> tuple[str, ...]:
    """Why this kernel is over budget, one reason each; empty when it is not."""
    budget, found = budget_of(variant), list[str]()

    def at_most(what: str, value: int, ceiling: int) -> None:
        if value > ceiling:
            found.append(f"{what}: {value:,}, at most {ceiling:,}")

    at_most("registers", resources.registers, budget.registers)
    at_most("bytes spilled", resources.spill_bytes, 0)
    at_most("bytes of stack", resources.stack_bytes, 0)
    at_most("local memory accesses", code.count(_LOCAL_MEMORY), 0)
    shared = variant.shared_bytes + resources.static_shared_bytes
    at_most("bytes of shared memory", shared, MULTIPROCESSORS[arch].block_shared_bytes)
    instructions = instructions_of(variant, code)
    if instructions is None:
        found.append(f"no loop with the {products_of_tile(variant)} products of a tile")
    else:
        ceiling = budget.instructions_on(arch, softcap=variant.expression.endswith(", true>"))
        at_most("instructions", instructions.all, ceiling)
    for what, pattern in EXPECTED.get(variant.kernel, {}).items():
        if not code.count(pattern):
            found.append(f"no {what}")
    return tuple(found)
