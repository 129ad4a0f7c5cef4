"""Any causal model of `transformers` over the paged cache: flat tokens in, logits of the wanted rows out.

The rows of a step go in as one sequence [1, T] with their true positions; whatever tells them apart is
attention, and that is ours. Whether it works for a model is found out before it serves (`probe`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from pageturner.kernels.interface import PagedOps
from pageturner.kernels.layout import KvLayout
from pageturner.service.errors import ConfigError, ModelError
from pageturner.service.model.artifacts import ModelArtifacts
from pageturner.service.model.backend import HeadShape
from pageturner.service.model.batch import ForwardBatch
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.model.linear import LinearFactory
from pageturner.service.model.probe import (
    AttentionShapes,
    check_paged_model,
    examine,
    plain_logits,
    probe_prompts,
)
from pageturner.service.model.rope import longest_sequence
from pageturner.service.model.tensor_parallel.collectives import ALONE, Collectives
from pageturner.service.model.tensor_parallel.transformers_plan import shard_by_plan
from pageturner.service.model.transformers_attention import PagedStep, attention_by
from pageturner.service.model.transformers_rope import NO_SCALING, check_stretched, stretch

_NAMED_WEIGHTS = 5


class TransformersModel:
    """A `CausalModel` around a `transformers` model, which it takes over: its attention is ours from now on.

    shapes: what `probe.examine` found. max_position: the longest sequence, at most and by default the
    model's own; ModelError if neither says. Whether the results are right, `probe.check_paged_model` tells.
    """

    backend = "transformers"

    def __init__(
        self,
        model: PreTrainedModel,
        shapes: AttentionShapes,
        ops: PagedOps,
        *,
        max_position: int | None = None,
    ) -> None:
        self.model_type: str = model.config.model_type
        self.num_layers = len(shapes.layers)
        self.num_heads, self.num_kv_heads = shapes.num_heads, shapes.num_kv_heads
        self.total_kv_heads = shapes.num_kv_heads
        self.head_dim = shapes.head_dim
        self.window = shapes.window
        self.vocab_size = _vocab_size(model)
        self.max_position = _longest_sequence(model, max_position)
        self.num_parameters: int = model.num_parameters()
        self.dtype: torch.dtype = model.dtype
        self.kv_dtype = self.dtype
        self.weight_bytes = self.num_parameters * self.dtype.itemsize
        self.device: torch.device = model.device
        self.ops = ops
        self._model = model
        self._layers = shapes.layers
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def kv_layout(self, block_size: int) -> KvLayout:
        """The layout that a cache for this model must have."""
        return KvLayout(
            self.num_layers, self.num_kv_heads, self.head_dim, block_size, self.kv_dtype, self.ops.key_order
        )

    def pack_linears(self, *, deterministic: bool = False) -> None:
        """Replace every nn.Linear by one of packed weights; see `linear`. Raises ModelError as that does."""
        make = LinearFactory(deterministic=deterministic)
        for parent in list(self._model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, _PackedLinear(child, make))

    def forward(self, batch: ForwardBatch, kv_cache: KvCache) -> torch.Tensor:
        """Write the KV of every row with a slot; logits [len(batch.logit_rows), vocab_size]."""
        options = {"logits_to_keep": batch.logit_rows} if self._keeps_rows else {}
        with attention_by(PagedStep(self.ops, kv_cache, batch.attention, self._layers)):
            logits: torch.Tensor = self._model(
                input_ids=batch.token_ids.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                **options,
            ).logits.squeeze(0)
        return logits if self._keeps_rows else logits[batch.logit_rows]


class _PackedLinear(nn.Module):
    """In the place of an nn.Linear. Models that look at `weight` find its dtype and shape, no values."""

    def __init__(self, linear: nn.Linear, make: LinearFactory) -> None:
        super().__init__()
        self.weight = linear.weight.detach().to("meta")
        self._linear = make(linear.weight.detach(), linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self._linear(x.flatten(0, -2))
        return result.view(*x.shape[:-1], result.shape[-1])


def _vocab_size(model: PreTrainedModel) -> int:
    """Rows that are looked up, whatever the configuration says."""
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Module)
    return int(embeddings.get_parameter("weight").shape[0])


def _longest_sequence(model: PreTrainedModel, wanted: int | None) -> int:
    """The smaller of what is wanted and what the configuration names; ModelError if there is neither."""
    config = model.config.get_text_config()
    own = getattr(config, "max_position_embeddings", None)
    if own is not None:
        own = longest_sequence(config.to_dict(), own)
    bounds = [bound for bound in (own, wanted) if bound is not None]
    if not bounds:
        raise ModelError(f"{model.config.model_type}: names no longest sequence; set model.max_position")
    return min(bounds)


def load_transformers_model(
    artifacts: ModelArtifacts,
    choose_ops: Callable[[HeadShape], PagedOps],
    *,
    max_position: int | None = None,
    deterministic: bool = False,
    device: torch.device | None = None,
    kv_dtype: torch.dtype | None = None,
    collectives: Collectives = ALONE,
    rope_scaling: Mapping[str, Any] = NO_SCALING,
) -> TransformersModel:
    """Read a model by `transformers`, and make sure that it runs right over the paged cache.

    choose_ops: operations for a shape of heads. kv_dtype: of its cache; by default that of its activations,
    in which it is tried whatever it is to have then. collectives: with the ranks that hold other parts of it;
    each reads it whole, into main memory, and keeps its own. rope_scaling: in place of the model's own, where
    not empty. No code that comes with the model is executed. Raises ModelError, with its type and the reason,
    if it cannot be read or does not run right, ConfigError for ranks that it can't be cut for, and for a
    scaling that it does not take.
    """
    # A server's log is no place for a progress bar. (transformers leaves the function untyped.)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = AutoConfig.from_pretrained(artifacts.folder, local_files_only=True, trust_remote_code=False)
        if rope_scaling:
            stretch(config, rope_scaling)
        # A pair because of output_loading_info, which transformers' annotations leave out.
        read: Any = AutoModelForCausalLM.from_pretrained(
            artifacts.folder,
            config=config,
            output_loading_info=True,
            dtype=getattr(torch, artifacts.dtype),
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except ConfigError:
        raise
    except Exception as error:  # a config.json may hold anything, and transformers compute with it
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"transformers cannot read {artifacts.name}: {reason}") from error
    model: PreTrainedModel = read[0]
    _check_weights(artifacts.name, read[1])
    if rope_scaling:
        check_stretched(model, rope_scaling)
    if collectives.size == 1:
        nn.Module.to(model, device)
    checked = checked_model(
        model,
        choose_ops,
        max_position=max_position,
        deterministic=deterministic,
        device=device,
        collectives=collectives,
    )
    if kv_dtype is not None:
        checked.kv_dtype = kv_dtype
    return checked


def _check_weights(name: str, told: Mapping[str, Any]) -> None:
    """Raise ModelError for weights that the files lack: transformers fills them with random numbers."""
    lacking = sorted(map(str, told["missing_keys"]))
    if lacking:
        more = f" and {len(lacking) - _NAMED_WEIGHTS} more" if len(lacking) > _NAMED_WEIGHTS else ""
        raise ModelError(f"{name}: the weights lack {', '.join(lacking[:_NAMED_WEIGHTS])}{more}")


def checked_model(
    model: PreTrainedModel,
    choose_ops: Callable[[HeadShape], PagedOps],
    *,
    max_position: int | None = None,
    deterministic: bool = False,
    device: torch.device | None = None,
    collectives: Collectives = ALONE,
) -> TransformersModel:
    """The model over the paged cache, its weights packed, after the probe has seen it right.

    device: where it goes once it is cut, by default where it is. collectives: as `load_transformers_model`
    says; what the probe compares with is the whole model. Raises as that does.
    """
    nn.Module.eval(model).requires_grad_(False)
    num_parameters: int = model.num_parameters()
    shapes = whole = examine(model)
    prompts = probe_prompts(_vocab_size(model), _longest_sequence(model, max_position))
    expected = plain_logits(model, prompts)
    if collectives.size > 1:
        shard_by_plan(model, collectives)
        shapes = examine(model)
    nn.Module.to(model, device)
    ops = choose_ops(HeadShape(shapes.num_heads, shapes.num_kv_heads, shapes.head_dim))
    paged = TransformersModel(model, shapes, ops, max_position=max_position)
    paged.num_parameters, paged.total_kv_heads = num_parameters, whole.num_kv_heads
    if (width := expected[0].shape[-1]) != paged.vocab_size:
        reason = f"{width} logits a row for {paged.vocab_size} embeddings"
        raise ModelError(f"{paged.model_type}: {reason}, so that a sampled token might have none")
    paged.pack_linears(deterministic=deterministic)
    check_paged_model(
        paged, prompts, [logits.to(model.device) for logits in expected], deterministic=deterministic
    )
    return paged
