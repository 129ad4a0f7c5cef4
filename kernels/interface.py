"""The operations that every backend offers: what the model is written against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.known_tokens import KnownTokens, TokenScores
from pageturner.kernels.layout import AttentionBatch, KeyOrder
from pageturner.kernels.packed import PackedWeight

MAX_KEYS = 2**31 - 1
"""Of a sequence: lengths are int32."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What is constant about one layer's attention.

    Raises KernelArgumentError for a cap that is not positive, and for a window or chunk that is no positive
    int32.
    """

    scale: float
    """Factor on q.k."""
    sliding_window: int | None = None
    """A row sees at most so many keys, itself included (None: all)."""
    logit_softcap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    sinks: torch.Tensor | None = None
    """float32 [num_heads], a logit per head that joins the softmax's denominator only."""
    chunk: int | None = None
    """A row sees only keys of its own chunk of so many positions (llama4); None: all."""

    def __post_init__(self) -> None:
        for name in ("sliding_window", "chunk"):
            bound = getattr(self, name)
            if bound is not None and not (isinstance(bound, int) and 0 < bound <= MAX_KEYS):
                raise KernelArgumentError(name, str(bound), f"1 to {MAX_KEYS}, or None")
        if self.logit_softcap is not None and not self.logit_softcap > 0:
            raise KernelArgumentError("logit_softcap", str(self.logit_softcap), "above 0, or None")


class PagedOps(Protocol):
    """Operations on a pool in the layout of `kernels.layout`; `kernels.reference` defines their results.

    `kv_layer` is pool[:, layer]: [num_blocks, 2, num_kv_heads, block_size, head_dim], strided.
    """

    @property
    def name(self) -> str:
        """As logs and GetServerInfo name it, such as "cpu"."""
        ...

    @property
    def key_order(self) -> KeyOrder:
        """The key order this backend wants; the pool must be made with it."""
        ...

    @property
    def narrow_pool(self) -> bool:
        """Whether float32 rows may be kept in a bfloat16 pool; else a pool has the rows' dtype."""
        ...

    @property
    def coded_pool(self) -> bool:
        """Whether rows may be kept as codes (`kernels.kv_codes`)."""
        ...

    @property
    def row_invariant(self) -> bool:
        """Whether a row's bits depend on its own tokens alone, by construction."""
        ...

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch
    ) -> None:
        """Store key, value [T, num_kv_heads, head_dim] at batch.slot_mapping."""
        ...

    def attention(
        self, query: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        """query [T, num_heads, head_dim] -> [T, num_heads, head_dim], reading keys through block_tables."""
        ...

    def rope_and_write_kv(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_layer: torch.Tensor,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Rotate query and key by cos, sin [T, head_dim] (halves rotated, as llama); store key and value.

        Returns the rotated query.
        """
        ...

    def rms_norm(
        self, hidden: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed, residual): residual + hidden if one is given, else hidden, and its norm, times weight."""
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 * I] -> silu(first half) * second half."""
        ...

    def copy_blocks(self, pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Within one pool, all sources read before any destination is written."""
        ...

    def transfer_blocks(
        self, source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]
    ) -> None:
        """Between two pools (swap out, swap in); pairs are (source id, destination id)."""
        ...


class QuantisedOps(Protocol):
    """Products of float32 rows with weights quantised in groups; `kernels.reference` defines their results.

    Rows are quantised to int8 in groups of the weight's size; sums inside a group are of integers and exact,
    and one fixed chain of float32 operations adds up the groups. Hence a row's bits depend on its own values
    alone, and `linear` gives the same bits in every implementation. A row that holds an infinity or NaN
    gives NaN. Pack weights by `packed.pack`.
    """

    @property
    def name(self) -> str:
        """As logs name it, such as "avx512-vnni"."""
        ...

    def linear(self, rows: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """rows [T, in] -> [T, out], with the weight's bias."""
        ...

    def norm_linear(
        self,
        hidden: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        weight: PackedWeight,
        residual: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(linear(normed, weight), residual) of `PagedOps.rms_norm`'s (normed, residual)."""
        ...

    def norm_mlp(
        self,
        hidden: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        gate_up: PackedWeight,
        down: PackedWeight,
        residual: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(down @ (silu(gate) * up), residual) of the same: a decoder's whole feed-forward part.

        gate_up [2 * I, in] holds the outputs of gate, then those of up; down [out, I].
        """
        ...

    def norm_scores(
        self,
        hidden: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        weight: PackedWeight,
        known: KnownTokens,
        residual: torch.Tensor | None = None,
    ) -> TokenScores:
        """What the logits [R, V] of `norm_linear` say of known tokens, by `reference_scores.token_scores`.

        Log-probabilities are right within `reference_scores.bound_of`. A row's bits depend on its own values
        and tokens alone.
        """
        ...
