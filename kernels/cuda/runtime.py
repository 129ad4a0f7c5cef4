"""Where kernels run, as the launcher sees it: a GPU through CuPy, or this machine's CPU through fibers."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from pageturner.kernels.cuda.variants import Variant
from pageturner.kernels.errors import KernelArgumentError

Dim3 = tuple[int, int, int]
Struct = np.ndarray[tuple[int], np.dtype[np.void]]

MAX_GRID = (2**31 - 1, 65_535, 65_535)


class Kernel(Protocol):
    """A compiled kernel, called as a cupy.RawKernel is. A struct of one element passes by value."""

    def __call__(self, grid: Dim3, block: Dim3, args: tuple[Struct, ...], *, shared_mem: int) -> None: ...


class Runtime(Protocol):
    """Compiles variants for one device and runs them in the order of launch.

    On a GPU launches are enqueued on torch's current stream of `device`, sampled at each launch: a
    remembered stream would capture an empty graph.
    """

    @property
    def name(self) -> str:
        """`cuda` or `cuda-emulated`."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the tensors of a launch live."""
        ...

    @property
    def num_multiprocessors(self) -> int:
        """What a plan spreads its work over."""
        ...

    def load(self, variants: Sequence[Variant]) -> Mapping[Variant, Kernel]:
        """Compile, or take from the cache, all of them at once. Raises KernelsUnavailable."""
        ...


class Launcher:
    """Launches kernels by variant; the only caller of a `Kernel`.

    Loads a variant when it is first asked for, or all that are named to `prepare`: before a graph is
    captured, inside which nothing may be compiled.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._kernels: dict[Variant, Kernel] = {}

    def prepare(self, variants: Sequence[Variant]) -> None:
        """Load the variants that are not yet loaded. Raises KernelsUnavailable."""
        missing = [variant for variant in variants if variant not in self._kernels]
        if missing:
            self._kernels.update(self.runtime.load(missing))

    def launch(self, variant: Variant, grid: Dim3, arguments: ctypes.Structure) -> None:
        """Enqueue one launch; a grid with an empty side launches nothing.

        The tensors that `arguments` points into must outlive it: on the GPU, torch's allocator sees to
        that for tensors of the current stream. Raises KernelArgumentError for a grid over the limits.
        """
        assert isinstance(arguments, variant.arguments), f"{variant.expression} takes {variant.arguments}"
        if not all(grid):
            return
        for side, (extent, most) in enumerate(zip(grid, MAX_GRID, strict=True)):
            if extent > most:
                raise KernelArgumentError("grid", f"{extent} along {'xyz'[side]}", f"at most {most}")
        if variant not in self._kernels:
            self.prepare((variant,))
        kernel = self._kernels[variant]
        kernel(grid, (variant.threads, 1, 1), (_by_value(arguments),), shared_mem=variant.shared_bytes)


_DTYPES: dict[type, np.dtype[Any]] = {}


def _by_value(arguments: ctypes.Structure) -> Struct:
    """The struct as a NumPy array of one element, a copy of its bytes."""
    kind = type(arguments)
    if kind not in _DTYPES:
        _DTYPES[kind] = np.dtype(kind)
    return np.frombuffer(bytes(arguments), dtype=_DTYPES[kind])
