"""adapter_config.json of a PEFT adapter, understood in full or refused by name.

Of an adapter that PEFT would compute otherwise than y = W x + factor * B A x (DoRA, biases, weights saved
whole, base weights that were changed too) nothing is served.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pageturner.service.errors import AdapterError

MODULES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""What of a layer an adapter may change."""

ALL_LINEAR = "all-linear"

_IGNORED = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "exclude_modules",
        "task_type",
        "use_rslora",
    }
)
"""Settings that are read below, or change nothing once an adapter is trained. Any other must be off."""

_UNSERVED: Mapping[str, str] = {
    "use_dora": "DoRA scales the columns of weights",
    "modules_to_save": "weights saved whole take the place of the model's",
    "trainable_token_indices": "embeddings of tokens of its own",
    "lora_bias": "biases of its own",
    "fan_in_fan_out": "weights the other way round",
    "layer_replication": "layers that are there twice",
    "target_parameters": "parameters that belong to no linear module",
    "megatron_config": "layers in parallel",
    "alora_invocation_tokens": "an adapter that begins in the middle of a prompt",
    "use_qalora": "inputs in groups",
    "arrow_config": "a router of adapters",
}
"""What an adapter may ask for, and why it is not served."""

_CHANGES_BASE = frozenset({"pissa", "olora", "corda", "loftq", "lora_ga"})
"""Ways to begin a training that leave the base with other weights than it came with."""

_MAX_PATTERN_CHARACTERS = 256
_QUANTIFIER = re.compile(r"(?<!\\)[*+?{]")
_MAX_QUANTIFIERS = 3
"""Of a pattern: with more, or with one behind a group, matching may take minutes, in which nothing else
runs."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """How the factors of an adapter are to be read.

    alpha, alpha_pattern: the numerator of the factor, by module where they differ. targets: names of modules,
    None where a pattern says which; then the file alone tells. layers: those that have them, None for all.
    """

    alpha: float
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    targets: frozenset[str] | None
    excluded: frozenset[str]
    layers: frozenset[int] | None

    def factor(self, module: str, rank: int) -> float:
        """On B A of a module, such as `model.layers.0.self_attn.q_proj` (rsLoRA: Kalajdzievski 2023)."""
        alpha = next(
            (
                alpha
                for pattern, alpha in self.alpha_pattern.items()
                if re.match(rf"(.*\.)?({pattern})$", module)
            ),
            self.alpha,
        )
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def expected(self, num_layers: int) -> frozenset[str] | None:
        """The modules that its file must have; None where a pattern says which."""
        if self.targets is None:
            return None
        layers = range(num_layers) if self.layers is None else sorted(self.layers)
        names = [f"model.layers.{layer}.{part}" for layer in layers for part in MODULES]
        return frozenset(
            name for name in names if _is_named(name, self.targets) and not _is_named(name, self.excluded)
        )

    def described(self) -> str:
        """What of it changes a result beside the factors, as one text."""
        pattern = sorted(self.alpha_pattern.items())
        return f"alpha={self.alpha!r} pattern={pattern!r} rslora={self.use_rslora}"


def parse_adapter_config(config: Mapping[str, Any], num_layers: int) -> AdapterConfig:
    """Raises AdapterError naming the setting that is wrong, or asks for what is not served."""
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"peft_type: {config.get('peft_type')!r} is not LORA")
    for name, value in config.items():
        if name not in _IGNORED and value not in (None, False, "", [], {}):
            reason = _UNSERVED.get(name, "a setting that is not known here")
            raise AdapterError(f"{name}: {_shown(value)}: {reason}, which is not served")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"bias: {_shown(config['bias'])}: biases of its own are not served")
    begun = config.get("init_lora_weights", True)
    if isinstance(begun, str) and begun.lower().startswith(tuple(_CHANGES_BASE)):
        reason = (
            "the base was given other weights; save the adapter with path_initial_model_for_weight_conversion"
        )
        raise AdapterError(f"init_lora_weights: {begun!r}: {reason}")
    targets = config.get("target_modules")
    is_pattern = isinstance(targets, str) and targets != ALL_LINEAR
    if targets == ALL_LINEAR:
        targets = MODULES
    return AdapterConfig(
        alpha=_number("lora_alpha", config.get("lora_alpha", 8)),
        alpha_pattern=_patterns("alpha_pattern", config.get("alpha_pattern")),
        use_rslora=_flag("use_rslora", config.get("use_rslora")),
        targets=None if is_pattern else _names("target_modules", targets, num_layers),
        excluded=frozenset() if is_pattern else _excluded(config.get("exclude_modules")),
        layers=_layers(config.get("layers_to_transform"), num_layers),
    )


def _is_named(module: str, names: frozenset[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _names(key: str, value: object, num_layers: int) -> frozenset[str]:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(name, str) for name in value):
        raise AdapterError(f"{key}: {_shown(value)} is not a list of modules")
    known = [f"model.layers.{layer}.{part}" for layer in range(num_layers) for part in MODULES]
    for name in value:
        if not any(_is_named(module, frozenset({name})) for module in known):
            served = ", ".join(part.rpartition(".")[2] for part in MODULES)
            raise AdapterError(
                f"{key}: {_shown(name)} is none of the modules that adapters are served for: {served}"
            )
    return frozenset(value)


def _excluded(value: object) -> frozenset[str]:
    if isinstance(value, str) and value:
        raise AdapterError(f"exclude_modules: {_shown(value)}: patterns of modules are not served; list them")
    if value in (None, "", [], ()):
        return frozenset()
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise AdapterError(f"exclude_modules: {_shown(value)} is not a list of modules")
    return frozenset(value)


def _layers(value: object, num_layers: int) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    layers = value if isinstance(value, list) else [value]
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < num_layers:
            raise AdapterError(f"layers_to_transform: {_shown(layer)} is none of {num_layers} layers")
    return frozenset(layers)


def _patterns(key: str, value: object) -> Mapping[str, float]:
    if value in (None, {}):
        return {}
    if not isinstance(value, dict):
        raise AdapterError(f"{key}: {_shown(value)} is not a table")
    found = {}
    for pattern, number in value.items():
        is_tame = len(pattern) <= _MAX_PATTERN_CHARACTERS and not re.search(r"\)[*+?{]", pattern)
        if not is_tame or len(_QUANTIFIER.findall(pattern)) > _MAX_QUANTIFIERS:
            raise AdapterError(f"{key}: {_shown(pattern)} is too involved a pattern")
        try:
            re.compile(pattern)
        except re.error as error:
            raise AdapterError(f"{key}: {_shown(pattern)} is no pattern: {error}") from error
        found[pattern] = _number(f"{key}[{pattern}]", number)
    return found


def _number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise AdapterError(f"{key}: {_shown(value)} is not a number")
    return float(value)


def _flag(key: str, value: object) -> bool:
    if value not in (None, True, False):
        raise AdapterError(f"{key}: {_shown(value)} is not true or false")
    return bool(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
