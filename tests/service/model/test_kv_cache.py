from __future__ import annotations

import pytest
import torch
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.layout import KeyPage, KvLayout
from pageturner.kernels.torch_ops import TorchOps
from pageturner.service.core.outputs import BlockCopies, BlockCopy
from pageturner.service.model.kv_cache import KvCache

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
        KvCache(LAYOUT, 1, 0, TorchOps(KeyPage.TILED16), torch.device("cpu"))
