"""Block tables by hand: the arithmetic of paging, sharing and giving back, with the ids spelled out."""

from __future__ import annotations

import pytest

from pageturner.policies.views import BlockView
from pageturner.service.core.memory.block import OutOfBlocks, Release
from pageturner.service.core.memory.block_manager import BlockManager
from pageturner.service.core.memory.block_pool import BlockPool
from pageturner.service.core.memory.prefix_cache import PrefixHasher
from pageturner.service.core.outputs import BlockCopy
from pageturner.service.core.request import NewRequest, Request, Sequence
from pageturner.service.core.sampling_params import SamplingParams

NOW = Release()


def make_manager(num_blocks: int, block_size: int, num_host_blocks: int = 0) -> BlockManager:
    return BlockManager(
        BlockPool(num_blocks, block_size), BlockPool(num_host_blocks, block_size), PrefixHasher(b"key")
    )


def make_request(manager: BlockManager, num_tokens: int, n: int = 1, first_token: int = 0) -> Request:
    prompt = tuple(range(first_token, first_token + num_tokens))
    new = NewRequest(f"r{first_token}", prompt, SamplingParams(n=n), seed=0, arrival_time=0.0)
    request = Request(new, first_token, 100, manager.root_hash(adapter="", salt=""))
    request.sequences = [Sequence(first_token * 100 + index, request, index) for index in range(n)]
    return request


def fill(manager: BlockManager, sequence: Sequence, num_tokens: int) -> None:
    """Give the sequence blocks and pretend their KV was computed and accepted."""
    manager.grow(sequence, num_tokens)
    sequence.num_kv_tokens = sequence.num_accepted_tokens = num_tokens
    manager.cache_full_blocks(sequence)


def test_six_blocks_of_sixteen() -> None:
    """A of 20 tokens takes 2 blocks, B of 10 takes 1; A grows by 13 to 33 and takes a third."""
    manager = make_manager(6, 16)
    a, b = (make_request(manager, n, first_token=f).sequences[0] for n, f in ((20, 0), (10, 500)))
    manager.grow(a, 20)
    manager.grow(b, 10)
    assert (manager.num_blocks(a), manager.num_blocks(b)) == (2, 1)
    manager.grow(a, 33)
    assert manager.table(a) == (0, 1, 3)
    assert manager.table(b) == (2,)
    assert manager.device.num_available == 2
    manager.check_integrity()


def test_ids_come_back() -> None:
    manager = make_manager(6, 16)
    a, b = (make_request(manager, n, first_token=f).sequences[0] for n, f in ((20, 0), (10, 500)))
    manager.grow(a, 33)
    manager.grow(b, 10)
    manager.free(a, NOW)
    assert manager.device.num_available == 5
    c = make_request(manager, 80, first_token=900).sequences[0]
    manager.grow(c, 80)
    assert set(manager.table(c)) == {0, 1, 2, 4, 5}
    manager.free(b, NOW)
    manager.free(c, NOW)
    assert manager.device.num_available == 6
    manager.check_integrity()


@pytest.mark.parametrize("kept", [(0, 2, 4, 6), (1, 3, 5, 7), (0, 1, 6, 7)])
def test_scattered_free_blocks_always_serve_a_long_prompt(kept: tuple[int, ...]) -> None:
    """No fragmentation: four free blocks hold a prompt of four blocks wherever they lie."""
    manager = make_manager(8, 4)
    singles = [make_request(manager, 4, first_token=100 * i).sequences[0] for i in range(1, 9)]
    for sequence in singles:
        manager.grow(sequence, 4)
    for sequence in singles:
        if manager.table(sequence)[0] not in kept:
            manager.free(sequence, NOW)
    long_prompt = make_request(manager, 16, first_token=5000).sequences[0]
    manager.grow(long_prompt, 16)
    assert set(manager.table(long_prompt)) == set(range(8)) - set(kept)
    with pytest.raises(OutOfBlocks):
        manager.grow(long_prompt, 17)
    assert manager.num_blocks(long_prompt) == 4
    manager.check_integrity()


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(3, 4)
    pool.allocate(2)
    with pytest.raises(OutOfBlocks):
        pool.allocate(2)
    assert (pool.num_free, pool.num_live) == (1, 2)


def test_fork_shares_the_partial_block_and_the_last_writer_writes_in_place() -> None:
    manager = make_manager(6, 4)
    request = make_request(manager, 6, n=3)
    lead, second, third = request.sequences
    fill(manager, lead, 6)
    for child in (second, third):
        manager.fork(lead, child, 6)
    assert manager.table(lead) == manager.table(second) == manager.table(third) == (0, 1)
    assert manager.device.ref_count(1) == 3
    assert manager.prepare_write(lead, 6, NOW) == BlockCopy(1, 2)
    assert manager.prepare_write(second, 6, NOW) == BlockCopy(1, 3)
    assert manager.prepare_write(third, 6, NOW) is None
    assert [manager.table(s) for s in request.sequences] == [(0, 2), (0, 3), (0, 1)]
    assert manager.device.ref_count(0) == 3
    manager.check_integrity()


def test_fork_at_a_full_block_copies_nothing() -> None:
    manager = make_manager(6, 4)
    request = make_request(manager, 8, n=2)
    lead, child = request.sequences
    fill(manager, lead, 8)
    manager.fork(lead, child, 8)
    for sequence in (lead, child):
        assert manager.prepare_write(sequence, 8, NOW) is None
        manager.grow(sequence, 9)
    assert manager.table(lead)[:2] == manager.table(child)[:2]
    assert manager.table(lead)[2] != manager.table(child)[2]
    manager.check_integrity()


def test_a_cached_block_is_uncached_before_its_only_holder_writes_it() -> None:
    manager = make_manager(4, 4)
    sequence = make_request(manager, 4).sequences[0]
    fill(manager, sequence, 4)
    assert manager.device.is_cached(0)
    assert manager.prepare_write(sequence, 3, NOW) is None
    assert not manager.device.is_cached(0)
    manager.check_integrity()


def test_swap_keeps_sharing_and_moves_each_block_once() -> None:
    manager = make_manager(8, 4, num_host_blocks=8)
    request = make_request(manager, 6, n=2)
    lead, child = request.sequences
    fill(manager, lead, 6)
    manager.fork(lead, child, 6)
    child.num_kv_tokens = 6
    out = manager.swap_out(request, NOW)
    assert [copy.source for copy in out] == [0, 1]
    assert not manager.holds_device_blocks(request)
    host = [copy.destination for copy in out]
    assert manager.host_table(lead) == manager.host_table(child) == tuple(host)
    assert manager.host.ref_count(host[1]) == 2
    back = manager.swap_in(request, {}, NOW)
    assert [copy.source for copy in back] == host
    assert manager.table(lead) == manager.table(child)
    assert manager.device.ref_count(manager.table(lead)[1]) == 2
    assert manager.host.num_available == 8
    manager.check_integrity()


def test_swap_out_without_host_room_changes_nothing() -> None:
    manager = make_manager(8, 4, num_host_blocks=1)
    request = make_request(manager, 6)
    fill(manager, request.sequences[0], 6)
    with pytest.raises(OutOfBlocks):
        manager.swap_out(request, NOW)
    assert manager.num_blocks(request.sequences[0]) == 2
    assert manager.host.num_available == 1
    manager.check_integrity()


def test_heads_outlive_tails_in_the_cache() -> None:
    manager = make_manager(4, 4)
    sequence = make_request(manager, 16).sequences[0]
    fill(manager, sequence, 16)
    table = manager.table(sequence)
    manager.free(sequence, NOW)
    assert manager.device.num_evictable == 4
    other = make_request(manager, 8, first_token=700).sequences[0]
    manager.grow(other, 8)
    assert set(manager.table(other)) == set(table[2:])
    again = make_request(manager, 16).sequences[0]
    assert manager.hits(again) == list(table[:2])


def test_partial_blocks_are_reused_before_cached_ones() -> None:
    manager = make_manager(3, 4)
    sequence = make_request(manager, 10).sequences[0]
    fill(manager, sequence, 10)
    partial = manager.table(sequence)[2]
    manager.free(sequence, NOW)
    assert manager.device.allocate(1) == [partial]


def test_a_full_block_whose_content_is_cached_already_is_given_back_for_the_cached_one() -> None:
    manager = make_manager(4, 4)
    first, twin = (make_request(manager, 4).sequences[0] for _ in range(2))
    twin.seq_id = 77
    fill(manager, first, 4)
    fill(manager, twin, 4)
    assert manager.table(twin) == manager.table(first)
    assert manager.device.is_cached(manager.table(first)[0])
    assert (manager.device.num_free, manager.device.num_evictable) == (3, 0)
    manager.free(twin, NOW)
    manager.free(first, NOW)
    assert (manager.device.num_free, manager.device.num_evictable) == (3, 1)
    manager.check_integrity()


@pytest.mark.fault("A")
def test_what_continues_a_cached_chain_is_cached_behind_blocks_of_its_own_table() -> None:
    """Evicted while the longer sequence lives, the shorter one's blocks once left a hole in its chain."""
    manager = make_manager(8, 4)
    shorter, longer = (make_request(manager, 20).sequences[0] for _ in range(2))
    longer.seq_id = 77
    fill(manager, shorter, 8)
    fill(manager, longer, 20)
    manager.free(shorter, Release(now=1.0))
    for block in manager.device.allocate(manager.device.num_available):
        manager.device.release(block, NOW)
    manager.check_integrity()
    found = [manager.device.lookup(manager.block_hash(longer, index)) for index in range(5)]
    assert tuple(found) == manager.table(longer)


@pytest.mark.fault("A")
def test_a_chain_is_evicted_from_its_end_under_any_scores() -> None:
    pool = BlockPool(4, 4, score=lambda view: view.depth)
    blocks = pool.allocate(4)
    for depth, block in enumerate(blocks):
        pool.cache_block(block, bytes([depth]), depth=depth, parent=blocks[depth - 1] if depth else None)
    for block in blocks:
        pool.release(block, NOW)
    for depth in (3, 2, 1, 0):
        assert pool.allocate(1) == [blocks[depth]]
        assert [pool.lookup(bytes([d])) for d in range(depth)] == blocks[:depth]


@pytest.mark.fault("A")
def test_a_block_that_is_uncached_takes_what_continues_it_out_of_the_cache() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(3)
    for depth, block in enumerate(blocks):
        pool.cache_block(block, bytes([depth]), depth=depth, parent=blocks[depth - 1] if depth else None)
    pool.release(blocks[2], NOW)
    pool.uncache_block(blocks[1])
    assert [pool.is_cached(block) for block in blocks] == [True, False, False]
    assert (pool.num_free, pool.num_evictable) == (2, 0)
    assert pool.cache_block(blocks[1], bytes([9]), depth=2, parent=blocks[1]) is None
    pool.check_integrity({blocks[0]: 1, blocks[1]: 1})


def test_a_block_of_an_unfinished_step_is_pending_until_it_ends() -> None:
    pool = BlockPool(2, 4)
    (block,) = pool.allocate(1)
    pool.release(block, Release(fence=5))
    assert (pool.num_pending, pool.num_available) == (1, 1)
    pool.complete(4)
    assert pool.num_pending == 1
    pool.complete(5)
    assert (pool.num_pending, pool.num_available) == (0, 2)


def test_hashes_tell_tags_apart() -> None:
    """Tagged fields: an adapter's name is never another tenant's salt (vllm#44701)."""
    hasher = PrefixHasher(b"key")
    roots = {
        hasher.root(adapter=a, salt=s) for a, s in (("", ""), ("x", ""), ("", "x"), ("xx", ""), ("x", "x"))
    }
    assert len(roots) == 5
    assert hasher.extend(hasher.root(adapter="", salt=""), [1, 2]) != PrefixHasher(b"other").extend(
        PrefixHasher(b"other").root(adapter="", salt=""), [1, 2]
    )


def test_the_smallest_score_is_evicted_first_and_a_revived_block_is_not() -> None:
    scores = {0: 3.0, 1: 1.0, 2: 2.0}

    def score(view: BlockView) -> float:
        return scores[view.block_id]

    pool = BlockPool(3, 4, score)
    for block in pool.allocate(3):
        pool.cache_block(block, bytes([block]), depth=0, parent=None)
        pool.release(block, NOW)
    pool.share(1)
    assert pool.allocate(1) == [2]
    assert pool.lookup(bytes([2])) is None
    assert pool.lookup(bytes([1])) == 1
    assert pool.num_evictions == 1
