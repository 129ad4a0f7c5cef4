"""The backends under test, by name."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from pageturner.kernels.cpu.build import load_library
from pageturner.kernels.cpu.ops import CpuOps
from pageturner.kernels.interface import PagedOps
from pageturner.kernels.layout import KeyOrder
from pageturner.kernels.torch_ops import TorchOps


def cpu_cache_dir() -> Path:
    return Path(tempfile.gettempdir()) / "pageturner-tests"


@cache
def cpu_library() -> ctypes.CDLL:
    """Compiled once for each source on this machine and kept between runs."""
    return load_library(cpu_cache_dir())


BACKENDS: dict[str, Callable[[], PagedOps]] = {
    "torch": TorchOps,
    "torch-tiled": lambda: TorchOps(KeyOrder.TILED16),
    "torch-deterministic": lambda: TorchOps(deterministic=True),
    "torch-deterministic-tiled": lambda: TorchOps(KeyOrder.TILED16, deterministic=True),
    "cpu-deterministic": lambda: CpuOps(cpu_library()),
}
