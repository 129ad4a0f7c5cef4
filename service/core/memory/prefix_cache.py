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

MIN_KEY_BYTES = 16
"""Of a secret that servers share in a file."""


def prefix_key(content: bytes) -> bytes:
    """The key that servers and routers have that share a file of this content."""
    return hashlib.blake2b(content, person=b"prefix key", digest_size=32).digest()


class PrefixHasher:
    """Hashes of full blocks; `key` is at most 64 secret bytes (RFC 7693 keyed BLAKE2b)."""

    def __init__(self, key: bytes = b"") -> None:
        self._key = key

    @property
    def key_id(self) -> str:
        """Equal where keys are, and tells nothing of them: names from elsewhere mean something only then."""
        return hashlib.blake2b(b"key id", key=self._key, digest_size=8).hexdigest()

    def chain(
        self, token_ids: Sequence[int], block_size: int, *, adapter: str, salt: str, tenant: str = ""
    ) -> list[bytes]:
        """The hashes of the full blocks of these tokens, in order. The tag's parts are those of `root`."""
        hashes = []
        parent = self.root(adapter=adapter, salt=salt, tenant=tenant)
        for end in range(block_size, len(token_ids) + 1, block_size):
            parent = self.extend(parent, token_ids[end - block_size : end])
            hashes.append(parent)
        return hashes

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
