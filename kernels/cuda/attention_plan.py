"""Which block of a grid does what: planned on the host, once a step and mask, for all layers alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pageturner.kernels.cuda import tiles
from pageturner.kernels.errors import KernelArgumentError

Int32Array = np.ndarray[tuple[int, int], np.dtype[np.int32]]
Ints = np.ndarray[tuple[int], np.dtype[np.integer]]

BLOCKS_PER_MULTIPROCESSOR = 2
"""Decode blocks that run side by side on an SM of Ampere (A100) or Hopper, at least, for every head_dim. Two
have more bytes on their way than keep its share of HBM busy (tiles.DecodeTiles)."""

BLOCK_COST_BYTES = 32_768
"""What a block moves in the time (some 2 us) that it takes to start, to fill its ring, to merge its warps and
to store its result. From the paper, not from a GPU: 4.3 TB/s over 132 SMs of two blocks each."""

LEAST_ITEM = 4
"""A context is cut no finer than so many times the cost of a block: a cut brings more than it costs."""

SHARES = (2.0, 1.5, 1.25, 1.0, 0.5, 0.25, 0.125)
"""Lengths that are tried for an item, as multiples of an even share of the whole work."""


class AttentionShape(NamedTuple):
    """What a plan depends on beside the batch. window, chunk: 0 for none. A key of caches."""

    num_kv_heads: int
    group: int
    head_dim: int
    window: int = 0
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Work of the attention kernels, rows as the structs of arguments.cuh.

    decode_items: int32 [D, 4] (sequence, first_key, end_key, partial), longest first; first_key is a
    multiple of 16, and so is end_key unless it is the end of the sequence. merge_items: int32 [M, 4]
    (sequence, first_partial, num_partials, 0). prefill_tiles: int32 [P, 2] (sequence, first_row), those
    that see the most keys first. num_partials: partial results that the decode items leave.
    """

    decode_items: Int32Array
    merge_items: Int32Array
    prefill_tiles: Int32Array
    num_partials: int


def plan_attention(
    query_start_loc: Ints,
    seq_lens: Ints,
    shape: AttentionShape,
    *,
    num_multiprocessors: int,
    split: int | None = None,
) -> AttentionPlan:
    """query_start_loc [S + 1] and seq_lens [S] as in AttentionBatch, on the host.

    Sequences whose packed rows (rows * group) fit one mma are decoded, the others prefilled. Every
    sequence with rows has its output written, even were there no key to see. split: keys of an item,
    whatever else is in the batch, a multiple of 16; None: chosen so that items fill the machine evenly.
    The plan depends on nothing but the arguments. Raises KernelArgumentError for another split.
    """
    if split is not None and (split < tiles.DECODE_KEYS or split % tiles.DECODE_KEYS):
        raise KernelArgumentError("split", str(split), f"a multiple of {tiles.DECODE_KEYS}")
    counts = np.diff(query_start_loc).astype(np.int64)
    ends = seq_lens.astype(np.int64)
    packed = counts * shape.group
    decoded = np.flatnonzero((packed > 0) & (packed <= tiles.MMA_ROWS))
    prefilled = np.flatnonzero(packed > tiles.MMA_ROWS)
    items, merges, num_partials = _decode_items(
        decoded, (ends - counts)[decoded], ends[decoded], shape, num_multiprocessors, split
    )
    prefill_tiles = _prefill_tiles(prefilled, counts[prefilled], ends[prefilled], shape)
    return AttentionPlan(items, merges, prefill_tiles, num_partials)


def most_decode_items(num_sequences: int, num_kv_heads: int, num_multiprocessors: int) -> int:
    """No plan without a `split` has more decode items, nor more partials: for buffers of a fixed size."""
    slots = num_multiprocessors * BLOCKS_PER_MULTIPROCESSOR
    return num_sequences + int(slots / (num_kv_heads * min(SHARES)))


def block_cost(head_dim: int) -> int:
    """BLOCK_COST_BYTES in key tiles."""
    tile_bytes = 2 * tiles.DECODE_KEYS * head_dim * tiles.ELEMENT_BYTES
    return max(1, BLOCK_COST_BYTES // tile_bytes)


def longest_item(key_tiles: Ints, num_kv_heads: int, cost: int, slots: int) -> int:
    """Into how many key tiles at most contexts of `key_tiles` tiles are cut, for `slots` blocks at a time.

    The candidate with the least bound on its time, whatever the order in which a machine takes up blocks:
    the rounds it takes times the longest block, or an even share of all plus the longest (Graham 1966,
    list scheduling). A block takes its tiles and `cost`; so does the merge of what was cut. Hence
    time <= (1 + min(SHARES)) * share + (LEAST_ITEM + 2 + 1 / min(SHARES)) * cost + 2, where
    share = (all tiles + cost a block uncut) / slots, which no plan can beat.
    """
    longest, work = int(key_tiles.max()), int(key_tiles.sum()) * num_kv_heads
    least = LEAST_ITEM * cost
    if longest <= least:
        return longest
    lengths = np.ceil(np.array(SHARES) * (work / slots)).clip(least, longest)
    lengths = np.concatenate(([float(longest)], lengths))

    pieces = np.ceil(key_tiles / lengths[:, None])
    longest_pieces = np.ceil(key_tiles / pieces).max(axis=1) + cost
    blocks = pieces.sum(axis=1) * num_kv_heads
    shares = (work + blocks * cost) / slots
    times = np.minimum(np.ceil(blocks / slots) * longest_pieces, shares + longest_pieces)
    times += np.where(blocks > len(key_tiles) * num_kv_heads, cost, 0)
    return int(lengths[times.argmin()])


def _decode_items(
    sequences: Ints,
    positions: Ints,
    ends: Ints,
    shape: AttentionShape,
    num_multiprocessors: int,
    split: int | None,
) -> tuple[Int32Array, Int32Array, int]:
    """positions: of each sequence's first row; the keys it sees begin before those of the other rows."""
    if not len(sequences):
        return np.empty((0, 4), np.int32), np.empty((0, 4), np.int32), 0
    begins = _first_keys(positions, shape) // tiles.DECODE_KEYS
    key_tiles = np.maximum(-(-ends // tiles.DECODE_KEYS) - begins, 1)
    if split is None:
        slots = num_multiprocessors * BLOCKS_PER_MULTIPROCESSOR
        length = longest_item(key_tiles, shape.num_kv_heads, block_cost(shape.head_dim), slots)
    else:
        length = split // tiles.DECODE_KEYS
    pieces = -(-key_tiles // length)
    is_split = pieces > 1
    partials = np.where(is_split, pieces, 0)
    first_partials = np.cumsum(partials) - partials

    owner, index = _spread(pieces)
    # Whole tiles, and pieces of one sequence differ by one tile at most.
    first = begins[owner] + index * key_tiles[owner] // pieces[owner]
    end = begins[owner] + (index + 1) * key_tiles[owner] // pieces[owner]
    items = np.empty((len(owner), 4), np.int32)
    items[:, 0] = sequences[owner]
    items[:, 1] = first * tiles.DECODE_KEYS
    items[:, 2] = np.minimum(end * tiles.DECODE_KEYS, ends[owner])
    items[:, 3] = np.where(is_split[owner], first_partials[owner] + index, -1)
    items = items[np.argsort(first - end, kind="stable")]

    merges = np.zeros((int(is_split.sum()), 4), np.int32)
    merges[:, 0] = sequences[is_split]
    merges[:, 1] = first_partials[is_split]
    merges[:, 2] = pieces[is_split]
    return items, merges, int(partials.sum())


def _prefill_tiles(sequences: Ints, counts: Ints, ends: Ints, shape: AttentionShape) -> Int32Array:
    if not len(sequences):
        return np.empty((0, 2), np.int32)
    height = tiles.PREFILL[shape.head_dim].rows
    packed = counts * shape.group
    owner, index = _spread(-(-packed // height))
    first_rows = index * height
    last_rows = np.minimum(first_rows + height, packed[owner]) - 1
    before = (ends - counts)[owner]
    keys = before + last_rows // shape.group + 1 - _first_keys(before + first_rows // shape.group, shape)
    found = np.stack((sequences[owner], first_rows), axis=1).astype(np.int32)
    return found[np.argsort(-keys, kind="stable")]


def _first_keys(positions: Ints, shape: AttentionShape) -> Ints:
    """The first key that a row at each position sees."""
    first = np.maximum(positions - (shape.window - 1), 0) if shape.window else np.zeros_like(positions)
    return np.maximum(first, positions - positions % shape.chunk) if shape.chunk else first


def _spread(counts: Ints) -> tuple[Ints, Ints]:
    """(3, 1) -> owners (0, 0, 0, 1) and, within each, indices (0, 1, 2, 0)."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
