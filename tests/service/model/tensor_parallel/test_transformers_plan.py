"""Models of `transformers` cut by their own plans, against the whole ones."""

from __future__ import annotations

import copy

import pytest
import torch
from support.paged_sessions import PagedSession
from support.planting import plant
from support.random_models import FAMILIES, tiny_model
from support.sharded import BLOCK_SIZE, Script, assert_alike, distance, in_chunks
from support.thread_ranks import on_ranks
from transformers import PreTrainedModel

from pageturner.kernels.torch_ops import TorchOps
from pageturner.service.errors import ConfigError, ModelError
from pageturner.service.model import transformers_model
from pageturner.service.model.tensor_parallel import transformers_plan
from pageturner.service.model.tensor_parallel.collectives import ALONE, Collectives
from pageturner.service.model.transformers_model import TransformersModel, checked_model

BOUND = 5e-5
DEFAULT = ("gemma2", "phi3", "olmo2", "mixtral")
"""Softcaps and windows; q, k and v in one product, gathered; norms over all heads; experts."""
WITHOUT_PLAN = (
    *("gpt2", "gpt_bigcode", "gptj", "gpt_oss", "codegen", "opt", "persimmon", "biogpt", "stablelm", "bloom"),
    *("falcon", "mpt", "gpt_neo"),
)
"""Of their layers, that is."""
NOT_PAGED = ("phi3_longrope",)
SLOW = sorted(set(FAMILIES) - {*DEFAULT, *WITHOUT_PLAN, *NOT_PAGED})


def rank_of(model: PreTrainedModel, collectives: Collectives = ALONE) -> TransformersModel:
    """The model, or this rank's part of it: of a copy, since it is taken over."""
    return checked_model(copy.deepcopy(model), lambda _: TorchOps(), collectives=collectives)


def run(model: TransformersModel, script: Script) -> torch.Tensor:
    return script(PagedSession(model, model.ops, block_size=BLOCK_SIZE, num_blocks=24))


@pytest.mark.parametrize("family", [*DEFAULT, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
def test_logits_are_those_of_the_whole_model(family: str) -> None:
    _, model = tiny_model(family, 7)
    whole = rank_of(model)
    expected = run(whole, in_chunks)

    def on_rank(collectives: Collectives) -> torch.Tensor:
        rank = rank_of(model, collectives)
        assert (rank.num_parameters, rank.total_kv_heads) == (whole.num_parameters, whole.num_kv_heads)
        assert rank.weight_bytes < whole.weight_bytes
        return run(rank, in_chunks)

    found = on_ranks(2, on_rank)
    assert_alike(found)
    assert distance(found[0], expected) < BOUND


@pytest.mark.parametrize(
    ("family", "size", "reason"),
    [
        ("gpt2", 2, "no tp_plan that cuts the layers of gpt2"),
        ("gpt_oss", 2, "no tp_plan that cuts the layers of gpt_oss"),
        ("gemma2", 4, "gemma2 has num_key_value_heads = 2, which 4 ranks don't divide"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(family: str, size: int, reason: str) -> None:
    _, model = tiny_model(family, 7)
    with pytest.raises(ConfigError, match=f"model.tensor_parallel_size: .*{reason}"):
        on_ranks(size, lambda collectives: rank_of(model, collectives))


def test_a_style_that_is_not_known_is_refused_by_name() -> None:
    _, model = tiny_model("gemma2", 7)
    assert model._tp_plan is not None
    model._tp_plan["model.layers.*.mlp.gate_proj"] = "diagonal"
    with pytest.raises(ConfigError, match="the tp_plan of gemma2 asks for diagonal"):
        on_ranks(2, lambda collectives: rank_of(model, collectives))


_SUM = "        self._collectives.all_reduce(total)\n"
PLANTED = {
    "a forgotten sum": (
        "gemma2",
        _SUM + "        return total if self.bias",
        "        return total if self.bias",
    ),
    "experts that are not summed": ("mixtral", _SUM + "        return total\n", "        return total\n"),
    "gate and up cut as one": ("mixtral", '"packed_colwise": (-2, 2)', '"packed_colwise": (-2, 1)'),
    "every rank takes the first inputs": (
        "olmo2",
        "x[..., self._part.start : self._part.stop]",
        "x[..., : len(self._part)]",
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_the_probe_catches_planted_bugs(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a plan that doesn't fit its model never serves."""
    family, right, wrong = PLANTED[bug]
    monkeypatch.setattr(
        transformers_model, "shard_by_plan", plant(transformers_plan, right, wrong).shard_by_plan
    )
    _, model = tiny_model(family, 7)
    with pytest.raises(ModelError, match="logits differ from the plain model's"):
        on_ranks(2, lambda collectives: rank_of(model, collectives))
