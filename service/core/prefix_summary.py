"""What a server's prefix cache holds, short enough to send: a router finds who has a prompt's beginning.

Of each cached block a fingerprint is told: the first 32 bits of its hash, which names all tokens up to its
end and whatever else changes KV. A router that hashes a prompt under the same key counts how many of its
first blocks are there. Where n blocks are cached, a block that is not there is taken for one that is with
probability n / 2**32; what follows is a worse choice of server, never a wrong token.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

FINGERPRINT_BYTES = 4

MAX_FINGERPRINTS = 1 << 18
"""Of one summary, 1 MiB of them: blocks cached later are left out, which continue those cached before."""

assert array("I").itemsize == FINGERPRINT_BYTES, "an unsigned int has four bytes wherever this runs"


@dataclass(frozen=True, slots=True)
class PrefixChange:
    """What became of one summary: fingerprints as bytes, as a summary has them."""

    revision: int
    added: bytes = b""
    removed: bytes = b""


@dataclass(frozen=True, slots=True)
class PrefixSummary:
    """The cached blocks of one server at one moment.

    revision: rises whenever another answer differs. block_size: tokens of a block. key_id: names the secret
    under which the hashes were made (`PrefixHasher.key_id`): other servers' hashes mean nothing here where it
    differs. fingerprints: four bytes each, the lowest first, in ascending order, each once. is_truncated:
    more are cached than are told.
    """

    revision: int = 0
    block_size: int = 1
    key_id: str = ""
    fingerprints: bytes = b""
    is_truncated: bool = False

    @classmethod
    def of(cls, revision: int, block_size: int, key_id: str, hashes: Sequence[bytes]) -> PrefixSummary:
        """hashes: of the cached blocks, those first that were cached first."""
        told = {block_hash[:FINGERPRINT_BYTES] for block_hash in islice(hashes, MAX_FINGERPRINTS)}
        packed = _sorted(b"".join(told))
        return cls(revision, block_size, key_id, packed, len(hashes) > MAX_FINGERPRINTS)

    @property
    def num_fingerprints(self) -> int:
        """How many are told."""
        return len(self.fingerprints) // FINGERPRINT_BYTES

    def num_leading(self, hashes: Iterable[bytes]) -> int:
        """How many of a prompt's first blocks are there. hashes: of its full blocks, in order, under the key
        that key_id names."""
        known = _unpacked(self.fingerprints)
        count = 0
        for block_hash in hashes:
            wanted = int.from_bytes(block_hash[:FINGERPRINT_BYTES], "little")
            place = bisect_left(known, wanted)
            if place == len(known) or known[place] != wanted:
                break
            count += 1
        return count

    def change_to(self, newer: PrefixSummary) -> PrefixChange:
        """What `apply` makes the newer summary of this one with."""
        old, new = set(_unpacked(self.fingerprints)), set(_unpacked(newer.fingerprints))
        return PrefixChange(newer.revision, _packed(sorted(new - old)), _packed(sorted(old - new)))

    def apply(self, change: PrefixChange) -> PrefixSummary:
        """The summary that it leads to, of the same server under the same key."""
        kept = set(_unpacked(self.fingerprints)) - set(_unpacked(change.removed))
        kept |= set(_unpacked(change.added))
        return PrefixSummary(
            change.revision, self.block_size, self.key_id, _packed(sorted(kept)), self.is_truncated
        )


def _sorted(packed: bytes) -> bytes:
    return _packed(sorted(_unpacked(packed)))


def _unpacked(packed: bytes) -> memoryview[int] | array[int]:
    """The numbers, without a copy where the machine has the wire's order of bytes."""
    if sys.byteorder == "little":
        return memoryview(packed).cast("I")
    numbers = array("I", packed)
    numbers.byteswap()
    return numbers


def _packed(numbers: Iterable[int]) -> bytes:
    packed = array("I", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
