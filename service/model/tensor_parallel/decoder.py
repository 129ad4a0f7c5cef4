"""The lean decoder on one of several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pageturner.kernels.interface import PagedOps
from pageturner.service.model.decoder import Decoder
from pageturner.service.model.decoder_config import DecoderConfig
from pageturner.service.model.products import OpenLayer, Products
from pageturner.service.model.tensor_parallel.collectives import Collectives
from pageturner.service.model.tensor_parallel.parallel_products import ParallelProducts
from pageturner.service.model.tensor_parallel.shards import Shard


class ParallelDecoder(Decoder):
    """A `Decoder` with this rank's heads, and the logits of the whole vocabulary.

    Every rank runs the same batches in the same order, over a KV pool of as many blocks. Heads are this
    rank's (`num_heads`, `num_kv_heads`, hence the pool's), as are `weight_bytes`; `num_parameters` is the
    whole model's. whole: its config. shards: of all ranks. products, layers: as `ParallelProducts` has them.
    """

    def __init__(
        self,
        whole: DecoderConfig,
        shards: Sequence[Shard],
        products: Products,
        layers: Iterable[OpenLayer],
        collectives: Collectives,
        ops: PagedOps,
        max_position: int | None = None,
    ) -> None:
        self.whole, self.shard = whole, shards[collectives.rank]
        config = replace(self.shard.config(whole), vocab_size=whole.vocab_size)
        parallel = ParallelProducts(whole, shards, products, layers, collectives)
        super().__init__(config, parallel, ops, max_position)
        self.total_kv_heads = whole.num_kv_heads
