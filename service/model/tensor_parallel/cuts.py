"""Which outputs and inputs of each weight a rank holds. What adapters add to a weight is cut as it is.

Of B A, which an adapter adds to W [out, in], B has W's outputs and A its inputs. A rank that holds some
outputs of W multiplies by those of B and by the whole of A; one that holds some inputs, by those of A and by
the whole of B, and what comes out is added up with the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pageturner.kernels.low_rank import Factors
from pageturner.service.model.decoder_config import DecoderConfig
from pageturner.service.model.tensor_parallel.shards import Shard


@dataclass(frozen=True, slots=True)
class Cut:
    """By outputs, side by side, or by inputs. whole: [out, in] before."""

    whole: tuple[int, int]
    outputs: tuple[range, ...] = ()
    inputs: range = range(0)

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of what is left."""
        return (sum(map(len, self.outputs)) or self.whole[0], len(self.inputs) or self.whole[1])

    def of_factors(self, factors: Factors) -> Factors:
        """Those of what is left, in memory of their own."""
        a, b = factors.a, factors.b
        if self.outputs:
            b = torch.cat([b[part.start : part.stop] for part in self.outputs])
        if self.inputs:
            a = a[:, self.inputs.start : self.inputs.stop].clone()
        return Factors(a, b)


def summed_cuts(config: DecoderConfig, shard: Shard) -> Mapping[str, Cut]:
    """Of float weights, by the last part of their module's name: `o_proj` and `down_proj` by inputs. config:
    of the whole model."""
    (q_size, _, _), hidden, inner = config.qkv_sizes, config.hidden_size, config.intermediate_size
    return {
        **_by_outputs(config, shard),
        "o_proj": Cut((hidden, q_size), inputs=scaled(shard.heads, config.head_dim)),
        "down_proj": Cut((hidden, inner), inputs=shard.inner),
    }


def gathered_cuts(config: DecoderConfig, shard: Shard) -> Mapping[str, Cut]:
    """Of quantised ones, likewise: all by outputs."""
    (q_size, _, _), hidden, inner = config.qkv_sizes, config.hidden_size, config.intermediate_size
    return {
        **_by_outputs(config, shard),
        "o_proj": Cut((hidden, q_size), outputs=(shard.hidden,)),
        "down_proj": Cut((hidden, inner), outputs=(shard.hidden,)),
    }


def _by_outputs(config: DecoderConfig, shard: Shard) -> Mapping[str, Cut]:
    """What is cut alike either way."""
    (q_size, k_size, _), hidden, inner = config.qkv_sizes, config.hidden_size, config.intermediate_size
    heads, kv_heads = scaled(shard.heads, config.head_dim), scaled(shard.kv_heads, config.head_dim)
    return {
        "q_proj": Cut((q_size, hidden), outputs=(heads,)),
        "k_proj": Cut((k_size, hidden), outputs=(kv_heads,)),
        "v_proj": Cut((k_size, hidden), outputs=(kv_heads,)),
        "gate_proj": Cut((inner, hidden), outputs=(shard.inner,)),
        "up_proj": Cut((inner, hidden), outputs=(shard.inner,)),
    }


def scaled(part: range, factor: int) -> range:
    """Of units that are `factor` long each."""
    return range(part.start * factor, part.stop * factor)


def moved(part: range, offset: int) -> range:
    return range(part.start + offset, part.stop + offset)
