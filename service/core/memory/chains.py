"""The blocks that hashes find, and which of them continue which.

Cached blocks form chains: each names the hash of the block before it. A partial block, of which a hash
stands for the first slots only, ends its chain. A prompt's own hash of a partial block depends on how many
tokens it takes; so `partial_lengths` says which numbers are worth hashing, and where none is cached nothing
is hashed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pageturner.service.core.memory.block import Block


class Chains:
    """blocks: all of the pool, by id. Only its `BlockPool` changes this, and their hashes only this.

    heads_may_go: a block may be referenced while the one before it is not.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.heads_may_go = False
        self._blocks = blocks
        self._block_of_hash: dict[bytes, int] = {}
        # Of a cached hash, the cached ones that continue it, and how many of those have so many tokens.
        self._children: dict[bytes, dict[bytes, None]] = {}
        self._partials: dict[bytes, Counter[int]] = {}

    def __len__(self) -> int:
        """Hashes that find a block."""
        return len(self._block_of_hash)

    def hashes(self) -> tuple[bytes, ...]:
        """Every hash that finds a block, those cached first first: none before the one that it continues."""
        return tuple(self._block_of_hash)

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds the KV of this chain, if it is cached."""
        return self._block_of_hash.get(block_hash)

    def continuations(self, block: Block) -> list[Block]:
        """The cached blocks that come after this one."""
        if block.block_hash is None:
            return []
        children = self._children.get(block.block_hash, ())
        return [self._blocks[self._block_of_hash[block_hash]] for block_hash in children]

    def partial_lengths(self, block: Block) -> list[int]:
        """Numbers of tokens of the cached partial blocks that continue this one, the largest first."""
        if block.block_hash is None:
            return []
        return sorted(self._partials.get(block.block_hash, ()), reverse=True)

    def add(self, block: Block) -> None:
        """Let the block's hash find it; its parent's, if it has one, finds a block already."""
        assert block.block_hash is not None, f"block {block.block_id} has no hash"
        self._block_of_hash[block.block_hash] = block.block_id
        if block.parent_hash is not None:
            self._children.setdefault(block.parent_hash, {})[block.block_hash] = None
            if block.num_partial_tokens:
                self._partials.setdefault(block.parent_hash, Counter())[block.num_partial_tokens] += 1

    def remove(self, block: Block) -> None:
        """Forget the block's hash."""
        assert block.block_hash is not None, f"block {block.block_id} is not cached"
        del self._block_of_hash[block.block_hash]
        if block.parent_hash is not None:
            siblings = self._children[block.parent_hash]
            del siblings[block.block_hash]
            if not siblings:
                del self._children[block.parent_hash]
            if block.num_partial_tokens:
                self._remove_length(block.parent_hash, block.num_partial_tokens)
        block.block_hash, block.parent_hash, block.num_partial_tokens = None, None, 0

    def _remove_length(self, parent_hash: bytes, num_tokens: int) -> None:
        lengths = self._partials[parent_hash]
        lengths[num_tokens] -= 1
        if not lengths[num_tokens]:
            del lengths[num_tokens]
        if not lengths:
            del self._partials[parent_hash]

    def check_integrity(self) -> None:
        """Raise AssertionError, naming the invariant, unless the blocks' own records say the same."""
        partials: dict[bytes, Counter[int]] = {}
        for block in self._blocks:
            if block.block_hash is not None:
                assert self._block_of_hash.get(block.block_hash) == block.block_id, (
                    f"bijection: the hash of block {block.block_id} finds another block"
                )
            if block.parent_hash is not None:
                parent = self._block_of_hash.get(block.parent_hash)
                assert parent is not None, f"chain: the block before block {block.block_id} is not cached"
                assert self.heads_may_go or not block.ref_count or self._blocks[parent].ref_count, (
                    f"chain: block {block.block_id} is referenced and the one before it is not"
                )
            if block.num_partial_tokens:
                assert block.parent_hash is not None, f"partial: block {block.block_id} follows none"
                assert not self.continuations(block), f"partial: block {block.block_id} is continued"
                partials.setdefault(block.parent_hash, Counter())[block.num_partial_tokens] += 1
        hashed = sum(block.block_hash is not None for block in self._blocks)
        assert hashed == len(self._block_of_hash), "bijection: the map names a block that is not cached"
        num_children = sum(map(len, self._children.values()))
        assert num_children == sum(b.parent_hash is not None for b in self._blocks), "chain: miscounted"
        assert partials == self._partials, "partial: miscounted"
