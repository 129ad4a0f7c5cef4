"""Simultaneous block copies as chains of moves that can each be made one after the other.

Pairs (source, destination) have distinct destinations, so every block is written at most once, and the
pairs are the edges of a graph in which each component is a tree, or a cycle with trees growing from it:

    tree    r -> a -> c      r is never overwritten, so each block it is copied to begins a chain:
            r -> b           (a, c) (r, a)   and   (r, b)

    cycle   a -> b -> a      one chain. First the trees, then round the cycle against the arrows, with one
            b -> c           block's bytes carried: (b, c) (a, -) (b, a) (-, b)

A chain overwrites a block only after all moves that read it, and touches no block that another chain
writes: chains may run at the same time, in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

CARRIED = -1
"""The bytes carried from the beginning of a cycle's round to its end."""


class Move(NamedTuple):
    """`BlockMove` of arguments.cuh: source CARRIED writes what is carried, destination CARRIED carries."""

    source: int
    destination: int


def chains_of(pairs: Iterable[tuple[int, int]]) -> list[list[Move]]:
    """As many independent chains as there are, in linear time; the same for the same pairs.

    A block copied to itself is left out.
    """
    source_of = {destination: source for source, destination in pairs if source != destination}
    copies_of: dict[int, list[int]] = {}
    for destination, source in source_of.items():
        copies_of.setdefault(source, []).append(destination)
    done: set[int] = set()

    def overwrite(block: int) -> list[Move]:
        """The moves that end with `block` overwritten: all that read it, directly or not, come before."""
        reached = [block]
        for reader in reached:  # grows on the way
            reached += copies_of.get(reader, ())
        done.update(reached)
        return [Move(source_of[reader], reader) for reader in reversed(reached)]

    roots = [source for source in copies_of if source not in source_of]
    chains = [overwrite(block) for root in roots for block in copies_of[root]]
    for block in source_of:
        if block in done:
            continue
        cycle = _cycle_above(block, source_of)
        done.update(cycle)
        grown = [copy for member in cycle for copy in copies_of[member] if copy not in done]
        trees = [move for copy in grown for move in overwrite(copy)]
        chains.append(trees + _round(cycle))
    return chains


def _cycle_above(block: int, source_of: dict[int, int]) -> list[int]:
    """The cycle that `block` gets its bytes from, each member before its source."""
    path: dict[int, None] = {}
    while block not in path:
        path[block] = None
        block = source_of[block]
    members = list(path)
    return members[members.index(block) :]


def _round(cycle: Sequence[int]) -> list[Move]:
    first, last = cycle[0], cycle[-1]
    steps = [Move(source, member) for member, source in pairwise(cycle)]
    return [Move(first, CARRIED), *steps, Move(CARRIED, last)]
