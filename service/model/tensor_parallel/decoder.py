"""The lean decoder on one of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from pageturner.kernels.interface import PagedOps
from pageturner.kernels.known_tokens import TokenScores
from pageturner.service.model.adapters import AdapterShapes
from pageturner.service.model.batch import ForwardBatch
from pageturner.service.model.decoder import Decoder, low_rank_ops
from pageturner.service.model.decoder_config import DecoderConfig
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.model.products import OpenLayer, Products
from pageturner.service.model.scores import ScoredRows, score_logits
from pageturner.service.model.tensor_parallel.collectives import Collectives
from pageturner.service.model.tensor_parallel.cuts import Cut
from pageturner.service.model.tensor_parallel.parallel_products import ParallelProducts
from pageturner.service.model.tensor_parallel.shards import Shard
from pageturner.service.model.upload import upload

Cuts = Callable[[DecoderConfig, Shard], Mapping[str, Cut]]
"""`summed_cuts` or `gathered_cuts`."""


class ParallelDecoder(Decoder):
    """A `Decoder` with this rank's heads, and the logits of the whole vocabulary.

    Every rank runs the same batches in the same order, over a KV pool of as many blocks. Heads are this
    rank's (`num_heads`, `num_kv_heads`, hence the pool's), as are `weight_bytes`; `num_parameters` is the
    whole model's. whole: its config. shards: of all ranks. products, layers: as `ParallelProducts` has them.
    cuts: of those layers' weights.
    """

    def __init__(
        self,
        whole: DecoderConfig,
        shards: Sequence[Shard],
        products: Products,
        layers: Iterable[OpenLayer],
        cuts: Cuts,
        collectives: Collectives,
        ops: PagedOps,
        max_position: int | None = None,
    ) -> None:
        self.whole, self.shard = whole, shards[collectives.rank]
        config = replace(self.shard.config(whole), vocab_size=whole.vocab_size)
        parallel = ParallelProducts(whole, shards, products, layers, collectives)
        super().__init__(config, parallel, ops, max_position)
        self.total_kv_heads = whole.num_kv_heads
        all_cuts = [cuts(whole, shard) for shard in shards]
        self._cuts = all_cuts[collectives.rank]
        # Of all ranks, so that these have the same operations.
        sizes = (cut.shape[0] for of_rank in all_cuts for cut in of_rank.values())
        self.low_rank, self.row_groups = low_rank_ops(products, ops, sizes)

    def _adapter_shapes(self, max_rank: int, max_bytes: int) -> AdapterShapes:
        return AdapterShapes(self.whole, max_rank, max_bytes, self.row_groups, self._cuts)

    def forward_scored(
        self, batch: ForwardBatch, kv_cache: KvCache, scored: ScoredRows
    ) -> tuple[torch.Tensor, TokenScores]:
        """By the logits of all rows: other ranks take part in the same collectives, and know no scores."""
        places, sampled = upload((scored.places, scored.sampled), self.device)
        logits = self.forward(batch, kv_cache)
        return logits[sampled], score_logits(logits[places], scored.known)
