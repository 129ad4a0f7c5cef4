"""Prompts in chunks of many tokens: the digests that routers and the coarse replica tell prefixes by."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pageturner.service.simulator.workload import Segment, WorkloadRequest


@dataclass(frozen=True, slots=True)
class Chain:
    """Of a prompt and its answer: a digest for every full chunk. num_prompt: how many are the prompt's."""

    digests: tuple[int, ...]
    num_prompt: int


class Chains:
    """The chain of each request of a workload. The last one is kept, since router and replica both ask."""

    def __init__(self, requests: Sequence[WorkloadRequest], chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        self._requests = requests
        self._last: tuple[int, Chain] = (-1, Chain((), 0))

    def of(self, index: int) -> Chain:
        """Of the request at `index`."""
        last, chain = self._last
        if last != index:
            request = self._requests[index]
            digests = digests_of((*request.prompt, request.output), self.chunk_tokens)
            chain = Chain(digests, request.num_prompt_tokens // self.chunk_tokens)
            self._last = index, chain
        return chain


def digests_of(segments: Iterable[Segment], chunk_tokens: int) -> tuple[int, ...]:
    """A digest for every full chunk, which names all tokens up to its end. Two runs of segments share as many
    as they share chunks from the start."""
    digests: list[int] = []
    digest, room = 0, chunk_tokens
    for segment in segments:
        start, end = 0, segment.num_tokens
        while end - start >= room:
            digest = hash((digest, segment.key, start, room))
            digests.append(digest)
            start += room
            room = chunk_tokens
        if start < end:
            digest = hash((digest, segment.key, start, end - start))
            room -= end - start
    return tuple(digests)


class ChunkCache:
    """The prefix cache of a coarse replica: chunks that requests hold, and chunks that may be overwritten.

    The longest unused goes first, tails before heads, as the scheduler's block manager evicts under `lru`.
    """

    def __init__(self) -> None:
        self._held: dict[int, int] = {}  # how many requests hold it
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_held(self) -> int:
        """Chunks that some request holds."""
        return len(self._held)

    def num_hits(self, digests: Sequence[int]) -> int:
        """How many of the chain, from the first on, are there."""
        held, idle, count = self._held, self._idle, 0
        for digest in digests:
            if digest not in held and digest not in idle:
                break
            count += 1
        return count

    def num_new(self, digests: Sequence[int]) -> int:
        """How many of these would be held in addition, if a request took them all."""
        held = self._held
        return sum(digest not in held for digest in digests)

    def hold(self, digests: Sequence[int]) -> None:
        """A request takes them, those that are there and those that it will compute."""
        held, idle = self._held, self._idle
        for digest in digests:
            count = held.get(digest)
            if count is None:
                held[digest] = 1
                idle.pop(digest, None)
            else:
                held[digest] = count + 1

    def release(self, digests: Sequence[int], num_computed: int) -> None:
        """A request lets go of what it held. num_computed: so many, from the first on, hold something."""
        held, idle = self._held, self._idle
        for position in range(len(digests) - 1, -1, -1):
            digest = digests[position]
            count = held[digest]
            if count > 1:
                held[digest] = count - 1
                continue
            del held[digest]
            if position < num_computed:
                idle[digest] = None

    def add(self, digests: Sequence[int]) -> None:
        """Chunks that a request filled and does not hold any more, of one chain, tails of what is there."""
        held, idle = self._held, self._idle
        for digest in reversed(digests):
            if digest not in held:
                idle[digest] = None
                idle.move_to_end(digest)

    def shrink(self, num_idle: int) -> None:
        """Overwrite what is over so many chunks that no request holds."""
        idle = self._idle
        for _ in range(len(idle) - max(0, num_idle)):
            idle.popitem(last=False)
