"""The matrix products of a decoder, with what is fused into them: the seam between flow and numbers.

`dense_products` computes them from float weights, `quantised_products` from weights in groups of integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import torch


class LayerProducts(Protocol):
    """Those of one layer. hidden, residual: [T, hidden_size]; the first layer has no residual yet.

    Each norm is of residual + hidden, which is the next residual.
    """

    def qkv(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(q, k and v of the normed rows side by side, residual)."""
        ...

    def out(self, attended: torch.Tensor) -> torch.Tensor:
        """What attention adds to the residual."""
        ...

    def mlp(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the feed-forward part adds to the residual, residual)."""
        ...


Add = Callable[[torch.Tensor, torch.Tensor], None]
"""Adds to a product [T, out], in place, what comes of the rows [T, in] that it is of. On one of several ranks
both are this rank's, and the product is made whole after it."""

Projection = Literal["qkv", "out", "gate_up", "down"]
PROJECTIONS: tuple[Projection, ...] = ("qkv", "out", "gate_up", "down")
"""The four products of a layer, in the order of a forward."""


class OpenLayer(LayerProducts, Protocol):
    """A layer of which each product can be had by itself, for what comes between them (`adapted_layer`)."""

    @property
    def eps(self) -> float:
        """Of both norms."""
        ...

    @property
    def attention_norm(self) -> torch.Tensor:
        """[hidden_size], as mlp_norm."""
        ...

    @property
    def mlp_norm(self) -> torch.Tensor: ...

    def project(self, name: Projection, rows: torch.Tensor, add: Add) -> torch.Tensor:
        """One product [T, out] of the rows [T, in], with what `add` adds to it."""
        ...


_Products = TypeVar("_Products", bound=OpenLayer, covariant=True)


@dataclass(frozen=True, slots=True)
class Layer(Generic[_Products]):
    """What a layer computes with. q_norm, k_norm: weights of qwen3's norms of each head."""

    products: _Products
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


class Products(Protocol):
    """Those of a whole model."""

    @property
    def name(self) -> str:
        """As logs and GetServerInfo name them, such as "bfloat16" or "int4 groups"."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and logits."""
        ...

    @property
    def kv_dtype(self) -> torch.dtype:
        """That the KV pool is best kept in."""
        ...

    @property
    def device(self) -> torch.device:
        """Where they compute."""
        ...

    @property
    def num_parameters(self) -> int:
        """Weights, counted one by one."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Of all weights, as they lie in memory."""
        ...

    @property
    def layers(self) -> Iterable[Layer[OpenLayer]]:
        """First to last; may be walked many times."""
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, hidden_size]."""
        ...

    def head(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab_size] of some rows, after the last norm."""
        ...
