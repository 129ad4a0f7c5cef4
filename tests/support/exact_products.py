"""`QuantisedOps` without the rounding of activations: what is left is that of the weights."""

from __future__ import annotations

import torch

from pageturner.kernels.packed import PackedWeight, unpack
from pageturner.kernels.torch_ops import TorchOps


class ExactQuantisedOps:
    """Products of float32 rows with the dequantised weights."""

    name = "exact"

    def linear(self, rows: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        return torch.nn.functional.linear(rows, unpack(weight).dequantised(), weight.bias)

    def norm_linear(
        self,
        hidden: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        weight: PackedWeight,
        residual: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, summed = TorchOps().rms_norm(hidden, norm, eps, residual)
        return self.linear(normed, weight), summed

    def norm_mlp(
        self,
        hidden: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        gate_up: PackedWeight,
        down: PackedWeight,
        residual: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gated, summed = self.norm_linear(hidden, norm, eps, gate_up, residual)
        return self.linear(TorchOps().silu_and_mul(gated), down), summed
