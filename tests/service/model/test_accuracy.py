"""How far one forward's logits are from another's, and the bound on the embedded model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.ops import cpu_library

from pageturner.kernels.cpu.ops import CpuOps
from pageturner.kernels.cpu.quantised_ops import CpuQuantisedOps
from pageturner.service.model.accuracy import (
    KL_BOUND,
    logits_of,
    measure_accuracy,
    packaged_text,
    windows_of,
)
from pageturner.service.model.decoder import Decoder, load_decoder
from pageturner.service.model.decoder_config import parse_decoder_config
from pageturner.service.model.loader import load_artifacts, open_weights
from pageturner.service.model.options import ModelOptions
from pageturner.service.model.packed_file import PackedFile
from pageturner.service.model.quantised_products import load_quantised_products

NUM_TOKENS = 192


def test_uniform_logits_have_the_perplexity_of_the_vocabulary() -> None:
    def uniform(window: Sequence[int]) -> torch.Tensor:
        return torch.zeros(len(window), 50)

    found = measure_accuracy(uniform, uniform, [range(10), range(10, 30)])
    assert (found.num_tokens, found.mean_kl, found.top1_agreement) == (28, 0.0, 1.0)
    assert found.perplexity == pytest.approx(50)


def test_the_divergence_is_from_the_reference_to_the_other() -> None:
    def reference(window: Sequence[int]) -> torch.Tensor:
        return torch.tensor([[0.75, 0.25]]).log().repeat(len(window), 1)

    def other(window: Sequence[int]) -> torch.Tensor:
        return torch.tensor([[0.25, 0.75]]).log().repeat(len(window), 1)

    found = measure_accuracy(reference, other, [[0, 0, 1]])
    assert found.mean_kl == pytest.approx(0.75 * math.log(3) - 0.25 * math.log(3))
    assert found.top1_agreement == 0
    assert found.perplexity == pytest.approx(math.sqrt(4 * 4 / 3))


def test_windows_leave_no_rest() -> None:
    assert windows_of(range(10), 4) == [range(4), range(4, 8)]


def test_the_packaged_text_is_a_few_thousand_words() -> None:
    assert 2500 < len(packaged_text().split()) < 5000


def test_the_embedded_model_in_its_own_groups_stays_near_float32(tmp_path: Path) -> None:
    artifacts = load_artifacts(ModelOptions(quantization="file"), tmp_path)
    config = parse_decoder_config(artifacts.config)
    assert artifacts.tokenizer is not None
    assert artifacts.packed is not None
    window = artifacts.tokenizer.encode(packaged_text()).ids[:NUM_TOKENS]
    ops = CpuOps(cpu_library())
    dense = load_decoder(config, open_weights(artifacts), ops, torch.float32, streamed=True)
    products = load_quantised_products(
        "file", config, PackedFile(artifacts.packed), CpuQuantisedOps(cpu_library()), torch.bfloat16
    )
    quantised = logits_of(Decoder(config, products, ops), ops)
    found = measure_accuracy(logits_of(dense, ops), quantised, [window])
    assert 0 < found.mean_kl < KL_BOUND
    assert found.top1_agreement > 0.9
