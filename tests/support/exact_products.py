"""`QuantisedOps` without the rounding of activations: what is left is that of the weights."""

from __future__ import annotations

import torch

from pageturner.kernels.known_tokens import KnownTokens, TokenScores
from pageturner.kernels.packed import PackedWeight, unpack
from pageturner.kernels.reference_scores import token_scores
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

    def norm_scores(
        self,
        hidden: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        weight: PackedWeight,
        known: KnownTokens,
        residual: torch.Tensor | None = None,
    ) -> TokenScores:
        return token_scores(self.norm_linear(hidden, norm, eps, weight, residual)[0], known)
