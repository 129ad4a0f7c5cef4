"""Which forward runs a model, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from support.random_models import save, tiny_model

from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.layout import AttentionBatch
from pageturner.kernels.torch_ops import TorchOps
from pageturner.service.errors import ConfigError, ModelError
from pageturner.service.model.accuracy import logits_of
from pageturner.service.model.artifacts import ModelArtifacts
from pageturner.service.model.backend import HeadShape
from pageturner.service.model.build import build_model
from pageturner.service.model.kv_dtypes import name_of
from pageturner.service.model.loader import read_folder
from pageturner.service.model.options import Forward, KvDtype, ModelOptions

KV_DTYPES = frozenset({"float32", "bfloat16"})


def artifacts_of(family: str, folder: Path) -> ModelArtifacts:
    _, model = tiny_model(family, 3)
    return read_folder(family, family, save(model, folder), ModelOptions(source=family))


def options(forward: Forward = "auto", *, deterministic: bool = False) -> ModelOptions:
    return ModelOptions(source="tiny", forward=forward, deterministic=deterministic)


@pytest.mark.parametrize(
    ("family", "forward", "backend"),
    [
        ("qwen3", "auto", "lean"),
        ("qwen3", "lean", "lean"),
        ("qwen3", "transformers", "transformers"),
        ("phi3", "auto", "transformers"),
    ],
)
def test_the_lean_decoder_is_taken_where_it_fits(
    family: str, forward: Forward, backend: str, tmp_path: Path
) -> None:
    head_dims: list[int] = []

    def choose(heads: HeadShape) -> TorchOps:
        head_dims.append(heads.head_dim)
        return TorchOps()

    model = build_model(artifacts_of(family, tmp_path), options(forward), 16, choose).model
    assert model.backend == backend
    assert head_dims == [model.head_dim]


def test_a_model_bound_to_the_lean_decoder_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"lean decoder: model_type 'phi3'"):
        build_model(artifacts_of("phi3", tmp_path), options("lean"), 16, lambda _: TorchOps())


def test_a_dtype_of_the_pool_that_transformers_does_not_have_is_refused(tmp_path: Path) -> None:
    artifacts = artifacts_of("phi3", tmp_path)
    other = KV_DTYPES - {artifacts.dtype}
    for kv_dtype in sorted(KV_DTYPES):
        asked = replace(options(), kv_dtype=cast(KvDtype, kv_dtype))
        if kv_dtype in other:
            with pytest.raises(ConfigError, match=rf"keeps KV in {artifacts.dtype}.* not in {kv_dtype}"):
                build_model(artifacts, asked, 16, lambda _: TorchOps())
        else:
            build_model(artifacts, asked, 16, lambda _: TorchOps())


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["phi3", "qwen3"])
def test_codes_are_kept_beside_any_activations(family: str, kv_dtype: KvDtype, tmp_path: Path) -> None:
    artifacts = artifacts_of(family, tmp_path)
    plain, coded = (
        build_model(artifacts, replace(options(), kv_dtype=word), 16, lambda _: TorchOps()).model
        for word in ("auto", kv_dtype)
    )
    assert name_of(coded.kv_dtype) == kv_dtype
    assert coded.dtype is plain.dtype
    tokens = [(7 * i + 3) % coded.vocab_size for i in range(40)]
    found, expected = (logits_of(model, TorchOps())(tokens) for model in (coded, plain))
    assert not torch.equal(found, expected)
    assert float((found - expected).abs().mean()) < 0.1 * float(expected.std())


class FickleOps(TorchOps):
    """Attention whose rows know how many they are."""

    def attention(
        self, query: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        return super().attention(query, kv_layer, batch, spec) + 1e-3 * query.shape[0]


def test_deterministic_is_tried_before_it_is_promised(tmp_path: Path) -> None:
    artifacts = artifacts_of("llama", tmp_path)
    for block_size in (4, 16):
        build_model(
            artifacts, options(deterministic=True), block_size, lambda _: TorchOps(deterministic=True)
        )
    with pytest.raises(ModelError, match="deterministic"):
        build_model(artifacts, options(deterministic=True), 16, lambda _: FickleOps(deterministic=True))
