from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lazy_streams import LazyStream, lazy_copies

from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.layout import KeyOrder, KvLayout
from pageturner.kernels.torch_ops import TorchOps
from pageturner.service.core.outputs import BlockCopies, BlockCopy, ScheduledSequence, SchedulerOutput
from pageturner.service.model.batch import build_batch
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.model.streams import Streams

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=2, dtype=torch.float32)


@pytest.fixture
def cache() -> KvCache:
    """Four device blocks holding 0 1 2 3 and three host blocks holding 10 11 12."""
    cache = KvCache(LAYOUT, 4, 3, TorchOps(), torch.device("cpu"))
    for block in range(4):
        cache.pool[block] = block
    for block in range(3):
        cache.host_pool[block] = 10 + block
    return cache


def contents(pool: torch.Tensor) -> list[float]:
    """The one number that fills each block; fails when a block was only partly moved."""
    numbers = pool.flatten(1)
    assert torch.equal(numbers, numbers[:, :1].expand_as(numbers))
    return numbers[:, 0].tolist()


def copies(*pairs: tuple[int, int]) -> tuple[BlockCopy, ...]:
    return tuple(BlockCopy(source, destination) for source, destination in pairs)


def test_pools_are_apart() -> None:
    cache = KvCache(LAYOUT, 4, 3, TorchOps(), torch.device("cpu"))
    assert (cache.num_blocks, cache.num_host_blocks) == (4, 3)
    assert cache.pool.data_ptr() != cache.host_pool.data_ptr()


def test_a_layer_is_a_view(cache: KvCache) -> None:
    cache.layer(1)[2] = 7
    assert bool((cache.pool[2, 0] == 2).all())
    assert bool((cache.pool[2, 1] == 7).all())


def test_order_clears_outs_ins_copies(cache: KvCache) -> None:
    """Each kind meets a block that the one before it touched."""
    cache.apply(
        BlockCopies(
            clears=(0,),
            swap_outs=copies((0, 0), (1, 2)),
            swap_ins=copies((2, 1), (0, 2)),
            copies=copies((2, 3), (1, 0)),
        )
    )
    assert contents(cache.host_pool) == [0, 11, 1]
    assert contents(cache.pool) == [1, 1, 0, 0]


def test_a_block_swapped_out_may_be_swapped_in_to(cache: KvCache) -> None:
    cache.apply(BlockCopies(swap_outs=copies((1, 0)), swap_ins=copies((1, 1))))
    assert contents(cache.pool) == [0, 11, 2, 3]
    assert contents(cache.host_pool) == [1, 11, 12]


def test_copies_are_simultaneous(cache: KvCache) -> None:
    cache.apply(BlockCopies(copies=copies((0, 1), (1, 2), (2, 0))))
    assert contents(cache.pool) == [2, 0, 1, 3]


@pytest.mark.parametrize(
    "bad",
    [
        BlockCopies(clears=(1,), copies=copies((0, 4))),
        BlockCopies(clears=(1,), swap_outs=copies((0, 3))),
        BlockCopies(clears=(1,), swap_ins=copies((-1, 0))),
        BlockCopies(clears=(1, 4)),
        BlockCopies(clears=(1,), copies=copies((0, 2), (1, 2))),
    ],
)
def test_a_bad_id_moves_nothing(cache: KvCache, bad: BlockCopies) -> None:
    with pytest.raises(KernelArgumentError):
        cache.apply(bad)
    assert contents(cache.pool) == [0, 1, 2, 3]
    assert contents(cache.host_pool) == [10, 11, 12]


def test_no_host_pool() -> None:
    cache = KvCache(LAYOUT, 4, 0, TorchOps(), torch.device("cpu"))
    cache.apply(BlockCopies(copies=copies((0, 1))))
    with pytest.raises(KernelArgumentError):
        cache.apply(BlockCopies(swap_outs=copies((0, 0))))


def test_sizes_and_key_order_are_checked() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        KvCache(LAYOUT, 0, 0, TorchOps(), torch.device("cpu"))
    with pytest.raises(ValueError, match="operations want"):
        KvCache(LAYOUT, 1, 0, TorchOps(KeyOrder.TILED16), torch.device("cpu"))


def pairs_of(num_sources: int, num_destinations: int) -> st.SearchStrategy[tuple[BlockCopy, ...]]:
    pair = st.builds(BlockCopy, st.integers(0, num_sources - 1), st.integers(0, num_destinations - 1))
    return st.lists(pair, max_size=2, unique_by=lambda pair: pair.destination).map(tuple)


CLEARS = st.lists(st.integers(0, 3), max_size=1).map(tuple)
TRAFFIC = st.builds(BlockCopies, CLEARS, pairs_of(4, 3), pairs_of(3, 4), pairs_of(4, 4))
TABLE = st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True).map(tuple)


def await_tables(cache: KvCache, *tables: tuple[int, ...]) -> None:
    """Begin a step of sequences that fill these blocks to their end."""
    parts = []
    for table in tables:
        tokens = (0,) * (len(table) * LAYOUT.block_size)
        parts.append(ScheduledSequence(0, "0", 0, tokens, 0, 0, table, ()))
    batch = build_batch(SchedulerOutput(0, tuple(parts)), LAYOUT.block_size, cache.device, lambda _: 0)
    cache.await_copies(batch.attention)


def fill(cache: KvCache, table: tuple[int, ...], value: float) -> None:
    """What a step of one sequence does to its blocks."""
    await_tables(cache, table)
    cache.fences._streams.compute.run(lambda: cache.pool.__setitem__(list(table), value))


@settings(deadline=None)
@given(st.lists(st.tuples(TRAFFIC, TABLE), max_size=6), st.booleans())
def test_swaps_beside_the_computation_move_what_they_move_at_once(
    steps: list[tuple[BlockCopies, tuple[int, ...]]], computes_at_once: bool
) -> None:
    streams = lazy_copies() if computes_at_once else Streams(LazyStream(), LazyStream())
    beside = KvCache(LAYOUT, 4, 3, TorchOps(), torch.device("cpu"), streams)
    at_once = KvCache(LAYOUT, 4, 3, TorchOps(), torch.device("cpu"))
    for cache in (beside, at_once):
        cache.pool[:], cache.host_pool[:] = -1, -2
    for number, (traffic, table) in enumerate(steps):
        for cache in (beside, at_once):
            cache.apply(traffic)
            fill(cache, table, number)
    for stream in (streams.compute, streams.copies):
        if isinstance(stream, LazyStream):
            stream.finish()
    assert contents(beside.pool) == contents(at_once.pool)
    assert contents(beside.host_pool) == contents(at_once.host_pool)


def test_only_a_step_that_touches_a_swapped_block_waits() -> None:
    streams = lazy_copies()
    assert isinstance(streams.copies, LazyStream)
    cache = KvCache(LAYOUT, 8, 3, TorchOps(), torch.device("cpu"), streams)
    cache.pool.fill_(math.nan)
    cache.apply(BlockCopies(swap_outs=copies((5, 0))))
    cache.apply(BlockCopies(swap_outs=copies((6, 1), (0, 2))))
    await_tables(cache, (3, 7), (2,))
    # Block 0, which pads the shorter table, is not read there.
    assert (cache.fences.fenced, streams.copies.num_done) == ([0, 5, 6], 0)
    fill(cache, (5,), 1)
    assert cache.fences.fenced == [0, 6]
    fill(cache, (6,), 1)
    assert (cache.fences.fenced, cache.fences.num_events) == ([], 0)
    assert torch.equal(cache.host_pool[:2].isnan(), torch.ones_like(cache.host_pool[:2], dtype=torch.bool))
