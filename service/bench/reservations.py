"""How systems without paging set KV memory aside: one run of slots a request, for its whole life.

The three contenders of the PagedAttention paper (Kwon et al., 2023, section 6.1, after Orca): room for the
longest sequence that the model allows; for the prompt and the next power of two of the answer's length,
which takes an estimate within a factor of two for granted; and for exactly what will be needed, which takes
an oracle. Runs are kept in whole blocks of the pool and given best fit first, which wastes less than the
paper's buddy allocator.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from pageturner.service.core.memory.block_manager import blocks_for
from pageturner.service.core.memory.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prompt, of the answer that is to come, and of the longest sequence."""

    prompt: int
    answer: int
    longest: int


Demand = Callable[[Lengths], int]
"""Tokens to set aside for a request."""


def next_power_of_two(lengths: Lengths) -> int:
    """Room for the prompt and the next power of two of the answer."""
    return min(lengths.longest, lengths.prompt + (1 << (lengths.answer - 1).bit_length()))


DEMANDS: Mapping[str, Demand] = {
    "max length": lambda lengths: lengths.longest,
    "power of two": next_power_of_two,
    "oracle": lambda lengths: lengths.prompt + lengths.answer,
}


class RunAllocator:
    """Takes every block of `pool`, and hands out runs of consecutive ids.

    A run's blocks have one reference each, which a table takes over; whoever gives the table up returns them
    to the pool by the pool's own means, and `collect` takes them in again.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._free: list[int] = []
        self.collect()

    @property
    def num_free(self) -> int:
        """Blocks in no table, in runs of whatever length."""
        return len(self._free)

    def collect(self) -> None:
        """Take in what was given back."""
        for block_id in self._pool.allocate(self._pool.num_available):
            insort(self._free, block_id)

    def take(self, num_tokens: int) -> list[int] | None:
        """The blocks of the shortest run that holds so many tokens, its first of the length that they need;
        None if there is no such run."""
        count = blocks_for(num_tokens, self._pool.block_size)
        fitting = [run for run in self._runs() if len(run) >= count]
        if not fitting:
            return None
        first = min(fitting, key=len).start
        taken = set(range(first, first + count))
        self._free = [block_id for block_id in self._free if block_id not in taken]
        return sorted(taken)

    def _runs(self) -> Iterable[range]:
        if not self._free:
            return
        start = self._free[0]
        for block_id, after in pairwise([*self._free, -1]):
            if after != block_id + 1:
                yield range(start, block_id + 1)
                start = after
