"""Simultaneous copies as chains: what they come to, that chains do not meet, and how many there are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageturner.kernels.cuda.block_moves import CARRIED, Move, chains_of

Pairs = list[tuple[int, int]]


@st.composite
def simultaneous_pairs(draw: st.DrawFn, most: int = 12) -> Pairs:
    """Any pairs with distinct destinations: trees, cycles, cycles with trees, copies to itself."""
    num_blocks = draw(st.integers(1, most))
    blocks = st.integers(0, num_blocks - 1)
    destinations = draw(st.lists(blocks, unique=True, max_size=num_blocks))
    return [(draw(blocks), destination) for destination in destinations]


def copied_at_once(pairs: Pairs) -> dict[int, int]:
    """What each destination holds afterwards, of blocks that hold their own number."""
    return {destination: source for source, destination in pairs}


def walk(blocks: dict[int, int], chain: Sequence[Move]) -> Iterator[None]:
    """As one thread of copy_blocks walks a chain; stops after each move."""
    carried: int | None = None
    for source, destination in chain:
        if destination == CARRIED:
            carried = blocks.get(source, source)
        elif source == CARRIED:
            assert carried is not None
            blocks[destination] = carried
        else:
            blocks[destination] = blocks.get(source, source)
        yield


def read(chain: Sequence[Move]) -> set[int]:
    return {move.source for move in chain} - {CARRIED}


def written(chain: Sequence[Move]) -> set[int]:
    return {move.destination for move in chain} - {CARRIED}


@given(simultaneous_pairs(), st.integers(0, 2**32))
def test_chains_come_to_the_simultaneous_copies_however_they_interleave(pairs: Pairs, seed: int) -> None:
    blocks: dict[int, int] = {}
    walkers = [walk(blocks, chain) for chain in chains_of(pairs)]
    choose = random.Random(seed)
    while walkers:
        walker = choose.choice(walkers)
        try:
            next(walker)
        except StopIteration:
            walkers.remove(walker)
    changed = {block: source for block, source in copied_at_once(pairs).items() if block != source}
    assert blocks == changed


@given(simultaneous_pairs())
def test_no_chain_touches_what_another_writes(pairs: Pairs) -> None:
    chains = chains_of(pairs)
    for chain in chains:
        for other in chains:
            if other is not chain:
                assert not written(chain) & (read(other) | written(other))


@given(simultaneous_pairs())
def test_there_are_as_many_chains_as_can_be(pairs: Pairs) -> None:
    """Two moves must be in order where one overwrites what the other reads; the parts that this ties
    together cannot be cut."""
    destinations = {destination for source, destination in pairs if source != destination}
    part = {destination: {destination} for destination in destinations}
    for source, destination in pairs:
        if source != destination and source in destinations:
            joined = part[source] | part[destination]
            part.update(dict.fromkeys(joined, joined))
    assert len(chains_of(pairs)) == len({frozenset(members) for members in part.values()})


@given(simultaneous_pairs())
def test_a_move_a_pair_and_two_more_a_cycle(pairs: Pairs) -> None:
    """No block is copied more often than asked; what a cycle carries, it puts down again."""
    moves = [move for chain in chains_of(pairs) for move in chain]
    carries = [move for move in moves if move.destination == CARRIED]
    assert len(carries) == len([move for move in moves if move.source == CARRIED])
    assert len(moves) == len([pair for pair in pairs if pair[0] != pair[1]]) + len(carries)
    for chain in chains_of(pairs):
        assert len([move for move in chain if move.destination == CARRIED]) <= 1


@pytest.mark.parametrize(
    ("pairs", "chains"),
    [
        ([], []),
        ([(3, 3)], []),
        ([(0, 1)], [[(0, 1)]]),
        ([(0, 1), (0, 2)], [[(0, 1)], [(0, 2)]]),
        ([(0, 1), (1, 2)], [[(1, 2), (0, 1)]]),
        ([(0, 1), (1, 0)], [[(1, -1), (0, 1), (-1, 0)]]),
        ([(0, 1), (1, 0), (1, 2)], [[(1, 2), (1, -1), (0, 1), (-1, 0)]]),
        ([(4, 4), (4, 5), (5, 6)], [[(5, 6), (4, 5)]]),
    ],
)
def test_pairs_are_ordered_in_chains(pairs: Pairs, chains: list[Pairs]) -> None:
    assert chains_of(pairs) == chains


def test_long_chains_and_cycles_take_linear_time_and_no_stack() -> None:
    num_blocks = 50_000
    line = [(block, block + 1) for block in range(num_blocks)]
    (chain,) = chains_of(line)
    assert chain == line[::-1]
    (ring,) = chains_of([*line, (num_blocks, 0)])
    assert len(ring) == num_blocks + 2
