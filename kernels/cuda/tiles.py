"""Tile shapes of the attention kernels: the one table of what each head_dim runs with, and why.

The shapes are template arguments, so the launcher knows them without asking the compiled code, and another
shape can be tried without touching a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

HEAD_DIMS = (64, 96, 128, 256)
"""Those of the models at large, and multiples of 32: eight rows of a tile are then whole copies of a warp."""
MMA_ROWS = 16
"""Rows of one mma.m16n8k16; a decode item packs its query heads (times its new tokens) into them."""
DECODE_KEYS = 16
"""Keys of one decode tile: the depth of the mma that adds up values, and never in two blocks, as every block
size is a multiple of it."""
WARP_SIZE = 32
ELEMENT_BYTES = 2
_FLOAT_BYTES = _INT_BYTES = 4
_SCALE_BYTES = 2
_MERGE_PADDING = 8  # kMergePadding of paged_decode.cu


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """warps: each walks every warps-th key tile. stages: tiles of a warp's ring, one computed, the rest on
    their way. coded: they are of codes.

    To keep a memory of bandwidth B and latency L busy, a multiprocessor needs B * L bytes on their way: 15 KB
    on an A100, 40 KB on an H200 under load. Every shape below has 64 KiB or more on either.
    """

    head_dim: int
    warps: int
    stages: int
    coded: bool = False

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.warps * WARP_SIZE

    @property
    def shared_bytes(self) -> int:
        """The rings; afterwards the same memory holds what the warps merge: outputs, anchors and sums. Behind
        them the queries, for a head_dim whose queries and outputs the registers cannot both hold."""
        rings = self.warps * _ring_bytes(DECODE_KEYS, self.head_dim, self.stages, coded=self.coded)
        merge = self.warps * MMA_ROWS * (self.head_dim + _MERGE_PADDING + 2) * _FLOAT_BYTES
        query = MMA_ROWS * self.head_dim * ELEMENT_BYTES if self.head_dim > 128 else 0
        return max(rings, merge) + query


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """warps x row_tiles x 16 packed rows look at `keys` keys a step, of which `stages` steps are buffered.

    row_tiles: m16 tiles of a warp; each K and V fragment that it loads serves all of them, so two halve the
    traffic of shared memory, which would otherwise bound the tensor cores. warps: one for each of a
    multiprocessor's four schedulers; two such blocks fill its registers. coded: steps are of codes.
    """

    head_dim: int
    row_tiles: int
    keys: int
    stages: int
    warps: int = 4
    coded: bool = False

    @property
    def rows(self) -> int:
        """Packed rows of a block."""
        return self.warps * self.row_tiles * MMA_ROWS

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.warps * WARP_SIZE

    @property
    def shared_bytes(self) -> int:
        """The query tile, then the ring of key and value tiles; an integer for each row."""
        query = self.rows * self.head_dim * ELEMENT_BYTES
        ring = _ring_bytes(self.keys, self.head_dim, self.stages, coded=self.coded)
        return query + ring + self.rows * _INT_BYTES


def _ring_bytes(keys: int, head_dim: int, stages: int, *, coded: bool) -> int:
    """Keys and values of each stage; of codes, with their scales, and one step's numbers of 16 bits."""
    numbers = 2 * keys * head_dim * ELEMENT_BYTES
    return stages * 2 * keys * (head_dim + _SCALE_BYTES) + numbers if coded else stages * numbers


# 4 warps, one a scheduler. 3 stages, but 2 from 128 on: two blocks then fit an SM of sm_80. They have as many
# bytes on their way as one block of 3 stages, and one computes while the other starts or merges.
DECODE = {
    64: DecodeTiles(64, warps=4, stages=3),
    96: DecodeTiles(96, warps=4, stages=3),
    128: DecodeTiles(128, warps=4, stages=2),
    # 4 warps would take 136 KiB: one block an SM, and none where a block gets 99 KiB (sm_86, sm_89, sm_120).
    256: DecodeTiles(256, warps=2, stages=2),
}

# Of 255 registers, row_tiles * (head_dim + keys) / 2 hold outputs and scores. 3 stages where a step is short.
PREFILL = {
    64: PrefillTiles(64, row_tiles=2, keys=64, stages=2),
    # From 96 on, scores of 64 keys would push the outputs out of the registers.
    96: PrefillTiles(96, row_tiles=2, keys=32, stages=3),
    128: PrefillTiles(128, row_tiles=2, keys=32, stages=3),
    # Two row tiles would need 256 registers for the output alone; with 3 stages a block would fill an SM.
    256: PrefillTiles(256, row_tiles=1, keys=32, stages=2),
}

# Codes are half as large, and the numbers made of one step take the room: the same shapes fit as often.
CODED_DECODE = {head_dim: replace(shape, coded=True) for head_dim, shape in DECODE.items()}
CODED_PREFILL = {head_dim: replace(shape, coded=True) for head_dim, shape in PREFILL.items()}
