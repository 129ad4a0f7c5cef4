"""`pageturner plan`: numbers worked out by hand and in the literature, exactly."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pageturner.kernels.layout import KvLayout
from pageturner.service.cli import main
from pageturner.service.commands.kv_plan import (
    KvPlan,
    ModelShape,
    plan_from_config,
    render,
    shape_in,
    to_json,
)
from pageturner.service.core.scheduling.intake import Room
from pageturner.service.errors import ConfigError

LLAMA_7B = ModelShape(num_layers=32, num_kv_heads=32, head_dim=128, dtype_bytes=2)
LLAMA_70B = ModelShape(num_layers=80, num_kv_heads=8, head_dim=128, dtype_bytes=2)
LLAMA_70B_WITHOUT_GQA = ModelShape(num_layers=80, num_kv_heads=64, head_dim=128, dtype_bytes=2)

SMOLLM2 = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "torch_dtype": "bfloat16",
}


def test_a_7b_model_with_a_batch_of_16_at_32k_takes_256_gib() -> None:
    plan = KvPlan(LLAMA_7B, request_tokens=32_768, batch=16)
    assert plan.bytes_per_token == 524_288
    assert plan.bytes_per_batch == 274_877_906_944
    assert plan.batch * plan.paged_bytes_per_request == 274_877_906_944


def test_a_70b_model_with_and_without_grouped_heads() -> None:
    plan = KvPlan(LLAMA_70B_WITHOUT_GQA, request_tokens=2_048, batch=32)
    assert plan.bytes_per_token == 2_621_440
    assert plan.bytes_per_batch == 171_798_691_840
    assert LLAMA_70B.bytes_per_token == 327_680


def test_contiguous_against_paged() -> None:
    plan = KvPlan(LLAMA_7B, request_tokens=100, block_size=16, max_model_len=2048, budget_bytes=10 << 30)
    assert plan.bytes_per_block == 8_388_608
    assert plan.blocks_per_request == 7
    assert plan.paged_bytes_per_request == 7 * 8_388_608
    assert plan.contiguous_bytes_per_request == 1 << 30
    assert plan.num_blocks == 1280
    assert plan.contiguous_requests == 10
    assert plan.paged_requests == 182  # 1280 // 7
    assert plan.paged_waste == 12 / 112
    assert plan.contiguous_waste == 1948 / 2048


def test_without_a_budget_nothing_is_said_of_what_fits() -> None:
    plan = KvPlan(LLAMA_7B, request_tokens=100)
    assert (plan.num_blocks, plan.contiguous_requests, plan.paged_requests) == (None, None, None)
    assert plan.contiguous_waste == 0.0


@given(
    tokens=st.integers(1, 10_000),
    block_size=st.integers(1, 256),
    slack=st.integers(0, 10_000),
    budget=st.integers(0, 1 << 40),
)
def test_paging_wastes_less_than_a_block_and_fits_the_budget(
    tokens: int, block_size: int, slack: int, budget: int
) -> None:
    plan = KvPlan(LLAMA_70B, tokens, 1, block_size, tokens + slack, budget)
    wasted = plan.paged_bytes_per_request - plan.bytes_per_request
    assert 0 <= wasted < plan.bytes_per_block
    assert plan.paged_requests is not None
    assert plan.contiguous_requests is not None
    assert plan.paged_requests * plan.paged_bytes_per_request <= budget
    assert (plan.paged_requests + 1) * plan.paged_bytes_per_request > budget - plan.bytes_per_block
    assert plan.contiguous_requests * plan.contiguous_bytes_per_request <= budget


# --- sliding windows --------------------------------------------------------------------------


@given(
    st.integers(1, 3000),
    st.integers(1, 32),
    st.integers(1, 500),
    st.integers(1, 600),
)
def test_a_window_bounds_a_request_as_admission_does(
    tokens: int, block_size: int, window: int, step_tokens: int
) -> None:
    """By its bound for a prompt of so many tokens, of which the one token that follows has no KV yet."""
    plan = KvPlan(LLAMA_7B, tokens, block_size=block_size, window=window, step_tokens=step_tokens)
    room = Room.of(1 << 40, block_size, window)
    assert plan.blocks_per_request == room.likely_peak_blocks(tokens, 1, 1, step_tokens)
    longer = replace(plan, request_tokens=tokens + 10_000)
    assert longer.blocks_per_request >= plan.blocks_per_request
    assert longer.blocks_per_request <= -(-window // block_size) + 1 - (-step_tokens // block_size)
    assert 0 <= plan.paged_waste < 1


def test_a_window_lets_more_requests_into_a_budget() -> None:
    """4,096 keys in blocks of 16: 256 blocks, one begun since, 32 of a step of 512 tokens."""
    plan = KvPlan(LLAMA_7B, 32_768, budget_bytes=16 << 30, window=4096)
    assert plan.blocks_per_request == 256 + 1 + 32
    assert plan.paged_requests == 2048 // 289
    assert replace(plan, window=None).paged_requests == 1
    assert plan.bytes_per_request == 32_768 * plan.bytes_per_token, "what its tokens take, held or not"


MISTRAL = {**SMOLLM2, "model_type": "mistral", "sliding_window": 4096}


@pytest.mark.parametrize(
    ("config", "flags", "window"),
    [
        (MISTRAL, [], 4096),
        ({**MISTRAL, "sliding_window": None}, [], None),
        (MISTRAL, ["--window=0"], None),
        (MISTRAL, ["--window=64"], 64),
        ({**SMOLLM2, "model_type": "gemma2", "sliding_window": 4096}, [], None),
        ({**MISTRAL, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0}, [], 4096),
        ({**MISTRAL, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, [], None),
    ],
)
def test_the_window_is_the_models_where_every_layer_has_it(
    config: dict[str, Any],
    flags: list[str],
    window: int | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    assert main(["plan", str(path), "--request-tokens=32768", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["window"] == window
    assert main(["plan", str(path), "--request-tokens=32768", *flags]) == 0
    assert ("a window of" in capsys.readouterr().out) == (window is not None)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"request_tokens": 8, "window": -1}, "window"),
        ({"request_tokens": 8, "step_tokens": 0}, "step_tokens"),
        ({"request_tokens": 0}, "request_tokens"),
        ({"request_tokens": 8, "batch": 0}, "batch"),
        ({"request_tokens": 8, "block_size": -16}, "block_size"),
        ({"request_tokens": 8, "max_model_len": 7}, "max_model_len"),
        ({"request_tokens": 8, "budget_bytes": -1}, "budget_bytes"),
    ],
)
def test_nonsense_is_refused_by_name(arguments: dict[str, int], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KvPlan(LLAMA_7B, **arguments)
    assert caught.value.key == key


def test_a_shape_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_kv_heads: must be positive, not 0"):
        ModelShape(32, 0, 128, 2)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (SMOLLM2, ModelShape(30, 3, 64, 2)),
        ({**SMOLLM2, "head_dim": 128}, ModelShape(30, 3, 128, 2)),
        ({**SMOLLM2, "num_key_value_heads": None}, ModelShape(30, 9, 64, 2)),
        ({**SMOLLM2, "torch_dtype": None}, ModelShape(30, 3, 64, 4)),
        ({**SMOLLM2, "dtype": "float16"}, ModelShape(30, 3, 64, 2)),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, ModelShape(12, 12, 64, 4)),
        ({"n_layer": 24, "n_head": 16, "n_embd": 2048, "multi_query": True}, ModelShape(24, 1, 128, 4)),
        ({"text_config": SMOLLM2, "vision_config": {"num_hidden_layers": 2}}, ModelShape(30, 3, 64, 2)),
    ],
)
def test_the_shape_is_read_from_a_config(config: dict[str, Any], shape: ModelShape) -> None:
    assert plan_from_config(config) == shape


def test_the_dtype_of_the_cache_may_differ_from_the_weights() -> None:
    assert plan_from_config(SMOLLM2, dtype="float8_e5m2") == ModelShape(30, 3, 64, 1)
    plain = shape_in("torch.bfloat16", num_layers=1, num_kv_heads=1, head_dim=8)
    assert plain == ModelShape(1, 1, 8, 2)


@pytest.mark.parametrize("dtype", ["int8", "fp8", "float8_e4m3fn"])
def test_codes_have_a_scale_for_each_token_and_head(dtype: str) -> None:
    shape = plan_from_config(SMOLLM2, dtype=dtype)
    assert shape == ModelShape(30, 3, 64, dtype_bytes=1, scale_bytes=2)
    assert shape.bytes_per_token == 2 * 30 * 3 * 66
    assert shape.capacity_over_bfloat16 == 128 / 66
    console = Console(file=io.StringIO(), width=200)
    console.print(render(KvPlan(shape, request_tokens=16)))
    assert isinstance(console.file, io.StringIO)
    assert "1.94 x the" in console.file.getvalue()


def test_a_plan_counts_the_bytes_that_the_pool_has() -> None:
    shape = shape_in("int8", num_layers=30, num_kv_heads=3, head_dim=64)
    layout = KvLayout(30, 3, 64, 16, torch.int8)
    assert KvPlan(shape, request_tokens=1).bytes_per_block == layout.block_bytes == 16 * shape.bytes_per_token


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": "30"}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_attention_heads": -9}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 577}, "hidden_size"),
        ({"torch_dtype": "int4"}, "dtype"),
        ({"torch_dtype": 16}, "dtype"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
    ],
)
def test_a_config_that_makes_no_sense_names_its_key(change: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_from_config({**SMOLLM2, **change})
    assert caught.value.key == key


def test_the_table_and_the_json_tell_the_same() -> None:
    plan = KvPlan(LLAMA_7B, request_tokens=100, batch=3, max_model_len=2048, budget_bytes=10 << 30)
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(render(plan))
    text = console.export_text()
    numbers = to_json(plan)
    for name in (
        "bytes_per_token",
        "bytes_per_block",
        "contiguous_bytes_per_request",
        "paged_bytes_per_request",
    ):
        assert f"{numbers[name]:,}" in text
    assert f"{numbers['paged_requests']:,}" in text
    assert numbers["bytes_per_batch"] == 3 * 100 * 524_288
    assert "10.7%" in text  # 12 of 112 slots
    assert "95.1%" in text
