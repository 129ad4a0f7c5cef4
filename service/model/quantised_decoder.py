"""The lean decoder on quantised products: in one call a step, if there is one for this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch

from pageturner.kernels.cpu.forward import CpuDecoder, DecoderWeights
from pageturner.kernels.cpu.packed_low_rank import CpuAdapter
from pageturner.kernels.interface import PagedOps
from pageturner.kernels.known_tokens import KnownTokens, TokenScores
from pageturner.kernels.low_rank import AdapterRows
from pageturner.service.model.adapter_store import BatchAdapters
from pageturner.service.model.adapters import AdapterWeights
from pageturner.service.model.batch import ForwardBatch
from pageturner.service.model.decoder import Decoder
from pageturner.service.model.decoder_config import DecoderConfig
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.model.quantised_products import QuantisedProducts
from pageturner.service.model.scores import ScoredRows


class QuantisedDecoder(Decoder):
    """On quantised products: the whole forward in one call if `make_whole` makes one, with the same bits."""

    def __init__(
        self,
        config: DecoderConfig,
        products: QuantisedProducts,
        ops: PagedOps,
        max_position: int | None = None,
        make_whole: Callable[[DecoderWeights], CpuDecoder] | None = None,
    ) -> None:
        super().__init__(config, products, ops, max_position)
        self._whole, self._quantised = None, products
        self._adapters: WeakKeyDictionary[AdapterWeights, CpuAdapter] = WeakKeyDictionary()
        if make_whole is not None:
            self._whole = make_whole(products.whole_weights(config, self._attention, self._cos, self._sin))

    def forward(self, batch: ForwardBatch, kv_cache: KvCache) -> torch.Tensor:
        if self._whole is None:
            return super().forward(batch, kv_cache)
        adapters = None if batch.adapters is None else self._known(self._whole, batch.adapters)
        return self._whole.forward(
            batch.token_ids, batch.attention, batch.logit_rows, kv_cache.pool, adapters
        )

    def forward_scored(
        self, batch: ForwardBatch, kv_cache: KvCache, scored: ScoredRows
    ) -> tuple[torch.Tensor, TokenScores]:
        """As `ScoringModel` has it; no logits of rows that score are ever in memory."""
        if self._whole is None:
            return super().forward_scored(batch, kv_cache, scored)
        adapters = None if batch.adapters is None else self._known(self._whole, batch.adapters)
        places = np.concatenate((scored.sampled, scored.places))
        return self._whole.forward_scored(
            batch.token_ids,
            batch.attention,
            batch.logit_rows[torch.from_numpy(places)],
            scored.known,
            kv_cache.pool,
            adapters,
        )

    def _scores(self, hidden: torch.Tensor, residual: torch.Tensor, known: KnownTokens) -> TokenScores:
        return self._quantised.scores(hidden, residual, known)

    def _known(self, whole: CpuDecoder, adapters: BatchAdapters) -> tuple[AdapterRows, Sequence[CpuAdapter]]:
        """Those of a step as the one call reads them, which are prepared when they come first."""
        for weights in adapters.weights:
            if weights not in self._adapters:
                self._adapters[weights] = whole.prepare(weights.layers)
        return adapters.rows, [self._adapters[weights] for weights in adapters.weights]
