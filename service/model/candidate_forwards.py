"""One model as each candidate computes it, for comparison: from its files, beside what serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from pageturner.kernels.interface import PagedOps, QuantisedOps
from pageturner.service.model.accuracy import Logits, logits_of, packaged_text
from pageturner.service.model.artifacts import ModelArtifacts
from pageturner.service.model.backend import ChooseOps, HeadShape
from pageturner.service.model.build import pool_dtype
from pageturner.service.model.decoder import Decoder, load_decoder
from pageturner.service.model.decoder_config import DecoderConfig, parse_decoder_config
from pageturner.service.model.loader import is_gguf, load_artifacts, open_weights
from pageturner.service.model.options import KvDtype, ModelOptions, Quantization
from pageturner.service.model.packed_file import PackedFile
from pageturner.service.model.quantised_products import QuantisedProducts, load_quantised_products

DENSE = ("float32", "bfloat16")
_MOST_CHARACTERS = 64
"""Of the text that are read for one token: prose has four or five."""


@dataclass(frozen=True, slots=True)
class CandidateForwards:
    """The forwards of one model. artifacts: in whatever form; conversions go to cache_dir."""

    artifacts: ModelArtifacts
    config: DecoderConfig
    options: ModelOptions
    cache_dir: Path
    choose_ops: ChooseOps
    quantised_ops: QuantisedOps

    def ops(self, dtype: torch.dtype) -> PagedOps:
        """Those for activations of a dtype."""
        config = self.config
        return self.choose_ops(HeadShape(config.num_heads, config.num_kv_heads, config.head_dim), dtype)

    def text_tokens(self, count: int | None = None) -> Sequence[int]:
        """The first tokens of the packaged text that the model has embeddings for; it has a tokenizer."""
        tokenizer = self.artifacts.tokenizer
        assert tokenizer is not None, "without a tokenizer there is no text"
        end = None if count is None else count * _MOST_CHARACTERS  # a start that asks for two need not wait
        ids = tokenizer.encode(packaged_text()[:end]).ids
        return [token for token in ids if token < self.config.vocab_size][:count]

    def products(self, scheme: str) -> QuantisedProducts:
        """Quantised by a scheme, converted if they are not yet. Raises ModelError."""
        options = replace(self.options, dtype="auto", quantization=cast(Quantization, scheme))
        packed = load_artifacts(options, self.cache_dir).packed
        assert packed is not None, f"{scheme} is a scheme of quantisation"
        kv_dtype = pool_dtype(self.options, self.ops(torch.float32), quantised=True, rows=torch.float32)
        return load_quantised_products(scheme, self.config, PackedFile(packed), self.quantised_ops, kv_dtype)

    def logits(self, name: str, *, streamed: bool = True) -> Logits:
        """Of a candidate by name: its products, and behind a slash what its KV is kept in, where that is not
        as the options have it (for quantised products) or its activations (for plain ones).

        streamed: a dense one is read layer by layer, in each forward anew.
        """
        products, slash, word = name.partition("/")
        options = replace(self.options, kv_dtype=cast(KvDtype, word)) if slash else self.options
        if products not in DENSE:
            return self.quantised_logits(replace(self, options=options).products(products))
        dtype: torch.dtype = getattr(torch, products)
        ops = self.ops(dtype)
        kv_dtype = pool_dtype(options, ops, quantised=False, rows=dtype) if slash else dtype
        weights = open_weights(self.artifacts)
        decoder = load_decoder(self.config, weights, ops, dtype, kv_dtype=kv_dtype, streamed=streamed)
        return logits_of(decoder, ops)

    def quantised_logits(self, products: QuantisedProducts) -> Logits:
        """Of a candidate whose products are loaded: a second copy might not fit in memory."""
        ops = self.ops(torch.float32)
        return logits_of(Decoder(self.config, products, ops), ops)


def candidate_forwards(
    options: ModelOptions, cache_dir: Path, choose_ops: ChooseOps, quantised_ops: QuantisedOps
) -> CandidateForwards:
    """Those of the model that options name. Raises ModelError, NotLean and NotPackable of its kinds."""
    scheme: Quantization = "file" if is_gguf(options.source) else "int8"
    artifacts = load_artifacts(replace(options, dtype="auto", quantization=scheme), cache_dir)
    config = parse_decoder_config(artifacts.config)
    return CandidateForwards(artifacts, config, options, cache_dir, choose_ops, quantised_ops)
