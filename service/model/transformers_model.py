"""Any causal model of `transformers` over the paged cache: flat tokens in, logits of the wanted rows out.

The rows of a step go in as one sequence [1, T] with their true positions; whatever tells them apart is
attention, and that is ours. Whether it works for a model is found out before it serves (`probe`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from pageturner.kernels.layout import KvLayout
from pageturner.kernels.ops import PagedOps
from pageturner.service.errors import ModelError
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
from pageturner.service.model.transformers_attention import PagedStep, attention_by


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
        self.head_dim = shapes.head_dim
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.max_position = _longest_sequence(model, max_position)
        self.num_parameters: int = model.num_parameters()
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.ops = ops
        self._model = model
        self._layers = shapes.layers
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def kv_layout(self, block_size: int) -> KvLayout:
        """The layout that a cache for this model must have."""
        return KvLayout(
            self.num_layers, self.num_kv_heads, self.head_dim, block_size, self.dtype, self.ops.key_page
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


def _longest_sequence(model: PreTrainedModel, wanted: int | None) -> int:
    """The smaller of what is wanted and what the configuration names; ModelError if there is neither."""
    own = getattr(model.config.get_text_config(), "max_position_embeddings", None)
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
) -> TransformersModel:
    """Read a model by `transformers`, and make sure that it runs right over the paged cache.

    choose_ops: operations for a shape of heads. No code that comes with the model is executed. Raises
    ModelError, with its type and the reason, if it cannot be read or does not run right.
    """
    # A server's log is no place for a progress bar. (transformers leaves the function untyped.)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            artifacts.folder,
            dtype=getattr(torch, artifacts.dtype),
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except Exception as error:  # a config.json may hold anything, and transformers compute with it
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"transformers cannot read {artifacts.name}: {reason}") from error
    nn.Module.to(model, device)
    return checked_model(model, choose_ops, max_position=max_position, deterministic=deterministic)


def checked_model(
    model: PreTrainedModel,
    choose_ops: Callable[[HeadShape], PagedOps],
    *,
    max_position: int | None = None,
    deterministic: bool = False,
) -> TransformersModel:
    """The model over the paged cache, its weights packed, after the probe has seen it right.

    Raises ModelError, with its type and the reason, if it is not.
    """
    nn.Module.eval(model).requires_grad_(False)
    shapes = examine(model)
    ops = choose_ops(HeadShape(shapes.num_heads, shapes.num_kv_heads, shapes.head_dim))
    paged = TransformersModel(model, shapes, ops, max_position=max_position)
    prompts = probe_prompts(paged.vocab_size, paged.max_position)
    expected = plain_logits(model, prompts)
    paged.pack_linears(deterministic=deterministic)
    check_paged_model(paged, prompts, expected, deterministic=deterministic)
    return paged
