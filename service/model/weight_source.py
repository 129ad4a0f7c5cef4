"""Where a model's weights come from, as the decoder asks for them: by the names that `transformers` gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from pageturner.kernels.grouped import GroupedWeight


class WeightSource(Protocol):
    """The tensors of one model. Remembers what was taken, so that a weight not asked for is noticed."""

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor in a float dtype. Raises ModelError if it is missing or of another shape."""
        ...

    def take_groups(self, name: str, shape: Sequence[int]) -> GroupedWeight | None:
        """The matrix in its own groups, None if it has none. Raises as `take`, and for a damaged one."""
        ...

    def left(self) -> Iterator[str]:
        """Names that were never taken, in order."""
        ...
