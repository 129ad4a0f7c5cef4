"""Names for KV content: a chained, keyed hash over (parent block, token ids), rooted in a tag.

Two sequences share a block exactly if their hashes are equal: same tokens from the start, and the same
value of everything else that changes KV. The key keeps a tenant from constructing a collision.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence

HASH_BYTES = 16


class PrefixHasher:
    """Hashes of full blocks; `key` is at most 64 secret bytes (RFC 7693 keyed BLAKE2b)."""

    def __init__(self, key: bytes = b"") -> None:
        self._key = key

    def root(self, *, adapter: str, salt: str, tenant: str = "") -> bytes:
        """The parent of a first block. Fields carry name and length, so that no adapter equals a salt, and no
        salt reaches another tenant's blocks. tenant: within which alone blocks are shared, if within one."""
        digest = hashlib.blake2b(key=self._key, digest_size=HASH_BYTES)
        fields = ((b"adapter", adapter), (b"salt", salt), (b"tenant", tenant))
        for name, value in fields if tenant else fields[:2]:
            encoded = value.encode()
            digest.update(struct.pack("<7sQ", name, len(encoded)) + encoded)
        return digest.digest()

    def extend(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """The hash of the block that holds `token_ids` after `parent`."""
        content = parent + array("q", token_ids).tobytes()
        return hashlib.blake2b(content, key=self._key, digest_size=HASH_BYTES).digest()
