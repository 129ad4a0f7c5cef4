"""Names for what a prompt or an output says, that tell nothing but where two of them begin alike.

The one thing a scheduler learns from token ids is which full blocks hold the same tokens after the same
tokens. So that is all that is kept: each full block gets the name of its whole chain, a keyed hash of 63
bits; tokens of a block that is not full get none. The key is drawn by the process, and never written.
Without it a name cannot be found by trying texts, not even one of a single token.

On replay a name stands in the place of the last token of its block, all others are 0, and `NameHasher`
takes it for the digest: equal chains stay equal, others differ.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from pageturner.service.core.memory.prefix_cache import PrefixHasher


class Chain:
    """The names of one choice's full blocks, as its tokens come. parent: the digest of what goes before."""

    __slots__ = ("names", "parent", "tail")

    def __init__(self, parent: bytes) -> None:
        self.parent = parent
        self.tail: list[int] = []
        self.names: list[int] = []

    def fork(self) -> Chain:
        child = Chain(self.parent)
        child.tail = self.tail.copy()
        child.names = self.names.copy()
        return child


class Namer:
    """Follows chains of blocks of `block_size` tokens.

    hasher: names nothing if None, as the scheduler then looks for no equal blocks.
    """

    def __init__(self, hasher: PrefixHasher | None, key: bytes, block_size: int) -> None:
        self._hasher = hasher
        self._key = key
        self.block_size = block_size

    def start(self, token_ids: Sequence[int], *, adapter: str, salt: str) -> Chain:
        """The chain of a prompt. Other adapters and salts give other names."""
        if self._hasher is None:
            return Chain(b"")
        chain = Chain(self._hasher.root(adapter=adapter, salt=salt))
        size = self.block_size
        end = len(token_ids) // size * size
        for first in range(0, end, size):
            chain.parent = self._hasher.extend(chain.parent, token_ids[first : first + size])
            chain.names.append(self.name_of(chain.parent))
        chain.tail = list(token_ids[end:])
        return chain

    def append(self, chain: Chain, token_id: int) -> int:
        """The name of the block that this token completes, or 0."""
        tail = chain.tail
        tail.append(token_id)
        if len(tail) < self.block_size:
            return 0
        if self._hasher is None:
            tail.clear()
            return 0
        chain.parent = self._hasher.extend(chain.parent, tail)
        chain.tail = []
        name = self.name_of(chain.parent)
        chain.names.append(name)
        return name

    def name_of(self, digest: bytes) -> int:
        """Positive, below 2**63."""
        named = hashlib.blake2b(digest, key=self._key, digest_size=8).digest()
        return max(1, int.from_bytes(named, "little") >> 1)


def stand_ins(num_tokens: int, names: Sequence[int], block_size: int) -> tuple[int, ...]:
    """Tokens for a replay: the k-th block ends with names[k], all else is 0."""
    tokens = [0] * num_tokens
    for index, name in enumerate(names):
        tokens[(index + 1) * block_size - 1] = name
    return tuple(tokens)


class NameHasher(PrefixHasher):
    """Digests of stand-ins: a block's is the name it ends with."""

    def root(self, *, adapter: str, salt: str) -> bytes:
        return b""

    def extend(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        return digest_of(token_ids[-1])


def digest_of(name: int) -> bytes:
    """The digest that a replay gives to the chain of this name."""
    assert name > 0, "the record has no name for a full block"
    return struct.pack("<q", name)
