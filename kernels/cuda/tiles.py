"""Tile shapes of the attention kernels: the one table of what each head_dim runs with, and why.

The shapes are template arguments, so the launcher knows them without asking the compiled code, and another
shape can be tried without touching a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

HEAD_DIMS = (64, 96, 128, 256)
MMA_ROWS = 16
"""Rows of one mma.m16n8k16; a decode item packs its query heads (times its new tokens) into them."""
DECODE_KEYS = 16
"""Keys of one decode tile: they lie in one block for every block size that 16 divides."""
WARP_SIZE = 32
ELEMENT_BYTES = 2
_FLOAT_BYTES = _INT_BYTES = 4
_MERGE_PADDING = 8  # kMergePadding of paged_decode.cu


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """warps: each walks every warps-th key tile. stages: tiles of a warp's ring, one computed, the rest on
    their way; 3 keep two tiles of 16 keys in flight a warp, which hides the latency of HBM at the
    occupancy that the registers allow."""

    head_dim: int
    warps: int
    stages: int = 3

    @property
    def threads(self) -> int:
        return self.warps * WARP_SIZE

    @property
    def shared_bytes(self) -> int:
        """The rings; afterwards the same memory holds what the warps merge: outputs, maxima and sums. Behind
        them the queries, for a head_dim whose queries and outputs the registers cannot both hold."""
        rings = self.warps * self.stages * 2 * DECODE_KEYS * self.head_dim * ELEMENT_BYTES
        merge = self.warps * MMA_ROWS * (self.head_dim + _MERGE_PADDING + 2) * _FLOAT_BYTES
        query = MMA_ROWS * self.head_dim * ELEMENT_BYTES if self.head_dim > 128 else 0
        return max(rings, merge) + query


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """warps x row_tiles x 16 packed rows look at `keys` keys a step, of which `stages` steps are buffered.

    row_tiles: m16 tiles of a warp; each K and V fragment that it loads serves all of them.
    """

    head_dim: int
    row_tiles: int
    keys: int
    stages: int
    warps: int = 4

    @property
    def rows(self) -> int:
        return self.warps * self.row_tiles * MMA_ROWS

    @property
    def threads(self) -> int:
        return self.warps * WARP_SIZE

    @property
    def shared_bytes(self) -> int:
        """The query tile, then the ring of key and value tiles; an integer for each row."""
        tiles = (self.rows + self.stages * 2 * self.keys) * self.head_dim * ELEMENT_BYTES
        return tiles + self.rows * _INT_BYTES


DECODE = {
    64: DecodeTiles(64, warps=4),
    96: DecodeTiles(96, warps=4),
    128: DecodeTiles(128, warps=4),
    # 4 warps would take 192 KiB, more than sm_80 has and one block an SM elsewhere.
    256: DecodeTiles(256, warps=2),
}

PREFILL = {
    64: PrefillTiles(64, row_tiles=2, keys=64, stages=2),
    # From 96 on, scores of 64 keys would push the accumulators out of the registers.
    96: PrefillTiles(96, row_tiles=2, keys=32, stages=3),
    128: PrefillTiles(128, row_tiles=2, keys=32, stages=3),
    # Two row tiles would need 256 registers for the output alone.
    256: PrefillTiles(256, row_tiles=1, keys=32, stages=2),
}
