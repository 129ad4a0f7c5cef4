"""ModelArtifacts -> a model that runs, by the lean decoder or by `transformers`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pageturner.kernels.interface import PagedOps
from pageturner.service.errors import ModelError
from pageturner.service.model.artifacts import ModelArtifacts
from pageturner.service.model.backend import HeadShape
from pageturner.service.model.causal_model import CausalModel
from pageturner.service.model.decoder import load_decoder
from pageturner.service.model.decoder_config import DecoderConfig, NotLean, parse_decoder_config
from pageturner.service.model.invariance import check_batch_invariance
from pageturner.service.model.loader import WeightFiles
from pageturner.service.model.options import ModelOptions


def build_model(
    artifacts: ModelArtifacts,
    options: ModelOptions,
    block_size: int,
    choose_ops: Callable[[HeadShape], PagedOps],
    device: torch.device | None = None,
) -> tuple[CausalModel, PagedOps]:
    """The forward that runs this model right on the device (by default the CPU), and its operations.

    choose_ops: operations for a shape of heads. Raises ModelError, with the reason, for a model that neither
    forward runs, or that `options` bind to one that does not, or that is not deterministic here though
    it was asked to be.
    """
    config = None if options.forward == "transformers" else _lean_config(artifacts, options)
    if config is not None:
        return _build_lean(config, artifacts, options, block_size, choose_ops, device)
    # Importing transformers takes two seconds, which a lean start does not spend.
    from pageturner.service.model.transformers_model import load_transformers_model

    model = load_transformers_model(
        artifacts,
        choose_ops,
        max_position=options.max_position,
        deterministic=options.deterministic,
        device=device,
    )
    return model, model.ops


def _lean_config(artifacts: ModelArtifacts, options: ModelOptions) -> DecoderConfig | None:
    """The decoder's config, None to hand over to transformers."""
    try:
        return parse_decoder_config(artifacts.config)
    except NotLean as reason:
        if options.forward == "lean":
            raise ModelError(f"{artifacts.name} does not run on the lean decoder: {reason}") from reason
        return None


def _build_lean(
    config: DecoderConfig,
    artifacts: ModelArtifacts,
    options: ModelOptions,
    block_size: int,
    choose_ops: Callable[[HeadShape], PagedOps],
    device: torch.device | None,
) -> tuple[CausalModel, PagedOps]:
    ops = choose_ops(HeadShape(config.num_heads, config.num_kv_heads, config.head_dim))
    model = load_decoder(
        config,
        WeightFiles(artifacts.weight_files),
        ops,
        getattr(torch, artifacts.dtype),
        max_position=options.max_position,
        deterministic=options.deterministic,
        device=device,
    )
    if options.deterministic:
        check_batch_invariance(model, ops, block_size)
    return model, ops
