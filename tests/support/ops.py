"""The backends under test, by name."""

from __future__ import annotations

from collections.abc import Callable

from pageturner.kernels.layout import KeyPage
from pageturner.kernels.ops import PagedOps
from pageturner.kernels.torch_ops import TorchOps

BACKENDS: dict[str, Callable[[], PagedOps]] = {
    "torch": TorchOps,
    "torch-tiled": lambda: TorchOps(KeyPage.TILED16),
    "torch-deterministic": lambda: TorchOps(deterministic=True),
    "torch-deterministic-tiled": lambda: TorchOps(KeyPage.TILED16, deterministic=True),
}
