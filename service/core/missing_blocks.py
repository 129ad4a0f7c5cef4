"""Which blocks of a prompt a server has another compute, in a service as in the simulator.

As in Dynamo's conditional disaggregation: a prompt of which few tokens are lacking is computed where it is
decoded, since their transfer would take as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Arrivals(Protocol):
    """Blocks that came from other servers and that no request has taken yet."""

    @property
    def capacity(self) -> int:
        """How many lie there at most."""
        ...

    def holds(self, block_hash: bytes) -> bool:
        """Whether a block is among them."""
        ...


@dataclass(frozen=True, slots=True)
class MissingBlocks:
    """num_here: of the prompt's first blocks. hashes: of those behind them that are to be had, none where the
    prompt is computed here."""

    num_here: int
    hashes: Sequence[bytes]


def missing_blocks(
    hashes: Sequence[bytes],
    num_held: int,
    arrivals: Arrivals,
    *,
    num_tokens: int,
    block_size: int,
    min_tokens: int,
) -> MissingBlocks:
    """hashes: of the prompt's full blocks, but for the last token, which is computed here for its logits.
    num_held: of them the first that the pools hold. min_tokens: of which fewer are computed here.

    No more are asked for than have room among the arrivals: the first would have given way to the last.
    """
    num_here = num_held
    while num_here < len(hashes) and arrivals.holds(hashes[num_here]):
        num_here += 1
    if num_tokens - num_here * block_size < min_tokens:
        return MissingBlocks(num_here, ())
    return MissingBlocks(num_here, hashes[num_here:][: arrivals.capacity])
