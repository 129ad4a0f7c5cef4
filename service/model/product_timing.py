"""Times products on this machine: those of a layer and the head, at a few numbers of rows.

Attention is left out: it's the same for all. Layers of packed weights are the model's own, taken in turns, so
that they come from memory as in a step; those of float weights are one layer of its sizes, between two heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

from pageturner.service.model.decoder_config import DecoderConfig
from pageturner.service.model.products import Layer, OpenLayer, Products

ROWS = (1, 16, 64)
"""Of a step: one request alone, some, many."""
_ROUNDS = (4, 12)
"""At least, of which the first loads code and wakes threads, and at most."""
_BUDGET_SECONDS = 3.0
_STEADY = 1.25
"""The two fastest rounds of a step agree within this factor where nothing disturbed both."""


@dataclass(frozen=True, slots=True)
class TimedProducts:
    """seconds: of a step's products for each of ROWS, by candidate: the least of some rounds. steady: whether
    rounds agreed; else other programs had the processors, and the figures may compare nothing."""

    seconds: Mapping[str, tuple[float, ...]]
    steady: bool = True


@torch.inference_mode()
def time_products(
    candidates: Mapping[str, Products], config: DecoderConfig, timer: Callable[[], float]
) -> TimedProducts:
    """All candidates in turns, round by round until they agree, or that has taken a few seconds.

    timer: seconds.
    """
    layers = {name: cycle(products.layers) for name, products in candidates.items()}
    found: dict[tuple[str, int], list[float]] = {}
    started, steady = timer(), False
    for number in range(_ROUNDS[1]):
        for rows in ROWS:
            for name, products in candidates.items():
                seconds = _time_step(products, layers[name], config, rows, timer)
                if number:
                    found.setdefault((name, rows), []).append(seconds)
        steady = number > 1 and all(map(_agree, found.values()))
        if number + 1 >= _ROUNDS[0] and (steady or timer() - started > _BUDGET_SECONDS):
            break
    seconds_of = {name: tuple(min(found[name, rows]) for rows in ROWS) for name in candidates}
    return TimedProducts(seconds_of, steady)


def _agree(seconds: list[float]) -> bool:
    first, second, *_ = sorted(seconds)
    return second <= _STEADY * first


def score(seconds: Sequence[float]) -> float:
    """The geometric mean: a step of one row counts as much as one of many."""
    return math.exp(sum(math.log(max(value, 1e-9)) for value in seconds) / len(seconds))


def _time_step(
    products: Products,
    layers: Iterator[Layer[OpenLayer]],
    config: DecoderConfig,
    rows: int,
    timer: Callable[[], float],
) -> float:
    hidden = torch.ones(rows, config.hidden_size, dtype=products.dtype)
    attended = torch.ones(rows, config.qkv_sizes[0], dtype=products.dtype)
    layer = next(layers).products
    started = timer()
    layer.qkv(hidden, hidden)
    layer.mlp(layer.out(attended), hidden)
    between = timer()
    products.head(hidden, hidden)
    return config.num_layers * (between - started) + (timer() - between)


class SyntheticWeights:
    """A `WeightSource` of random numbers, in any shape: what a product costs doesn't depend on them."""

    def __init__(self) -> None:
        self._row = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) * 0.02

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        size = math.prod(shape)
        return self._row.repeat(-(-size // len(self._row)))[:size].view(*shape)

    def take_groups(self, name: str, shape: Sequence[int]) -> None:
        return None

    def left(self) -> Iterator[str]:
        return iter(())
