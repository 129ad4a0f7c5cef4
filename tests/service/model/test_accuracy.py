"""How far one forward's logits are from another's, and the bound on the embedded model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.exact_products import ExactQuantisedOps
from support.ops import cpu_library

from pageturner.kernels.cpu.ops import CpuOps
from pageturner.kernels.cpu.quantised_ops import CpuQuantisedOps
from pageturner.kernels.packed import PackedWeight, unpack
from pageturner.service.model.accuracy import KL_BOUND, measure_accuracy, packaged_text, windows_of
from pageturner.service.model.candidate_forwards import candidate_forwards
from pageturner.service.model.options import ModelOptions

NUM_TOKENS = 192
PRODUCTS = CpuQuantisedOps(cpu_library())


class NoMinima(ExactQuantisedOps):
    """Planted: what groups add to their scaled codes is left out."""

    def linear(self, rows: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        groups = replace(unpack(weight), offsets=None)
        return torch.nn.functional.linear(rows, groups.dequantised(), weight.bias)


def test_uniform_logits_have_the_perplexity_of_the_vocabulary() -> None:
    def uniform(window: Sequence[int]) -> torch.Tensor:
        return torch.zeros(len(window), 50)

    found = measure_accuracy(uniform, {"uniform": uniform}, [range(10), range(10, 30)])["uniform"]
    assert (found.num_tokens, found.mean_kl, found.top1_agreement) == (28, 0.0, 1.0)
    assert found.perplexity == pytest.approx(50)


def test_logits_however_far_and_texts_however_short_have_figures() -> None:
    def sure_of(token: int) -> Callable[[Sequence[int]], torch.Tensor]:
        return lambda window: torch.eye(50)[[token] * len(window)] * 2000

    found = measure_accuracy(sure_of(3), {"other": sure_of(4)}, [range(10)])["other"]
    assert (found.perplexity, found.top1_agreement) == (math.inf, 0.0)
    assert found.mean_kl == pytest.approx(2000)
    assert math.isnan(measure_accuracy(sure_of(3), {"same": sure_of(3)}, [[5]])["same"].mean_kl)


def test_the_divergence_is_from_the_reference_to_the_other() -> None:
    def reference(window: Sequence[int]) -> torch.Tensor:
        return torch.tensor([[0.75, 0.25]]).log().repeat(len(window), 1)

    def other(window: Sequence[int]) -> torch.Tensor:
        return torch.tensor([[0.25, 0.75]]).log().repeat(len(window), 1)

    found = measure_accuracy(reference, {"other": other}, [[0, 0, 1]])["other"]
    assert found.mean_kl == pytest.approx(0.75 * math.log(3) - 0.25 * math.log(3))
    assert found.top1_agreement == 0
    assert found.perplexity == pytest.approx(math.sqrt(4 * 4 / 3))


def test_windows_leave_no_rest() -> None:
    assert windows_of(range(10), 4) == [range(4), range(4, 8)]


def test_the_packaged_text_is_a_few_thousand_words() -> None:
    assert 2500 < len(packaged_text().split()) < 5000


def test_the_embedded_model_in_its_own_groups_stays_near_float32(tmp_path: Path) -> None:
    options = ModelOptions(num_threads=1)
    forwards = candidate_forwards(options, tmp_path, lambda heads, dtype: CpuOps(cpu_library()), PRODUCTS)
    window = forwards.text_tokens(NUM_TOKENS)
    reference, names = forwards.logits("float32"), ("file", "file/int8", "file/fp8")
    results = measure_accuracy(reference, {name: forwards.logits(name) for name in names}, [window])
    found, int8, fp8 = (results[name] for name in names)
    assert 0 < found.mean_kl < KL_BOUND
    assert found.top1_agreement > 0.9
    assert found.mean_kl < int8.mean_kl < KL_BOUND  # with KV in codes
    assert int8.mean_kl < fp8.mean_kl < 2 * KL_BOUND
    # A divergence of 0.005 moves the likelihood of so few tokens by up to 2 %, three times its deviation.
    assert int8.perplexity == pytest.approx(found.perplexity, rel=0.02)
    bad = candidate_forwards(options, tmp_path, lambda heads, dtype: CpuOps(cpu_library()), NoMinima())
    dropped = measure_accuracy(reference, {"file": bad.logits("file")}, [window[:32]])["file"]
    assert dropped.mean_kl > 100 * KL_BOUND
