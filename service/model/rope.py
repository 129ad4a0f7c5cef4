"""Rotary position embedding: the frequencies a configuration asks for, and their table.

RoPE (Su et al., 2021, arXiv:2104.09864) turns dimension pair i of a head by position * frequency[i].
Scaled variants change the frequencies once, so one table serves every sequence of a batch: linear
interpolation (Chen et al., 2023, arXiv:2306.15595), YaRN (Peng et al., 2023, arXiv:2309.00071) and the
Llama 3.1 rule.

The frequencies of dynamic NTK and of longrope (Ding et al., 2024, arXiv:2402.13753) depend on how long a
sequence is, and `transformers` changes them under a sequence that grows, whose cached keys keep those that
they were turned by. A cache that sequences share can't have that: one table serves all. Up to the trained
length it is that of short sequences, which is what is offered unless `model.max_position` says more. Then it
is that of sequences of just that length, for shorter ones too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pageturner.service.errors import ConfigError, ModelError

KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
SERVED = "served_positions"
"""The longest sequence that is served, beside the parameters of a rope that depends on it."""


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions turn heads. frequencies: radians a position, one a pair of dimensions, head_dim / 2.

    scale: factor on cos and sin (YaRN's attention temperature). max_position: positions the
    frequencies are valid for.
    """

    frequencies: tuple[float, ...]
    scale: float
    max_position: int

    def table(
        self, num_positions: int, device: torch.device | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [num_positions, head_dim]; the two halves of a row are equal.

        Computed on the CPU for every device: one ulp of an angle is visible far along.
        """
        assert num_positions <= self.max_position
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = positions[:, None] * torch.tensor(self.frequencies, dtype=torch.float32)[None, :]
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.scale).to(device), (angles.sin() * self.scale).to(device)


def parse_rope(config: Mapping[str, Any], head_dim: int, max_position: int, default_theta: float) -> Rope:
    """The rope of a config.json, in its present form (rope_parameters) or its older one (rope_theta,
    rope_scaling). Raises ModelError for a variant that this decoder does not compute."""
    parameters = _parameters(config)
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ModelError("rope_parameters differ between kinds of layers")
    theta = float(_either(parameters, config, "rope_theta") or default_theta)
    partial = _either(parameters, config, "partial_rotary_factor")
    if partial is not None and partial != 1.0:
        raise ModelError(f"partial_rotary_factor {partial}: only whole heads are rotated")
    if parameters.get("mrope_section"):
        raise ModelError("multimodal rope (mrope_section) has more than one position a token")
    parameters["original_max_position_embeddings"] = (
        _either(config, parameters, "original_max_position_embeddings") or max_position
    )
    kind = rope_kind(parameters)
    powers = _powers(theta, head_dim)
    scale = 1.0
    match kind:
        case "default":
            frequencies = 1.0 / powers
        case "linear":
            frequencies = (1.0 / powers) / _number(parameters, "factor")
        case "dynamic":
            longest = int(parameters.get(SERVED) or max_position)
            stretch = _number(parameters, "factor") * (longest / max_position - 1) + 1
            theta *= max(1.0, stretch) ** (head_dim / (head_dim - 2))
            frequencies = 1.0 / _powers(theta, head_dim)
            return Rope(tuple(frequencies.tolist()), scale, max(longest, max_position))
        case "longrope":
            trained = int(parameters["original_max_position_embeddings"])
            longest = min(int(parameters.get(SERVED) or trained), max_position)
            frequencies, scale = _longrope(powers, parameters, max_position, is_long=longest > trained)
            return Rope(tuple(frequencies.tolist()), scale, longest)
        case "llama3":
            frequencies = _llama3(1.0 / powers, parameters)
        case "yarn":
            frequencies, scale = _yarn(powers, theta, parameters, max_position)
        case _:
            raise ModelError(f"rope_type {kind!r} is not computed by this decoder")
    return Rope(tuple(frequencies.tolist()), scale, longest_sequence(config, max_position))


def scaled_config(
    config: Mapping[str, Any], scaling: Mapping[str, Any], positions: int | None
) -> dict[str, Any]:
    """A config.json with the rope that options ask for in place of its own.

    scaling: as config.json has `rope_scaling`; empty for the model's own. positions: the longest sequence
    that is to be served; None for what the model offers. Raises ConfigError for a scaling that is not known.
    """
    changed = dict(config)
    if scaling:
        kind = rope_kind(scaling)
        if kind not in KINDS:
            raise ConfigError("model.rope_scaling", f"rope_type {kind!r} is none of {', '.join(KINDS)}")
        theta = _either(_parameters(config), config, "rope_theta")
        changed["rope_scaling"] = ({} if theta is None else {"rope_theta": theta}) | dict(scaling)
        own, trained = config.get("max_position_embeddings"), scaling.get("original_max_position_embeddings")
        if kind == "llama3" and trained and own:  # whose configurations state the stretched length
            changed["max_position_embeddings"] = max(own, int(_number(scaling, "factor") * trained))
    parameters = _parameters(changed)
    if positions is not None and rope_kind(parameters) in ("dynamic", "longrope"):
        changed["rope_scaling"] = parameters | {SERVED: positions}
    return changed


def longest_sequence(config: Mapping[str, Any], max_position: int) -> int:
    """Positions that a config.json offers: `max_position` (its max_position_embeddings), or with a rope that
    is stretched `factor` times the trained length.

    Model cards have one add YaRN and leave max_position_embeddings as it was trained. Dynamic NTK is not
    counted: beyond the trained length its frequencies depend on each sequence's own.
    """
    parameters = _parameters(config)
    if rope_kind(parameters) not in ("linear", "yarn") or parameters.get("factor") is None:
        return max_position
    trained = _either(config, parameters, "original_max_position_embeddings") or max_position
    return max(max_position, int(_number(parameters, "factor") * trained))


def _parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """As transformers reads it: the older key wins where both are there, and its dict is taken whole."""
    return dict(config.get("rope_scaling") or config.get("rope_parameters") or {})


def rope_kind(parameters: Mapping[str, Any]) -> Any:
    """The `rope_type`, or as it was called before, of parameters as config.json has them."""
    return parameters.get("rope_type") or parameters.get("type") or "default"


def _powers(theta: float, head_dim: int) -> torch.Tensor:
    """theta ** (2 i / head_dim) in float32, as the reference has it: one ulp is a visible angle at 8,192."""
    return theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim)


def _longrope(
    powers: torch.Tensor, parameters: Mapping[str, Any], max_position: int, *, is_long: bool
) -> tuple[torch.Tensor, float]:
    """Each frequency is divided by a factor of its own, of which there are two sets."""
    name = "long_factor" if is_long else "short_factor"
    factors = parameters.get(name)
    if not isinstance(factors, list) or len(factors) != len(powers):
        raise ModelError(f"rope_parameters.{name}: {len(powers)} factors are needed")
    trained = _number(parameters, "original_max_position_embeddings")
    stretch = parameters.get("factor")
    stretch = max_position / trained if stretch is None else _number(parameters, "factor")
    scale = parameters.get("attention_factor")
    if scale is None:
        scale = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(trained))
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers), float(scale)


def _llama3(frequencies: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, and those between blended."""
    factor = _number(parameters, "factor")
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    trained = float(parameters["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    blend = (trained / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    long, short = wavelengths > trained / low, wavelengths < trained / high
    return torch.where(long, frequencies / factor, torch.where(short, frequencies, blended))


def _yarn(
    powers: torch.Tensor, theta: float, parameters: Mapping[str, Any], max_position: int
) -> tuple[torch.Tensor, float]:
    """Frequencies that turn often in the trained length are kept, rare ones divided by `factor`."""
    trained = float(parameters["original_max_position_embeddings"])
    factor = float(parameters["factor"]) if parameters.get("factor") else max_position / trained
    head_dim = 2 * len(powers)

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_that_turns(float(parameters.get("beta_fast") or 32))
    high = pair_that_turns(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(len(powers), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    frequencies = (1.0 / (factor * powers)) * (1 - kept) + (1.0 / powers) * kept
    return frequencies, _yarn_scale(parameters, factor)


def _yarn_scale(parameters: Mapping[str, Any], factor: float) -> float:
    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given, mscale, mscale_all = (
        parameters.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim")
    )
    if given is not None:
        return float(given)
    if mscale and mscale_all:
        return temperature(float(mscale)) / temperature(float(mscale_all))
    return temperature(1.0)


def _either(first: Mapping[str, Any], second: Mapping[str, Any], key: str) -> Any:
    value = first.get(key)
    return second.get(key) if value is None else value


def _number(parameters: Mapping[str, Any], key: str) -> float:
    value = parameters.get(key)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise ModelError(f"rope_parameters.{key}: {value!r} is not a positive number")
    return float(value)
