"""Bytes to blocks, and the length a model allows."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_meter import FakeMeter

from pageturner.service.config import CacheConfig
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.errors import ConfigError
from pageturner.service.sizes import Bytes
from pageturner.service.startup.sizing import (
    CPU_CACHE_BYTES,
    HostMemory,
    fit_model_len,
    measure_memory,
    size_cache,
    size_gpu_cache,
)

BLOCK = 1 << 20


def test_blocks_asked_for_are_taken_as_they_are() -> None:
    config = CacheConfig(num_blocks=64, swap_space=Bytes(0), block_size=8)
    assert size_cache(config, BLOCK, HostMemory(80 * BLOCK)) == CacheOptions(
        64, block_size=8, num_host_blocks=0, reuse_partial_blocks=True
    )


def test_a_budget_is_rounded_down_to_whole_blocks() -> None:
    config = CacheConfig(kv_cache_memory=Bytes(3 * BLOCK - 1), swap_space=Bytes(5 * BLOCK + 1))
    sized = size_cache(config, BLOCK, HostMemory(1 << 40))
    assert (sized.num_blocks, sized.num_host_blocks) == (2, 5)


@pytest.mark.parametrize(("memory", "num_blocks"), [(1 << 40, CPU_CACHE_BYTES // BLOCK), (16 * BLOCK, 4)])
def test_without_a_budget_a_share_of_the_memory_is_taken(memory: int, num_blocks: int) -> None:
    assert size_cache(CacheConfig(swap_space=Bytes(0)), BLOCK, HostMemory(memory)).num_blocks == num_blocks


def test_a_budget_below_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache\.kv_cache_memory: 512KiB hold not one block of 1MiB"):
        size_cache(CacheConfig(kv_cache_memory=Bytes(BLOCK // 2)), BLOCK, HostMemory(1 << 40))


@pytest.mark.fault("29")
@pytest.mark.parametrize(
    ("config", "key", "figures"),
    [
        (CacheConfig(num_blocks=41), "cache.num_blocks", "41MiB are more than the 40MiB left"),
        (CacheConfig(kv_cache_memory=Bytes(41 * BLOCK)), "cache.kv_cache_memory", "the 40MiB left"),
        (
            CacheConfig(num_blocks=30, swap_space=Bytes(11 * BLOCK)),
            "cache.swap_space",
            "11MiB are more than the 10MiB left beside the pool",
        ),
    ],
)
def test_what_was_stated_and_does_not_fit_beside_the_model_is_refused(
    config: CacheConfig, key: str, figures: str
) -> None:
    memory = HostMemory(64 * BLOCK, in_use=20 * BLOCK)  # and 4 MiB of headroom
    with pytest.raises(ConfigError) as caught:
        size_cache(config, BLOCK, memory, given={"cache.swap_space"})
    assert caught.value.key == key
    assert figures in caught.value.reason
    assert "of the machine's 64MiB, 20MiB are in use" in caught.value.reason


@pytest.mark.fault("29")
@pytest.mark.parametrize("total", [512 << 20, 1 << 30, 1200 << 20, 2 << 30, 64 << 30])
def test_default_pool_and_swap_space_fit_beside_the_model_together(total: int) -> None:
    block_bytes, in_use = 368_640, 400 << 20
    sized = size_cache(CacheConfig(), block_bytes, HostMemory(total, in_use))
    assert sized.num_blocks > 0
    assert (sized.num_blocks + sized.num_host_blocks) * block_bytes + in_use < total
    is_ample = total == 64 << 30
    assert (sized.num_host_blocks == (1 << 30) // block_bytes) is is_ample


@pytest.mark.fault("29")
def test_a_machine_that_the_model_fills_is_refused_with_the_figures() -> None:
    reason = r"0 bytes hold not one block of 1MiB; of the machine's 64MiB, 64MiB are in use"
    with pytest.raises(ConfigError, match=reason):
        size_cache(CacheConfig(), BLOCK, HostMemory(64 * BLOCK, in_use=64 * BLOCK))


def test_the_default_length_yields_to_the_model_and_a_given_one_does_not() -> None:
    options = SchedulerOptions(max_model_len=2048)
    assert fit_model_len(options, 1024, given=()).max_model_len == 1024
    assert fit_model_len(options, 4096, given={"scheduler.max_model_len"}) is options
    with pytest.raises(ConfigError, match=r"scheduler\.max_model_len: 2048 is more than the 1024"):
        fit_model_len(options, 1024, given={"scheduler.max_model_len"})


def meter_with(activations: int | None) -> FakeMeter:
    return FakeMeter(BLOCK, size=80, weights=25, others=5, activations=activations)


def on_gpu(config: CacheConfig, activations: int = 10, machine: int = 1 << 40) -> CacheOptions:
    meter = meter_with(activations)
    memory = measure_memory(meter, lambda: None)
    assert meter.num_runs == 1
    return size_gpu_cache(config, BLOCK, memory, HostMemory(machine), given={"cache.swap_space"})


def test_a_gpu_gives_what_its_share_leaves_beside_weights_and_activations() -> None:
    config = CacheConfig(gpu_memory_utilization=0.75, swap_space=Bytes(3 * BLOCK))
    assert on_gpu(config) == CacheOptions(20, block_size=16, num_host_blocks=3, reuse_partial_blocks=True)
    assert on_gpu(CacheConfig(gpu_memory_utilization=1.0, swap_space=Bytes(0))).num_blocks == 40


@pytest.mark.parametrize("given", [{"num_blocks": 40}, {"kv_cache_memory": Bytes(40 * BLOCK + 5)}])
def test_what_was_asked_for_may_go_over_the_share_but_not_over_the_gpu(given: dict[str, Any]) -> None:
    config = CacheConfig(gpu_memory_utilization=0.1, swap_space=Bytes(0), **given)
    assert on_gpu(config, activations=9).num_blocks == 40
    (key,) = given
    with pytest.raises(ConfigError, match=r"40MiB are more than the 39MiB left: .* 11MiB") as e:
        on_gpu(config, activations=11)
    assert e.value.key == f"cache.{key}"


def test_a_share_that_leaves_no_block_is_refused_with_the_figures() -> None:
    with pytest.raises(ConfigError) as caught:
        on_gpu(CacheConfig(gpu_memory_utilization=0.5))
    assert str(caught.value) == (
        "cache.gpu_memory_utilization: 0 bytes hold not one block of 1MiB: of the GPU's 80MiB, weights take "
        "25MiB, others 5MiB, and activations 10MiB; the share is 0.5"
    )


def test_a_step_that_does_not_fit_beside_the_weights_is_refused_by_its_bound() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.max_num_batched_tokens: .* 50MiB that"):
        measure_memory(meter_with(None), lambda: None)


def test_swap_space_is_the_machine_s_memory_on_a_gpu_too() -> None:
    with pytest.raises(ConfigError, match=r"cache\.swap_space: 65MiB are more than the 60MiB left"):
        on_gpu(CacheConfig(swap_space=Bytes(65 * BLOCK)), machine=64 * BLOCK)
