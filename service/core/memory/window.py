"""What a sliding window lets go: blocks that no position to come can see.

Where every layer of a model sees the last W keys at most, a query at position p reads none before p - W + 1.
A sequence gives the blocks before that back as it goes on. Its table keeps their places, so that the block of
a position is still found by division: they hold NO_BLOCK, at the beginning of the table alone.

Where one layer sees everything nothing can be given back, since a block holds the KV of all layers. Source:
Jiang et al. 2023, "Mistral 7B" (arXiv:2310.06825), whose rolling buffer this is in blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from pageturner.service.core.outputs import NO_BLOCK

Table = tuple[int, ...]


def num_dropped(table: Table) -> int:
    """Leading entries that name no block."""
    if not table or table[0] != NO_BLOCK:
        return 0
    return bisect_left(table, 1, key=lambda block_id: block_id != NO_BLOCK)


def held(table: Table, start: int = 0) -> Table:
    """The blocks that a table names from its `start`-th entry on."""
    if not table or table[0] != NO_BLOCK:
        return table[start:] if start else table
    return table[max(start, num_dropped(table)) :]


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """size: keys that a position sees at most, its own included. block_size: tokens of a block."""

    size: int
    block_size: int

    def num_hidden_blocks(self, position: int) -> int:
        """Leading blocks of which neither this position nor one behind it sees anything."""
        return max(0, position - self.size + 1) // self.block_size

    def most_blocks(self, num_new_tokens: int = 1) -> int:
        """Blocks that a sequence holds at most while a step computes so many tokens of it.

        When its m-th block was full, with KV up to a, it kept what position a - 1 sees, since that may have
        to be computed again for its logits: from block (a - W) // B on, at the least m - ceil(W / B). One
        more is begun since, or a full one kept for the cache's chain; and one for every B new tokens.
        """
        return -(-self.size // self.block_size) + 1 - (-num_new_tokens // self.block_size)
