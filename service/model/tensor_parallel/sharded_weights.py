"""A rank's part of each weight, cut out of whole ones as they are read.

Both classes stand where the files of a whole model would: who loads products asks for the sizes of the
shard's own config, by the names of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch

from pageturner.kernels.packed import PackedWeight, take_outputs
from pageturner.service.errors import ModelError
from pageturner.service.model.decoder_config import DecoderConfig
from pageturner.service.model.packed_file import PackedFile
from pageturner.service.model.packing import EMBEDDING, HEAD
from pageturner.service.model.pages import own_pages
from pageturner.service.model.quantised_products import LayerShapes
from pageturner.service.model.tensor_parallel.cuts import Cut, moved, scaled, summed_cuts
from pageturner.service.model.tensor_parallel.shards import Shard
from pageturner.service.model.weight_source import WeightSource


class PartSource(WeightSource, Protocol):
    """One that reads parts of its tensors."""

    def take_part(self, name: str, shape: Sequence[int], axis: int, part: range) -> torch.Tensor:
        """As `take`, of shape, those rows (axis 0) or columns (axis 1) alone."""
        ...


class ShardedWeights:
    """A `WeightSource` of a shard. source: of the whole model, that `config` describes."""

    def __init__(self, source: PartSource, config: DecoderConfig, shard: Shard) -> None:
        self._source, self._shard = source, shard
        vocabulary = Cut((config.vocab_size, config.hidden_size), outputs=(shard.vocabulary,))
        self._cuts = {**summed_cuts(config, shard), "embed_tokens": vocabulary, "lm_head": vocabulary}

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The shard's part. Raises ModelError for a weight that is missing or of another shape."""
        stem, _, kind = name.rpartition(".")
        cut = self._cuts.get(stem.rpartition(".")[2])
        if cut is None:
            return self._source.take(name, shape)
        if kind == "bias":
            if cut.outputs:
                return self._source.take_part(name, cut.whole[:1], 0, cut.outputs[0])
            # What is added to a sum of all ranks' is added by one of them.
            bias = self._source.take(name, cut.whole[:1])
            return bias if self._shard.rank == 0 else torch.zeros_like(bias)
        if cut.outputs:
            return self._source.take_part(name, cut.whole, 0, cut.outputs[0])
        return self._source.take_part(name, cut.whole, 1, cut.inputs)

    def take_groups(self, name: str, shape: Sequence[int]) -> None:
        """What has groups is packed whole, and then cut: see `ShardedPackedFile`."""

    def left(self) -> Iterator[str]:
        return self._source.left()


class ShardedPackedFile:
    """A `PackedSource` of a shard, all of it cut by outputs: the same groups, in memory of its own.

    file: of the whole model.
    """

    def __init__(self, file: PackedFile, config: DecoderConfig, shard: Shard) -> None:
        self._file = file
        self._arena = _Arena(file.num_bytes)
        (q_size, k_size, _), hidden, inner = config.qkv_sizes, config.hidden_size, config.intermediate_size
        heads, kv_heads = scaled(shard.heads, config.head_dim), scaled(shard.kv_heads, config.head_dim)
        keys, values = moved(kv_heads, q_size), moved(kv_heads, q_size + k_size)
        vocabulary = Cut((config.vocab_size, hidden), outputs=(shard.vocabulary,))
        self._cuts: Mapping[str, Cut] = {
            "qkv": Cut((q_size + 2 * k_size, hidden), outputs=(heads, keys, values)),
            "out": Cut((hidden, q_size), outputs=(shard.hidden,)),
            "gate_up": Cut((2 * inner, hidden), outputs=(shard.inner, moved(shard.inner, inner))),
            "down": Cut((hidden, inner), outputs=(shard.hidden,)),
            EMBEDDING: vocabulary,
            HEAD: vocabulary,
        }

    @property
    def shapes(self) -> LayerShapes:
        """Of a layer's products, once they are cut."""
        qkv, out, gate_up, down = (self._cuts[name] for name in ("qkv", "out", "gate_up", "down"))
        return LayerShapes(qkv.shape, out.shape, gate_up.shape, down.shape)

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Norms, which every rank has whole."""
        return self._file.take(name, shape).clone()

    def take_packed(
        self, name: str, out_features: int, in_features: int, *, bias: bool = False
    ) -> PackedWeight:
        """The shard's part. Raises ModelError for a weight that is missing or of another shape."""
        cut = self._cuts[name.rpartition(".")[2]]
        if cut.shape != (out_features, in_features):
            raise ModelError(f"{name}: a shard of it is {cut.shape}, not {(out_features, in_features)}")
        return take_outputs(
            self._file.take_packed(name, *cut.whole, bias=bias), cut.outputs, self._arena.allocate
        )


class _Arena:
    """Bytes of huge pages, dealt out in order: a step reads every weight once. size: at most so many."""

    def __init__(self, size: int) -> None:
        self._bytes = own_pages((size,), torch.uint8, huge=True)
        self._used = 0

    def allocate(self, size: int) -> torch.Tensor:
        """Zeros. Sizes are multiples of the alignment of packed weights."""
        begin, self._used = self._used, self._used + size
        assert self._used <= len(self._bytes), "shards are no larger than the whole"
        return self._bytes[begin : self._used]
