"""A device's memory as a test would have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class FakeMeter:
    """Units of `unit` bytes: of `size`, `weights` are the model's and `others` another process's.

    activations: of the largest step; None: it does not fit. num_runs: how often that was run.
    """

    unit: int
    size: int
    weights: int
    others: int
    activations: int | None
    num_runs: int = field(default=0, init=False)

    def total(self) -> int:
        return self.size * self.unit

    def in_use(self) -> int:
        return (self.weights + self.others) * self.unit

    def tensors(self) -> int:
        return self.weights * self.unit

    def peak_of(self, work: Callable[[], object]) -> int:
        work()
        self.num_runs += 1
        if self.activations is None:
            raise MemoryError("CUDA out of memory")
        return self.activations * self.unit
