"""What each kernel that moves whole blocks must do, on whatever a launcher runs it: every bit of the pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pageturner.kernels.cuda.row_grids import COLUMN_BYTES, COLUMNS
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.cuda.variants import ROW_THREADS
from pageturner.kernels.reference import ReferenceOps
from support import row_kernels

NUM_BLOCKS = 10
GROUP_BYTES = ROW_THREADS * COLUMNS * COLUMN_BYTES

# One column, some threads' first columns, a group but one column, a group, and one column of the next.
BLOCK_SIZES = (
    COLUMN_BYTES,
    1040,
    GROUP_BYTES - COLUMN_BYTES,
    GROUP_BYTES,
    GROUP_BYTES + COLUMN_BYTES,
)

PAIRS = {
    "one": [(2, 5)],
    "apart": [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)],
    "fan": [(4, 0), (4, 1), (4, 9), (5, 2)],
    "line": [(0, 1), (1, 2), (2, 3), (3, 4)],
    "tree": [(0, 1), (1, 2), (1, 3), (3, 4), (0, 5)],
    "swap": [(0, 1), (1, 0)],
    "ring": [(0, 9), (9, 4), (4, 7), (7, 0)],
    "ring with trees": [(0, 1), (1, 2), (2, 0), (1, 3), (3, 4), (0, 5), (8, 8), (8, 9)],
}


def pool_of(block_bytes: int, seed: int = 0) -> torch.Tensor:
    """NUM_BLOCKS of any bits, int16 [NUM_BLOCKS, elements]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, (NUM_BLOCKS, block_bytes // 2), generator=generator).to(torch.int16)


def check_copy_blocks(
    launcher: Launcher, pairs: Sequence[tuple[int, int]], block_bytes: int, most_rows: int | None = None
) -> None:
    expected = pool_of(block_bytes)
    pool = expected.to(launcher.runtime.device, copy=True)
    ReferenceOps().copy_blocks(expected, pairs)
    row_kernels.copy_blocks(launcher, pool, pairs, most_rows)
    assert torch.equal(pool.cpu(), expected)


def check_pack_blocks(
    launcher: Launcher, ids: Sequence[int], block_bytes: int, most_rows: int | None = None
) -> None:
    """Out of one pool and into another, in which nothing else changes."""
    source, expected = pool_of(block_bytes), pool_of(block_bytes, seed=1)
    destination = expected.to(launcher.runtime.device, copy=True)
    packed = row_kernels.gather_blocks(launcher, source.to(launcher.runtime.device), ids, most_rows)
    assert torch.equal(packed.cpu(), source[list(ids)])

    backwards = list(reversed(ids))
    expected[backwards] = source[list(ids)]
    row_kernels.scatter_blocks(launcher, packed, destination, backwards, most_rows)
    assert torch.equal(destination.cpu(), expected)
