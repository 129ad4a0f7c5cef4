"""Shards cover a model once, in order; what can't be cut is refused with its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.random_models import tiny_config

from pageturner.service.errors import ConfigError
from pageturner.service.model.decoder_config import DecoderConfig, parse_decoder_config
from pageturner.service.model.tensor_parallel.shards import UNIT, Shard, plan_shards, split


def config_of(
    heads: int = 8, kv_heads: int = 4, inner: int = 96, vocabulary: int = 128, hidden: int = 64
) -> DecoderConfig:
    tiny = parse_decoder_config(tiny_config("llama").to_dict())
    return replace(
        tiny,
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        hidden_size=hidden,
    )


def check_plan(config: DecoderConfig, shards: Sequence[Shard]) -> None:
    """What every plan owes."""
    assert [shard.rank for shard in shards] == list(range(len(shards)))
    assert {shard.size for shard in shards} == {len(shards)}
    for ranges, total in (
        ([shard.heads for shard in shards], config.num_heads),
        ([shard.inner for shard in shards], config.intermediate_size),
        ([shard.vocabulary for shard in shards], config.vocab_size),
        ([shard.hidden for shard in shards], config.hidden_size),
    ):
        assert all(ranges)
        assert list(chain.from_iterable(ranges)) == list(range(total))
    group = config.num_heads // config.num_kv_heads
    for shard in shards:
        # Each query head finds the KV head that it reads, where its kernel will look for it.
        own = len(shard.heads) // len(shard.kv_heads)
        assert len(shard.heads) == own * len(shard.kv_heads)
        for place, head in enumerate(shard.heads):
            assert shard.kv_heads[place // own] == head // group
    sharers = max(1, len(shards) // config.num_kv_heads)
    kv_heads = list(chain.from_iterable(shard.kv_heads for shard in shards))
    assert kv_heads == [head for head in range(config.num_kv_heads) for _ in range(sharers)]


SIZES = st.integers(1, 1000)


@given(
    kv_heads=st.integers(1, 16),
    group=st.integers(1, 8),
    inner=SIZES,
    vocabulary=SIZES,
    hidden=SIZES,
    size=st.integers(1, 16),
)
def test_shards_cover_every_part_once_in_order(
    kv_heads: int, group: int, inner: int, vocabulary: int, hidden: int, size: int
) -> None:
    config = config_of(kv_heads * group, kv_heads, inner, vocabulary, hidden)
    fits = size <= kv_heads or not (size % kv_heads or config.num_heads % size)
    if fits and size <= min(inner, vocabulary, hidden):
        check_plan(config, plan_shards(config, size))
    else:
        with pytest.raises(ConfigError):
            plan_shards(config, size)


@given(total=st.integers(0, 500), size=st.integers(1, 20), unit=st.integers(1, 40))
def test_parts_are_as_even_as_units_allow(total: int, size: int, unit: int) -> None:
    parts = split(total, size, unit)
    assert list(chain.from_iterable(parts)) == list(range(total))
    assert all(part.start % unit == 0 for part in parts if part)
    units = [-(-len(part) // unit) for part in parts]
    assert max(units) - min(units) <= 1


def test_a_shard_is_a_model_of_its_own_sizes() -> None:
    config = config_of(9, 3, 96, 1000, 576)
    first, second = plan_shards(config, 2)
    assert (first.heads, first.kv_heads) == (range(3), range(1))
    assert (second.heads, second.kv_heads) == (range(3, 9), range(1, 3))
    assert (first.inner, second.inner) == (range(48), range(48, 96))
    assert (first.hidden, second.hidden) == (range(288), range(288, 576))
    assert first.vocabulary.stop == second.vocabulary.start == 31 * UNIT
    own = second.config(config)
    assert (own.num_heads, own.num_kv_heads, own.intermediate_size, own.vocab_size) == (6, 2, 48, 504)
    assert own.qkv_sizes == [6 * own.head_dim, 2 * own.head_dim, 2 * own.head_dim]
    assert second.describe(config) == (
        "heads 3 to 8 of 9, KV heads 1 to 2 of 3, inner features 48 to 95 of 96, tokens 496 to 999 of 1000"
    )


@pytest.mark.parametrize(
    ("config", "size", "reason"),
    [
        (config_of(9, 3), 4, "4 ranks: the model has 9 heads that read 3 KV heads: .* 3 must divide"),
        (config_of(8, 2), 16, "16 ranks: the model has 8 heads that read 2 KV heads"),
        (config_of(12, 2), 8, "8 ranks: the model has 12 heads"),
        (config_of(8, 8, 7), 8, "8 ranks: the model has 7 inner features, and each rank needs some"),
        (config_of(8, 8, 256, 5), 8, "8 ranks: the model has 5 tokens"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_its_numbers(
    config: DecoderConfig, size: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"model.tensor_parallel_size: {reason}"):
        plan_shards(config, size)
