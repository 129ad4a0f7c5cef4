"""The timing of products: all candidates in turns, the least of rounds that agree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.random_models import save, tiny_model

from pageturner.kernels.torch_ops import TorchOps
from pageturner.service.model.decoder_config import DecoderConfig, parse_decoder_config
from pageturner.service.model.dense_products import DenseProducts, load_dense_products
from pageturner.service.model.loader import read_folder
from pageturner.service.model.options import ModelOptions
from pageturner.service.model.product_timing import ROWS, SyntheticWeights, time_products


@pytest.fixture
def config(tmp_path: Path) -> DecoderConfig:
    _, model = tiny_model("qwen3", 0)
    folder = save(model, tmp_path)
    return parse_decoder_config(read_folder("tiny", "tiny", folder, ModelOptions(source="tiny")).config)


def products(config: DecoderConfig) -> DenseProducts:
    return load_dense_products(config, SyntheticWeights(), TorchOps(), torch.float32)


class Clock:
    """Says what a list of durations makes of it: a layer's, then the head's, of one step after another."""

    def __init__(self, durations: Iterator[float]) -> None:
        self._durations, self._now = durations, 0.0

    def __call__(self) -> float:
        now = self._now
        self._now += next(self._durations)
        return now


def steady(seconds: float) -> Iterator[float]:
    while True:
        yield seconds


def worsening() -> Iterator[float]:
    seconds = 1e-3
    while True:
        seconds *= 1.3
        yield seconds


def test_a_step_is_all_layers_and_one_head(config: DecoderConfig) -> None:
    timed = time_products({"a": products(config), "b": products(config)}, config, Clock(steady(1e-3)))
    assert timed.steady
    expected = (1e-3 * (config.num_layers + 1),) * len(ROWS)
    assert timed.seconds == {"a": pytest.approx(expected), "b": pytest.approx(expected)}


def test_rounds_that_never_agree_are_told_and_end(config: DecoderConfig) -> None:
    assert not time_products({"a": products(config)}, config, Clock(worsening())).steady


def test_synthetic_weights_have_any_shape() -> None:
    shape: Any = (300, 401)
    assert SyntheticWeights().take("weight", shape).shape == shape
