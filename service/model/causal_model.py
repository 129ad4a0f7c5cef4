"""The one interface of both forwards: flat tokens in, logits of the wanted rows out."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from pageturner.kernels.known_tokens import TokenScores
from pageturner.service.model.batch import ForwardBatch
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.model.scores import ScoredRows


class CausalModel(Protocol):
    """A causal language model that keeps its KV in a paged pool.

    The cache must have been made for the operations that the model was built with.
    """

    @property
    def backend(self) -> str:
        """`lean` or `transformers`."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers with attention, hence of the KV pool."""
        ...

    @property
    def num_heads(self) -> int:
        """Query heads of a layer, on this rank."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer, on this rank: those of the pool."""
        ...

    @property
    def total_kv_heads(self) -> int:
        """KV heads of a layer, whatever ranks hold them."""
        ...

    @property
    def head_dim(self) -> int:
        """Width of a head as the pool holds it."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding and width of the logits: ids are below it."""
        ...

    @property
    def max_position(self) -> int:
        """Longest sequence, in tokens."""
        ...

    @property
    def window(self) -> int | None:
        """Keys that a position sees at most, its own included, in whichever layer sees most; None where one
        of them sees everything."""
        ...

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model, counted one by one."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Of all weights on this rank, as they lie in memory."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and logits."""
        ...

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the KV pool that it reads and writes."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its weights are, its batches must be, and its logits will be."""
        ...

    def forward(self, batch: ForwardBatch, kv_cache: KvCache) -> torch.Tensor:
        """Write the KV of every row with a slot; return logits [len(batch.logit_rows), vocab_size]."""
        ...


@runtime_checkable
class ScoringModel(CausalModel, Protocol):
    """One that scores known tokens without leaving all of their rows' logits behind."""

    def forward_scored(
        self, batch: ForwardBatch, kv_cache: KvCache, scored: ScoredRows
    ) -> tuple[torch.Tensor, TokenScores]:
        """As `forward`: (logits of the rows that do not score, scores of what the others do)."""
        ...
