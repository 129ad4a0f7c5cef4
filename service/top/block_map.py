"""A block pool as a map of few cells: what most of the blocks of a cell are used for, and by whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from pageturner.service.client import BlockPoolMap, BlockUse


@dataclass(frozen=True, slots=True)
class Cell:
    """use: of most of its blocks, of ties the one that comes first in USES. owner: the number of the request
    that holds most of them; None where no request does."""

    use: BlockUse
    owner: int | None = None


USES = (BlockUse.LIVE, BlockUse.SHARED, BlockUse.PENDING, BlockUse.EVICTABLE, BlockUse.FREE)
"""From what is in use to what is not."""

_RANK = {int(use): rank for rank, use in enumerate(USES)}


def counts(blocks: BlockPoolMap) -> dict[BlockUse, int]:
    """Blocks of each use, in the order of USES."""
    return {use: blocks.uses.count(int(use)) for use in USES}


def cells(blocks: BlockPoolMap, max_cells: int) -> tuple[int, list[Cell]]:
    """Blocks of a cell, and the cells in the order of ids: as many as are needed, at most `max_cells`."""
    num_blocks = len(blocks.uses)
    if not num_blocks or max_cells < 1:
        return 1, []
    size = -(-num_blocks // max_cells)
    return size, list(_cells(blocks, size))


def _cells(blocks: BlockPoolMap, size: int) -> Iterator[Cell]:
    uses = blocks.uses
    owners = memoryview(blocks.owners)
    for start in range(0, len(uses), size):
        part = uses[start : start + size]
        if size == 1 or part.count(part[0]) == len(part):
            use = part[0]
        else:
            found = Counter(part)
            use = max(found, key=lambda one: (found[one], -_RANK.get(one, len(USES))))
        places = _places(owners[2 * start : 2 * (start + size)])
        most = Counter(filter(None, places)).most_common(1)
        is_known = most and most[0][0] <= len(blocks.requests)
        owner = blocks.requests[most[0][0] - 1].number if is_known else None
        # A number that a newer server may send counts as live: something holds it.
        yield Cell(BlockUse(use) if use in _RANK else BlockUse.LIVE, owner)


def _places(owners: memoryview) -> Iterator[int]:
    for index in range(0, len(owners), 2):
        yield owners[index] | owners[index + 1] << 8
