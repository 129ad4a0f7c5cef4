"""The sharded decoder against the whole one: its logits, its bits, its sizes, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paged_sessions import PagedSession
from support.planted_shards import PLANTED_SHARD_BUGS
from support.rank_processes import rank_processes
from support.rank_work import run_in_chunks
from support.sharded import (
    assert_alike,
    distance,
    greedy,
    in_chunks,
    tiny_sharded,
    tokens_of,
)
from support.thread_ranks import on_ranks

from pageturner.service.errors import ConfigError, ModelError
from pageturner.service.model.options import Quantization

FLOAT_BOUND = 5e-5
"""On logits of up to 14 in float32; what was seen is up to 1.2e-5."""
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama-2": ("llama", 2, {}),
    "llama-4": ("llama", 4, {}),
    "biases": ("llama_bias", 2, {}),
    "tied": ("llama_tied", 4, {}),
    "window": ("mistral_window", 2, {}),
    "qwen2": ("qwen2", 2, {}),
    "qwen3": ("qwen3", 2, {}),
    "no-rope-layers": ("smollm3", 2, {"num_hidden_layers": 4}),
    "fewer-kv-heads-than-ranks": ("llama", 4, {"num_key_value_heads": 2}),
    "one-kv-head": ("llama_bias", 4, {"num_key_value_heads": 1}),
    "uneven": (
        "llama",
        2,
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "intermediate_size": 99},
    ),
    "uneven-vocabulary": (
        "llama_tied",
        3,
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
    ),
}
QUANTISED_CASES: dict[str, tuple[str, int, Quantization, dict[str, Any]]] = {
    "int8": ("llama_bias", 2, "int8", {}),
    "int4-tied": ("llama_tied", 4, "int4", {}),
    "one-kv-head": ("qwen3", 4, "int8", {"num_key_value_heads": 1}),
    "uneven": ("llama", 2, "int4", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_whole_model(case: str, tmp_path: Path) -> None:
    family, size, changes = CASES[case]
    model = tiny_sharded(family, tmp_path, **changes)
    expected, found = model.run(in_chunks), model.on_ranks(size, in_chunks)
    assert_alike(found)
    assert distance(found[0], expected) < FLOAT_BOUND


@pytest.mark.parametrize("size", [2, 4])
def test_greedy_tokens_are_those_of_the_whole_model(size: int, tmp_path: Path) -> None:
    model = tiny_sharded("llama", tmp_path)
    expected = model.run(greedy(30))
    for found in model.on_ranks(size, greedy(30)):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("case", QUANTISED_CASES)
def test_quantised_logits_have_the_bits_of_the_whole_model(case: str, tmp_path: Path) -> None:
    """Which computes them in one call."""
    family, size, scheme, changes = QUANTISED_CASES[case]
    model = tiny_sharded(family, tmp_path, scheme, **changes)
    expected, found = model.run(in_chunks), model.on_ranks(size, in_chunks)
    assert_alike([expected, *found])


@pytest.mark.parametrize("scheme", ["none", "int8"])
def test_bits_do_not_depend_on_the_batch(scheme: Quantization, tmp_path: Path) -> None:
    model = replace(tiny_sharded("llama", tmp_path, scheme), deterministic=True)
    tokens = tokens_of(5)

    def alone(session: PagedSession) -> torch.Tensor:
        return session.step([(session.add(tokens), len(tokens))])

    def among_others(session: PagedSession) -> torch.Tensor:
        mine, other = session.add(tokens), session.add(tokens_of(6, 40))
        session.step([(other, 3), (mine, 20)])
        session.step([(mine, 29), (other, 36)])
        return session.step([(other, 1), (mine, 1)])[1:]

    assert torch.equal(model.on_ranks(2, alone)[0], model.on_ranks(2, among_others)[0])


@pytest.mark.parametrize("scheme", ["none", "int8"])
def test_each_rank_holds_its_part(scheme: Quantization, tmp_path: Path) -> None:
    model = tiny_sharded("llama_bias", tmp_path, scheme)
    whole, parts = model.build().model, [built.model for built in on_ranks(2, model.build)]
    assert {part.num_parameters for part in parts} == {whole.num_parameters}
    assert {part.total_kv_heads for part in parts} == {whole.num_kv_heads} == {4}
    assert {(part.num_heads, part.num_kv_heads, part.vocab_size) for part in parts} == {(4, 2, 128)}
    # Of two ranks each has the norms, and the biases of what is added up.
    assert whole.weight_bytes < sum(part.weight_bytes for part in parts) < 1.05 * whole.weight_bytes


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = tiny_sharded("llama", tmp_path)
    with pytest.raises(ConfigError, match="6 ranks: the model has 8 heads that read 4 KV heads"):
        on_ranks(6, model.build)


def test_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = tiny_sharded("llama", tmp_path)
    config = (model.folder / "config.json").read_text()
    (model.folder / "config.json").write_text(
        config.replace('"intermediate_size": 192', '"intermediate_size": 96')
    )
    with pytest.raises(
        ModelError, match=r"gate_proj.weight has shape \(192, 64\), the config asks for \(96, 64\)"
    ):
        on_ranks(2, model.build)


@pytest.mark.parametrize("name", PLANTED_SHARD_BUGS)
def test_planted_bugs_are_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = PLANTED_SHARD_BUGS[name]
    model = tiny_sharded(bug.family, tmp_path, bug.scheme, **dict(bug.changes))
    expected = model.run(in_chunks)
    bug.plant(monkeypatch)
    found = model.on_ranks(bug.size, in_chunks)
    assert distance(found[0], expected) > 100 * FLOAT_BOUND


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_as_processes(size: int, tmp_path: Path) -> None:
    model = tiny_sharded("llama", tmp_path)
    expected = model.run(in_chunks)
    with rank_processes(size, tmp_path, partial(run_in_chunks, model)) as ranks:
        found = [torch.tensor(rank.told()) for rank in ranks]
    assert_alike(found)
    assert distance(found[0], expected) < FLOAT_BOUND
    # By threads and by processes the same sums are made.
    assert torch.equal(found[0], model.on_ranks(size, in_chunks)[0])
