"""The door through which a `transformers` model reaches our attention, and what it asks for there.

`transformers` looks an attention function up by name and calls it in every layer with query, key and
value, and with what is special about the layer as keywords. Our function hands the call to whatever
`Attention` is in force: the paged step in service, a recorder while the model is examined. That one
travels in a context variable, since some models (stablelm, nemotron) drop keywords on the way down.

What a layer asks for is obeyed or refused with ModelError, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from pageturner.kernels.interface import AttentionSpec, PagedOps
from pageturner.kernels.layout import AttentionBatch
from pageturner.service.errors import ModelError
from pageturner.service.model.kv_cache import KvCache

IMPLEMENTATION = "pageturner"

_T = TypeVar("_T")

MaskFunction = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""(batch, head, query position, key position) -> whether that key is seen, as `transformers` builds it."""

_OBEYED = frozenset({"scaling", "sliding_window", "softcap", "s_aux", "is_causal"})
# About caches and outputs that are not asked for, dropout that evaluation leaves out, positions that the
# rotation has used already, and router outputs.
_WITHOUT_EFFECT = frozenset(
    {"dropout", "position_ids", "use_cache", "cache", "cache_position", "output_attentions", "return_dict"}
    | {"output_hidden_states", "output_router_logits", "deterministic", "logits_to_keep"}
)
_KNOWN = _OBEYED | _WITHOUT_EFFECT


class Attention(Protocol):
    """Answers one model's calls during one forward."""

    def mask(self, mask_function: MaskFunction) -> torch.Tensor | None:
        """What the model shall carry as its mask down to the layers."""
        ...

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """[T, num_heads, width of the values]."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call: query [T, H, D], key [T, Hkv, D], value [T, Hkv, Dv], RoPE done."""

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    keywords: Mapping[str, object]

    def spec(self) -> AttentionSpec:
        """What the layer asks for. Raises ModelError for what we can't give."""
        keywords = self.keywords
        for name, value in keywords.items():
            if name not in _KNOWN and value is not None and value is not False:
                raise ModelError(f"attention is given {name!r}, which is not supported")
        is_causal = keywords.get("is_causal")
        if is_causal is False or (is_causal is None and getattr(self.module, "is_causal", True) is False):
            raise ModelError("attention is not causal")
        sinks = _typed(keywords, "s_aux", torch.Tensor)
        scale = _number(keywords, "scaling")
        return AttentionSpec(
            scale=self.query.shape[-1] ** -0.5 if scale is None else scale,
            sliding_window=_typed(keywords, "sliding_window", int),
            logit_softcap=_number(keywords, "softcap"),
            sinks=None if sinks is None else sinks.detach().float(),
            chunk=_chunk(self.module),
        )


def _typed(keywords: Mapping[str, object], name: str, kind: type[_T]) -> _T | None:
    value = keywords.get(name)
    if value is None or isinstance(value, kind):
        return value
    raise ModelError(f"attention is given {name}={value!r}")


def _number(keywords: Mapping[str, object], name: str) -> float | None:
    return _typed(keywords, name, int if isinstance(keywords.get(name), int) else float)


def _chunk(module: nn.Module) -> int | None:
    """llama4 does not pass the size of its chunks, only masks by it."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None or index is None or layer_types[index] != "chunked_attention":
        return None
    return int(getattr(config, "attention_chunk_size"))  # noqa: B009 - config is of any class


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Attention of one step: store this step's keys and values, attend through the block tables.

    layers: id of an attention module -> its layer in the cache. Heads narrower than the cache's
    head_dim are padded with zeros: values narrower than keys (multi-head latent attention), or the reverse.
    """

    ops: PagedOps
    kv_cache: KvCache
    batch: AttentionBatch
    layers: Mapping[int, int]

    def mask(self, mask_function: MaskFunction) -> None:
        return None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if call.mask is not None:
            raise ModelError("a layer brings an attention mask of its own")
        kv_layer = self.kv_cache.layer(self.layers[id(call.module)])
        width = self.kv_cache.layout.head_dim
        query, key, value = (_padded(rows, width) for rows in (call.query, call.key, call.value))
        self.ops.write_kv(key, value, kv_layer, self.batch)
        result = self.ops.attention(query, kv_layer, self.batch, call.spec())
        return result[..., : call.value.shape[-1]]


def _padded(rows: torch.Tensor, width: int) -> torch.Tensor:
    return pad(rows, (0, width - rows.shape[-1])) if rows.shape[-1] < width else rows


_IN_FORCE: ContextVar[Attention] = ContextVar("attention")


@contextmanager
def attention_by(attention: Attention) -> Iterator[None]:
    """Every call of a model's attention function in this context goes to `attention`."""
    token = _IN_FORCE.set(attention)
    try:
        yield
    finally:
        _IN_FORCE.reset(token)


def set_implementation(model: PreTrainedModel, name: str) -> None:
    """Let every part of the model look its attention up under this name from now on.

    Models whose classes were chosen by the name at construction don't notice.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation = name


def _attention_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **keywords: object,
) -> tuple[torch.Tensor, None]:
    """What `transformers` calls: [1, heads, T, D] each, to [1, T, heads, Dv]."""
    query, key, value = (part.squeeze(0).transpose(0, 1).contiguous() for part in (query, key, value))
    call = AttentionCall(module, query, key, value, attention_mask, keywords)
    return _IN_FORCE.get().attend(call).unsqueeze(0), None


def _mask_function(*, mask_function: MaskFunction, **_: object) -> torch.Tensor | None:
    return _IN_FORCE.get().mask(mask_function)


AttentionInterface.register(IMPLEMENTATION, _attention_function)
AttentionMaskInterface.register(IMPLEMENTATION, _mask_function)
