"""Names of blocks, which tell nothing of what a prompt or an output says but where two of them begin alike.

The one thing a scheduler learns from token ids is which full blocks hold the same tokens after the same
tokens. So a record keeps that alone: the name of a full block is 63 bits of the hash that the prefix cache
has of it and of all blocks before it. The first tokens of a block get a name where the scheduler looked for
them, or cached them at an answer's end, and no name else. The key of that hash
is drawn by the process and never written: without it no name can be found by trying texts, not even that of
a single token. (Where blocks are kept on disk, the key is kept beside them, and who may read that folder
may read KV anyway.)

On replay a name stands in the place of the last token that it is for, all others are 0, and `NameHasher`
takes it for the block's hash: equal chains stay equal, others differ.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

from pageturner.service.core import request as core
from pageturner.service.core.memory.block import PoolState
from pageturner.service.core.memory.block_manager import BlockManager
from pageturner.service.core.memory.prefix_cache import PrefixHasher
from pageturner.service.core.memory.tiers import TierState
from pageturner.service.core.request import NewRequest


def name_of(block_hash: bytes) -> int:
    """Positive, below 2**63."""
    return max(1, int.from_bytes(block_hash[:8], "little") >> 1)


def hash_of(name: int) -> bytes:
    """The hash that a replay has of the block of this name."""
    assert name > 0, f"{name} is no name of a block"
    return struct.pack("<q", name)


def names_of(manager: BlockManager, sequence: core.Sequence, num_tokens: int) -> tuple[int, ...]:
    """The names of the full blocks of its first tokens; none where nothing looks for equal blocks.

    The hashes are those that the sequence holds: one that it lacks yet is made now, and kept by it.
    """
    if not manager.caches_prefixes:
        return ()
    return tuple(name_of(manager.block_hash(sequence, i)) for i in range(num_tokens // manager.block_size))


def names_of_prompt(hasher: PrefixHasher, new: NewRequest, block_size: int) -> tuple[int, ...]:
    """The names of a prompt of which the scheduler holds no hashes."""
    hashes = hasher.chain(
        new.prompt_token_ids,
        block_size,
        adapter=new.adapter,
        salt=new.cache_salt,
        tenant=new.cache_tenant,
    )
    return tuple(map(name_of, hashes))


def renamed(pool: PoolState) -> PoolState:
    """The pool as a replay knows it: each hash is that of its name."""

    def known(block_hash: bytes | None) -> bytes | None:
        return None if block_hash is None else hash_of(name_of(block_hash))

    blocks = (
        replace(block, block_hash=known(block.block_hash), parent_hash=known(block.parent_hash))
        for block in pool.blocks
    )
    return replace(pool, blocks=tuple(blocks))


def renamed_tiers(tiers: TierState) -> TierState:
    """The tiers as a replay knows them."""

    def known(block_hash: bytes) -> bytes:
        return hash_of(name_of(block_hash))

    in_flight = (
        (host_block, is_load, known(block_hash), is_wanted)
        for host_block, is_load, block_hash, is_wanted in tiers.in_flight
    )
    unsaved, offered = map(known, tiers.unsaved), map(known, tiers.offered)
    return TierState(tuple(in_flight), tuple(unsaved), tuple(offered))


def stand_ins(num_tokens: int, names: Sequence[int], block_size: int) -> tuple[int, ...]:
    """Tokens for a replay: the k-th block ends with names[k], all else is 0."""
    tokens = [0] * num_tokens
    for index, name in enumerate(names):
        tokens[(index + 1) * block_size - 1] = name
    return tuple(tokens)


class NameHasher(PrefixHasher):
    """Hashes of stand-ins: that of a block is the name it ends with.

    A block without a name (of a request that was refused when it was recorded) equals those of zeros alone.
    """

    def root(self, *, adapter: str, salt: str, tenant: str = "") -> bytes:
        """The name that chains of this tag begin with."""
        return b""

    def extend(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """The name of a block behind its parent's."""
        return hash_of(token_ids[-1]) if token_ids[-1] else super().extend(parent, token_ids)
