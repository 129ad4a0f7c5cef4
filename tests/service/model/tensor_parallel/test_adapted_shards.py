"""Adapters on several ranks: in mixed batches, the logits of the whole model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.planted_shards import PLANTED_ADAPTER_BUGS
from support.rank_processes import rank_processes
from support.rank_work import run_in_company
from support.sharded import assert_alike, distance, in_company, tiny_adapters, tiny_sharded
from support.thread_ranks import on_ranks

from pageturner.service.model.options import Quantization

FLOAT_BOUND = 5e-5
"""On logits of up to 40 in float32, as without adapters; what was seen is up to 3e-5."""
CASES: dict[str, tuple[str, int, bool, dict[str, Any]]] = {
    "torch-2": ("llama_bias", 2, False, {}),
    "cpp-2": ("llama", 2, True, {}),
    "torch-4": ("qwen3", 4, False, {}),
    "kv-heads-shared": ("llama", 4, True, {"num_key_value_heads": 2}),
    "uneven": (
        "llama",
        2,
        False,
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "intermediate_size": 99},
    ),
}
QUANTISED_CASES: dict[str, tuple[str, int, Quantization, dict[str, Any]]] = {
    "int8-2": ("llama_bias", 2, "int8", {}),
    "int4-4": ("llama", 4, "int4", {}),
    "one-kv-head": ("qwen3", 4, "int8", {"num_key_value_heads": 1}),
    "uneven": ("llama", 2, "int8", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_whole_model(case: str, tmp_path: Path) -> None:
    family, size, in_cpp, changes = CASES[case]
    model = replace(tiny_sharded(family, tmp_path, **changes), in_cpp=in_cpp)
    run = partial(model.run_adapted, in_company, tiny_adapters(family, tmp_path, **changes))
    expected, found = run(), on_ranks(size, run)
    assert_alike(found)
    assert distance(found[0], expected) < FLOAT_BOUND


@pytest.mark.parametrize("case", QUANTISED_CASES)
def test_quantised_logits_have_the_bits_of_the_whole_model(case: str, tmp_path: Path) -> None:
    """Which computes them in one call."""
    family, size, scheme, changes = QUANTISED_CASES[case]
    model = tiny_sharded(family, tmp_path, scheme, **changes)
    run = partial(model.run_adapted, in_company, tiny_adapters(family, tmp_path, **changes))
    assert_alike([run(), *on_ranks(size, run)])


def test_ranks_whose_parts_fill_no_tiles_have_operations_of_one_kind(tmp_path: Path) -> None:
    """8 hidden features a rank: the groups of 8 bits that adapters of the whole model have want 16."""
    changes = {"hidden_size": 32}
    model = tiny_sharded("llama", tmp_path, "int8", **changes)
    run = partial(model.run_adapted, in_company, tiny_adapters("llama", tmp_path, **changes))
    expected, found = run(), on_ranks(4, run)
    assert_alike(found)
    assert 0 < distance(found[0], expected) < 0.05 * float(expected.abs().max())


@pytest.mark.parametrize("name", PLANTED_ADAPTER_BUGS)
def test_planted_bugs_are_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = PLANTED_ADAPTER_BUGS[name]
    model = tiny_sharded(bug.family, tmp_path, bug.scheme)
    run = partial(model.run_adapted, in_company, tiny_adapters(bug.family, tmp_path))
    expected = run()
    bug.plant(monkeypatch)
    assert distance(on_ranks(bug.size, run)[0], expected) > 100 * FLOAT_BOUND


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_as_processes(size: int, tmp_path: Path) -> None:
    model, adapters = tiny_sharded("llama", tmp_path), tiny_adapters("llama", tmp_path)
    with rank_processes(size, tmp_path, partial(run_in_company, model, adapters)) as ranks:
        found = [torch.tensor(rank.told()) for rank in ranks]
    assert_alike([*found, on_ranks(size, partial(model.run_adapted, in_company, adapters))[0]])
    assert distance(found[0], model.run_adapted(in_company, adapters)) < FLOAT_BOUND
