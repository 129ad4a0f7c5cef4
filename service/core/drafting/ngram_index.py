"""Finds where the last tokens of a sequence stood before, and what followed them there.

An answer that edits, quotes or sums up its prompt repeats stretches of it; so does code. What followed the
last few tokens where they stood before is then a good guess at what follows now (A. Saxena, "Prompt Lookup
Decoding", 2023). It is found as LZ77 coders find their matches: hash chains (RFC 1951, section 4).
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

MAX_CANDIDATES = 16
"""Earlier places that are looked at, the latest first."""

MAX_NEW_TOKENS = 4096
"""Tokens of a sequence that are entered in one call: about a millisecond."""

_FEWEST_HEADS, _MOST_HEADS = 1 << 6, 1 << 15


class Drafts(NamedTuple):
    """Tokens that may follow, none where there is no guess. is_whole: as many tokens before them matched as
    are looked at, which makes them likelier."""

    token_ids: tuple[int, ...] = ()
    is_whole: bool = False


NO_DRAFTS = Drafts()


class NgramIndex:
    """The n-grams of one sequence by a hash of their last min_ngram tokens, those that are alike chained.

    tokens: of the sequence; they are only appended to. min_ngram: fewer equal tokens are no match.
    max_ngram: more equal tokens make no match better. max_tokens: how long the sequence may become.

    A new token takes some 0.3 us, a search about as much for each candidate; 8 bytes a token are kept.
    """

    __slots__ = ("_heads", "_max_ngram", "_min_ngram", "_previous", "_tokens")

    def __init__(self, tokens: list[int], min_ngram: int, max_ngram: int, max_tokens: int) -> None:
        num_heads = 1 << max(_FEWEST_HEADS, min(_MOST_HEADS, max_tokens)).bit_length() - 1
        self._tokens = tokens
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        self._heads = array("i", (-1,)) * num_heads  # by hash: where such an n-gram ended last
        self._previous = array("i")  # by place: where an n-gram of the same hash ended before

    def propose(self, limit: int) -> Drafts:
        """`limit` tokens, at least 1, that may follow; none where nothing alike stood before.

        Of the candidates the longest match wins, and the latest of equals. A match that reaches the end of
        the sequence goes on with what it proposes itself: what repeats is taken to go on repeating.
        """
        tokens = self._tokens
        last = len(tokens) - 1
        if not self._enter(last) or last < self._min_ngram:
            return NO_DRAFTS
        place, longest, longest_place = self._heads[self._hash(last)], self._min_ngram - 1, -1
        for _ in range(MAX_CANDIDATES):
            if place < 0:
                break
            length = self._match_length(place, last)
            if length > longest:
                longest, longest_place = length, place
                if length == self._max_ngram:
                    break
            place = self._previous[place]
        if longest_place < 0:
            return NO_DRAFTS
        first, period = longest_place + 1, last - longest_place
        if limit <= period:
            following = tuple(tokens[first : first + limit])
        else:
            following = tuple(tokens[first + i % period] for i in range(limit))
        return Drafts(following, longest == self._max_ngram)

    def _enter(self, end: int) -> bool:
        """Enter the n-grams that end before `end`, some of them at a time; whether all are in."""
        heads, previous, hash_of = self._heads, self._previous, self._hash
        first = len(previous)
        for place in range(first, min(end, first + MAX_NEW_TOKENS)):
            if place < self._min_ngram - 1:
                previous.append(-1)
                continue
            head = hash_of(place)
            previous.append(heads[head])
            heads[head] = place
        return len(previous) >= end

    def _hash(self, place: int) -> int:
        """Of the n-gram that ends at `place`. The hash of whole numbers is the same in every process."""
        ngram = self._tokens[place + 1 - self._min_ngram : place + 1]
        return hash(tuple(ngram)) & (len(self._heads) - 1)

    def _match_length(self, place: int, last: int) -> int:
        """How many tokens up to `place` are those up to `last`; at most max_ngram."""
        tokens = self._tokens
        length, most = 0, min(self._max_ngram, place + 1)
        while length < most and tokens[place - length] == tokens[last - length]:
            length += 1
        return length
