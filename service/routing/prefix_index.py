"""Who is believed to hold which prefix: digests to replicas, each replica's share bounded as its cache is.

What was sent to a replica is taken to be held there until so much else was sent that its cache must have
overwritten it, as in SGLang's gateway; or a replica's own word is taken for it. Along a chain the head is
always as recent as what follows it, so the tail is forgotten first, as a prefix cache evicts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from pageturner.policies.fleet import NO_MATCH, Digest, PrefixMatch


class PrefixIndex:
    """Of each digest the replicas that hold it; of each replica its digests, the longest unused first."""

    def __init__(self) -> None:
        self._holders: dict[Digest, list[str]] = {}
        self._held: dict[str, OrderedDict[Digest, int]] = {}
        self._capacity: dict[str, int] = {}
        self._num_tokens: dict[str, int] = {}

    def join(self, replica_id: str, cache_tokens: int) -> None:
        """A replica that holds nothing yet. cache_tokens: what it can hold; 0 for any number."""
        self._held[replica_id] = OrderedDict()
        self._capacity[replica_id] = cache_tokens
        self._num_tokens[replica_id] = 0

    def resize(self, replica_id: str, cache_tokens: int) -> None:
        """What a replica can hold from now on; 0 for any number."""
        self._capacity[replica_id] = cache_tokens
        self._shrink(replica_id)

    def leave(self, replica_id: str) -> None:
        """Forget the replica and all that it held."""
        self.forget(replica_id, tuple(self._held[replica_id]))
        del self._held[replica_id], self._capacity[replica_id], self._num_tokens[replica_id]

    def add(self, replica_id: str, digests: Sequence[Digest], tokens_per_digest: int) -> None:
        """A replica holds this chain, from its first digest on, and has just used it."""
        held, holders = self._held[replica_id], self._holders
        num_new = 0
        for digest in reversed(digests):
            if digest in held:
                held.move_to_end(digest)
                continue
            held[digest] = tokens_per_digest
            num_new += 1
            found = holders.get(digest)
            if found is None:
                holders[digest] = [replica_id]
            else:
                found.append(replica_id)
        if num_new:
            self._num_tokens[replica_id] += num_new * tokens_per_digest
            self._shrink(replica_id)

    def forget(self, replica_id: str, digests: Sequence[Digest]) -> None:
        """A replica holds these no more. Unknown ones are no matter."""
        held = self._held[replica_id]
        for digest in digests:
            num_tokens = held.pop(digest, None)
            if num_tokens is not None:
                self._drop(replica_id, digest, num_tokens)

    def longest_match(self, digests: Sequence[Digest]) -> PrefixMatch:
        """The deepest digest of the chain that anyone holds, and who does."""
        holders, depth = self._holders, 0
        found: list[str] | None = None
        for digest in digests:
            deeper = holders.get(digest)
            if deeper is None:
                break
            found = deeper
            depth += 1
        return NO_MATCH if found is None else PrefixMatch(depth, tuple(found))

    def num_held(self, replica_id: str, digests: Sequence[Digest]) -> int:
        """How many of the chain, from its first on, the replica holds."""
        held, depth = self._held[replica_id], 0
        for digest in digests:
            if digest not in held:
                break
            depth += 1
        return depth

    def num_tokens(self, replica_id: str) -> int:
        """Tokens that the replica is believed to hold."""
        return self._num_tokens[replica_id]

    def _shrink(self, replica_id: str) -> None:
        capacity, held = self._capacity[replica_id], self._held[replica_id]
        while capacity and self._num_tokens[replica_id] > capacity:
            digest, num_tokens = held.popitem(last=False)
            self._drop(replica_id, digest, num_tokens)

    def _drop(self, replica_id: str, digest: Digest, num_tokens: int) -> None:
        self._num_tokens[replica_id] -= num_tokens
        found = self._holders[digest]
        if len(found) == 1:
            del self._holders[digest]
        else:
            found.remove(replica_id)

    def check_integrity(self) -> None:
        """Raise AssertionError, naming the invariant, unless both sides say the same."""
        pairs = {(digest, name) for digest, names in self._holders.items() for name in names}
        assert pairs == {(digest, name) for name, held in self._held.items() for digest in held}, "bijection"
        assert len(pairs) == sum(map(len, self._holders.values())), "a replica is named once for a digest"
        for name, held in self._held.items():
            assert self._num_tokens[name] == sum(held.values()), f"tokens: miscounted of {name}"
            assert not self._capacity[name] or self._num_tokens[name] <= self._capacity[name], "capacity"
