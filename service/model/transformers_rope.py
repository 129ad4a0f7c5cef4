"""A scaling of RoPE that options ask for, given to a model of `transformers`, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from pageturner.service.errors import ConfigError
from pageturner.service.model.rope import rope_kind, scaled_config

NO_SCALING: Mapping[str, Any] = MappingProxyType({})

BATCHED_KINDS = ("linear", "yarn", "llama3")
"""Scalings whose frequencies are the same for every sequence. Those of the others transformers takes by the
largest position of the whole step."""


def stretch(config: PreTrainedConfig, scaling: Mapping[str, Any]) -> None:
    """Put a scaling in the place of the model's own, as its config.json would have it.

    Raises ConfigError for one whose frequencies depend on the longest sequence of a batch as transformers
    computes it, and for a model whose layers differ in their RoPE, or that has none.
    """
    kind, text = rope_kind(scaling), config.get_text_config()
    if kind not in BATCHED_KINDS:
        known = ", ".join(BATCHED_KINDS)
        reason = f"{kind!r} is not what transformers computes for sequences of several lengths; {known} are"
        raise ConfigError("model.rope_scaling", f"this model runs through transformers, and {reason}")
    own = getattr(text, "rope_parameters", None)
    if not isinstance(own, dict) or any(isinstance(value, dict) for value in own.values()):
        reason = f"the RoPE of {config.model_type} in transformers is none that one scaling stretches"
        raise ConfigError("model.rope_scaling", reason)
    as_stated = {"rope_parameters": own, "max_position_embeddings": _own_longest(text)}
    wanted = {key: value for key, value in scaling.items() if key != "type"} | {"rope_type": kind}
    scaled = scaled_config(as_stated, wanted, None)
    kept = {key: own[key] for key in ("rope_theta", "partial_rotary_factor") if key in own}
    trained = {} if kind == "linear" else {"original_max_position_embeddings": _own_longest(text)}
    text.rope_parameters = kept | trained | scaled["rope_scaling"]
    text.max_position_embeddings = scaled["max_position_embeddings"]


def _own_longest(text: PreTrainedConfig) -> int | None:
    return getattr(text, "max_position_embeddings", None)


def check_stretched(model: PreTrainedModel, scaling: Mapping[str, Any]) -> None:
    """A model may have the key and not read it: raise ConfigError unless some module was made by it."""
    kind = rope_kind(scaling)
    if not any(getattr(module, "rope_type", None) == kind for module in model.modules()):
        reason = f"{model.config.model_type} does not take it in transformers"
        raise ConfigError("model.rope_scaling", reason)
