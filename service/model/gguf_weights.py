"""The tensors of a GGUF file by the names and in the row order that `transformers` has.

llama.cpp keeps the rows of q and k of llama in the order in which its RoPE rotates them, two halves of a head
side by side. Whole rows move, so that what is quantised is put back in order as it stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.grouped import GroupedWeight
from pageturner.service.errors import ModelError
from pageturner.service.model.gguf import GgufFile

ROPE_FACTORS = "rope_freqs.weight"
"""A part of the configuration that GGUF keeps among the weights."""

INTERLEAVED = frozenset({"llama"})
"""Model types whose rows of q and k lie in llama.cpp's RoPE order."""

_TOP_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def target_name(name: str) -> str:
    """The name `transformers` gives a GGUF tensor. Raises ModelError for one that is not known."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES and kind == "weight":
        return f"{_TOP_NAMES[stem]}.weight"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES and kind in ("weight", "bias"):
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{kind}"
    raise ModelError(f"GGUF tensor {name!r} has no place in this architecture")


class GgufWeights:
    """A `WeightSource` over a GGUF file. config: the model's config.json.

    Raises ModelError for a tensor that is not known.
    """

    def __init__(self, file: GgufFile, config: Mapping[str, Any]) -> None:
        self._file, self._config = file, config
        self._sources = {target_name(name): name for name in file.tensors if name != ROPE_FACTORS}
        self._left = set(self._sources)

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, in the order of the file."""
        return tuple(self._sources)

    def take(self, name: str, shape: Sequence[int] | None = None) -> torch.Tensor:
        """float32. Raises ModelError if it is missing or of another shape than is asked for."""
        source = self._source(name, shape)
        tensor, order = self._file.read(source), self._row_order(name, source)
        return tensor if order is None else tensor[order]

    def take_groups(self, name: str, shape: Sequence[int]) -> GroupedWeight | None:
        """The groups of a matrix as the file has them, None where it holds plain numbers or a rare kind.

        Raises ModelError as `take` does, and for a scale or a minimum that is not finite.
        """
        source = self._source(name, shape)
        found = self._file.read_groups(source)
        if found is None:
            return None
        groups, bits = found
        order = self._row_order(name, source)
        codes, scales, offsets = groups.codes, groups.scales, groups.offsets
        if bits == 4:
            if groups.zero:
                offsets = -groups.zero * scales.float()
                # Exact in either; float16 has the shorter range.
                offsets, scales = _as_narrow(offsets, scales)
        else:
            codes = codes.to(torch.int8) - groups.zero
        parts = [
            None if part is None else _rows(part.reshape(shape[0], -1), order)
            for part in (codes, scales, offsets)
        ]
        assert parts[0] is not None
        assert parts[1] is not None
        try:
            return GroupedWeight(parts[0], parts[1], parts[2], groups.codes.shape[1])
        except KernelArgumentError as error:
            raise ModelError(f"{self._file.path.name}: {source} is damaged: {error}") from error

    def left(self) -> Iterator[str]:
        """Names that were never taken, in order."""
        return iter(sorted(self._left))

    def _source(self, name: str, shape: Sequence[int] | None) -> str:
        source = self._sources.get(name)
        if source is None:
            raise ModelError(f"{self._file.path.name} lacks {name}")
        found = self._file.tensors[source].shape
        if shape is not None and found != tuple(shape):
            raise ModelError(f"{source} has shape {found}, the config asks for {tuple(shape)}")
        self._left.discard(name)
        return source

    def _row_order(self, name: str, source: str) -> torch.Tensor | None:
        """Which row of the file each row is, None for its own."""
        part = source.split(".")[-2]
        if self._config["model_type"] not in INTERLEAVED or part not in ("attn_q", "attn_k"):
            return None
        num_heads = self._config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        rows = torch.arange(self._file.tensors[source].shape[0])
        return rows.view(num_heads, -1, 2).transpose(1, 2).reshape(-1)


def _rows(part: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    return part.contiguous() if order is None else part[order]


def _as_narrow(offsets: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in the dtype of `scales` if that holds the offsets as well, else in float32."""
    narrow = offsets.to(scales.dtype)
    return (narrow, scales) if torch.equal(narrow.float(), offsets) else (offsets, scales.float())
