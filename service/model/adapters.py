"""PEFT adapters: a folder becomes the low-rank parts of a model's products, or is refused by name.

Nothing but safetensors is read, and no code that comes with an adapter is run. What a file holds is looked at
whole, so that an adapter which was loaded computes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from pageturner.kernels.low_rank import Factors, LayerLowRank, LowRank, LowRankOps, ProductSizes
from pageturner.service.errors import AdapterError
from pageturner.service.model.adapter_config import MODULES, AdapterConfig, parse_adapter_config
from pageturner.service.model.decoder_config import DecoderConfig
from pageturner.service.model.products import PROJECTIONS
from pageturner.service.model.quantise import GROUP

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLED_FILE = "adapter_model.bin"
_MAX_CONFIG_BYTES = 1 << 20

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NAME = re.compile(
    r"(?:base_model\.model\.)?(model\.layers\.(\d+)\.(\w+\.\w+))\.lora_([AB])(?:\.default)?\.weight"
)
_PLACES: Mapping[str, tuple[str, int]] = {
    "self_attn.q_proj": ("qkv", 0),
    "self_attn.k_proj": ("qkv", 1),
    "self_attn.v_proj": ("qkv", 2),
    "self_attn.o_proj": ("out", 0),
    "mlp.gate_proj": ("gate_up", 0),
    "mlp.up_proj": ("gate_up", 1),
    "mlp.down_proj": ("down", 0),
}
"""Each module's product, and which part of its outputs it is."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AdapterWeights:
    """One adapter on the model's device.

    digest: of all that its results hang on beside the model: equal content has one digest wherever it lies.
    rank: the largest of a module. modules: those that it changes, by their last name. num_bytes: as it lies
    in memory. Of a model on several ranks, layers and num_bytes are this rank's part; the rest is of all.
    """

    digest: str
    rank: int
    modules: tuple[str, ...]
    num_bytes: int
    layers: tuple[LayerLowRank, ...]


class FactorCut(Protocol):
    """What one of several ranks holds of a module's factors."""

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of B A."""
        ...

    def of_factors(self, factors: Factors) -> Factors:
        """The rank's part of whole ones."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterShapes:
    """What adapters must fit: a model, and the bounds of its server.

    config: of the whole model. max_bytes: of an adapter's file, and of what one rank holds of it. row_groups:
    of each layer's PROJECTIONS, inputs that share a scale where rows are quantised; empty where they are not.
    cuts: of every module, by the last part of its name; empty for a model that is whole on one rank.
    """

    config: DecoderConfig
    max_rank: int
    max_bytes: int
    row_groups: tuple[tuple[int, ...], ...] = ()
    cuts: Mapping[str, FactorCut] = field(default_factory=dict)

    def products(self, layer: int) -> Mapping[str, ProductSizes]:
        """Of one layer of the whole model, by name."""
        config = self.config
        hidden, inner, qkv = config.hidden_size, config.intermediate_size, tuple(config.qkv_sizes)
        sizes = ((qkv, hidden), ((hidden,), qkv[0]), ((inner, inner), hidden), ((hidden,), inner))
        groups = self.row_groups[layer] if self.row_groups else (GROUP,) * len(PROJECTIONS)
        return {
            name: ProductSizes(*size, group)
            for name, size, group in zip(PROJECTIONS, sizes, groups, strict=True)
        }

    def held(self, layer: int) -> Mapping[str, ProductSizes]:
        """Likewise, as this rank computes them."""
        products = self.products(layer)
        if not self.cuts:
            return products
        held = {}
        for name, whole in products.items():
            shapes = [self.cuts[_last_of(module)].shape for module in _parts_of(name)]
            held[name] = ProductSizes(tuple(outputs for outputs, _ in shapes), shapes[0][1], whole.group)
        return held

    def cut(self, module: str, factors: Factors | None) -> Factors | None:
        """What of a module's factors this rank computes with."""
        if factors is None or not self.cuts:
            return factors
        return self.cuts[_last_of(module)].of_factors(factors)


def read_adapter(
    folder: Path, shapes: AdapterShapes, ops: LowRankOps, device: torch.device | None = None
) -> AdapterWeights:
    """Read a folder of adapter_config.json and adapter_model.safetensors, onto the device (by default the
    CPU).

    Raises AdapterError naming the setting or tensor that is wrong, or is not served here.
    """
    settings = parse_adapter_config(_read_config(folder), shapes.config.num_layers)
    content = _read_weights(folder, shapes.max_bytes)
    try:
        tensors = load(content)
    except (SafetensorError, ValueError) as error:
        raise AdapterError(f"{WEIGHTS_FILE} cannot be read: {error}") from error
    modules = _factors(tensors, settings, shapes)
    expected = settings.expected(shapes.config.num_layers)
    if expected is not None and expected != modules.keys():
        lacking = sorted(expected - modules.keys())
        found = f"lacks {lacking[0]}" if lacking else f"has {sorted(modules.keys() - expected)[0]}"
        raise AdapterError(f"target_modules: {WEIGHTS_FILE} {found}, which does not agree with {CONFIG_FILE}")
    if not modules:
        raise AdapterError(f"{WEIGHTS_FILE} changes no module")
    layers = tuple(_layer(index, modules, shapes, ops, device) for index in range(shapes.config.num_layers))
    num_bytes = sum(part.num_bytes for layer in layers for part in layer.products() if part is not None)
    if num_bytes > shapes.max_bytes:
        raise AdapterError(f"takes {num_bytes} bytes; all adapters may take {shapes.max_bytes}")
    names = set(map(_last_of, modules))
    return AdapterWeights(
        sha256(content + settings.described().encode()).hexdigest()[:32],
        max(factors.a.shape[0] for factors in modules.values()),
        tuple(name for part in MODULES if (name := _last_of(part)) in names),
        num_bytes,
        layers,
    )


def _read_config(folder: Path) -> Mapping[str, object]:
    try:
        document = json.loads(_read(folder / CONFIG_FILE, _MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG_FILE} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise AdapterError(f"{CONFIG_FILE} is not a table")
    return document


def _read_weights(folder: Path, max_bytes: int) -> bytes:
    if not (folder / WEIGHTS_FILE).exists() and (folder / _PICKLED_FILE).exists():
        raise AdapterError(
            f"{_PICKLED_FILE} may hold code, and is not read; save the adapter as {WEIGHTS_FILE}"
        )
    # All at once: a file that is cut or changed while it is mapped would end the process, or change an
    # answer.
    return _read(folder / WEIGHTS_FILE, max_bytes)


def _read(path: Path, max_bytes: int) -> bytes:
    """Raises AdapterError also for what is no plain file: a pipe would never end."""
    try:
        if not path.is_file():
            raise AdapterError(f"there is no file {path.name}")
        if (size := path.stat().st_size) > max_bytes:
            raise AdapterError(f"{path.name} has {size} bytes, more than {max_bytes}")
        return path.read_bytes()
    except OSError as error:
        raise AdapterError(f"{path.name} cannot be read: {error.strerror}") from error


def _factors(
    tensors: Mapping[str, torch.Tensor], settings: AdapterConfig, shapes: AdapterShapes
) -> dict[str, Factors]:
    """By module, with the factor on B."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or match[3] not in _PLACES or int(match[2]) >= shapes.config.num_layers:
            raise AdapterError(f"{name} has no place in this model, or is not served")
        if tensor.dtype not in _DTYPES or tensor.dim() != 2:
            raise AdapterError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not a matrix of floats")
        if not bool(tensor.isfinite().all()):
            raise AdapterError(f"{name} holds an infinity or NaN")
        if found.setdefault(match[1], {}).setdefault(match[4], tensor) is not tensor:
            raise AdapterError(f"{name} is there twice")
    return {module: _checked(module, pair, settings, shapes) for module, pair in found.items()}


def _checked(
    module: str, pair: Mapping[str, torch.Tensor], settings: AdapterConfig, shapes: AdapterShapes
) -> Factors:
    for letter in "AB":
        if letter not in pair:
            raise AdapterError(f"{module} lacks its lora_{letter}")
    _, _, layer, place = module.split(".", 3)
    product, part = _PLACES[place]
    sizes, in_features, _ = shapes.products(int(layer))[product]
    rank = pair["A"].shape[0]
    if not 0 < rank <= shapes.max_rank:
        raise AdapterError(
            f"{module} is of rank {rank}; 1 to {shapes.max_rank} are served (adapters.max_rank)"
        )
    for letter, wanted in (("A", (rank, in_features)), ("B", (sizes[part], rank))):
        if pair[letter].shape != wanted:
            shape = list(pair[letter].shape)
            raise AdapterError(f"{module}.lora_{letter} is {shape}; this model wants {list(wanted)}")
    return Factors(pair["A"].float(), pair["B"].float() * settings.factor(module, rank))


def _layer(
    index: int,
    modules: Mapping[str, Factors],
    shapes: AdapterShapes,
    ops: LowRankOps,
    device: torch.device | None,
) -> LayerLowRank:
    products: dict[str, LowRank | None] = {}
    for name, sizes in shapes.held(index).items():
        parts = [shapes.cut(place, modules.get(f"model.layers.{index}.{place}")) for place in _parts_of(name)]
        moved = [part and Factors(part.a.to(device), part.b.to(device)) for part in parts]
        products[name] = ops.prepare(moved, sizes)
    return LayerLowRank(**products)


def _parts_of(product: str) -> Iterator[str]:
    """The modules of a product, in the order of its outputs."""
    return (module for module, place in _PLACES.items() if place[0] == product)


def _last_of(module: str) -> str:
    return module.rpartition(".")[2]
