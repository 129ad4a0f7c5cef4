"""Settles what a model's products are computed with: as configured, as chosen before, or measured now."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import cast

import torch
from structlog.typing import FilteringBoundLogger

from pageturner import __version__
from pageturner.kernels.interface import QuantisedOps
from pageturner.service.errors import ConfigError, ModelError
from pageturner.service.model.accuracy import measure_accuracy
from pageturner.service.model.artifacts import ModelArtifacts
from pageturner.service.model.backend import Backend
from pageturner.service.model.build import pool_dtype
from pageturner.service.model.candidate_forwards import CandidateForwards
from pageturner.service.model.choice_cache import ChoiceCache
from pageturner.service.model.conversion_cache import content_key
from pageturner.service.model.cpu_features import cpu_identity, fit_dtype, has_bfloat16
from pageturner.service.model.decoder_config import DecoderConfig, NotLean, parse_decoder_config
from pageturner.service.model.dense_products import load_dense_products
from pageturner.service.model.kv_dtypes import is_coded_name
from pageturner.service.model.loader import is_gguf, load_artifacts
from pageturner.service.model.options import ModelOptions, Quantization
from pageturner.service.model.packing import NotPackable
from pageturner.service.model.product_choice import (
    BFLOAT16,
    FLOAT32,
    ProductChoice,
    candidates_of,
    choose_fastest,
    obey,
)
from pageturner.service.model.product_timing import SyntheticWeights, TimedProducts, time_products
from pageturner.service.model.products import Products
from pageturner.service.model.quantised_products import QuantisedProducts

_JUDGED_TOKENS = 256
"""Of the packaged text: for a mean KL within some tens of percent, in half a second for a small model."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What of this machine a choice depends on. memory: bytes. measure: seconds of a step's products."""

    cpuinfo: str
    memory: int
    measure: Callable[[Mapping[str, Products], DecoderConfig], TimedProducts] = partial(
        time_products, timer=time.perf_counter
    )


@dataclass(frozen=True, slots=True)
class SettledProducts:
    """options: with dtype and quantization named. choice: how that was come by. artifacts: of the model in
    that form, None if they weren't read on the way."""

    options: ModelOptions
    choice: ProductChoice
    artifacts: ModelArtifacts | None = None


def settle_products(
    options: ModelOptions,
    block_size: int,
    backend: Backend,
    cache_dir: Path,
    machine: Machine,
    logger: FilteringBoundLogger,
) -> SettledProducts:
    """What the model computes its products with. block_size: of the KV cache, in tokens.

    Nothing is measured on a GPU, nor for a model that can't be quantised: those run in the dtype that
    `fit_dtype` gives. Raises ConfigError or ModelError for quantised weights that were asked for in vain.
    """
    found = _measurable(options, backend, cache_dir)
    if isinstance(found, str):
        if options.quantised:
            raise ConfigError("model.quantization", f"{options.quantization} can't be had: {found}")
        fitted, note = fit_dtype(options, backend.device, machine.cpuinfo)
        logger.info("not_quantised", reason=found)
        if note is not None:
            logger.warning("dtype", reason=note)
        return SettledProducts(replace(fitted, quantization="none"), ProductChoice(fitted.dtype, found))
    # Codes are as far from each kind of products: those are compared over a cache that isn't of codes.
    judged = replace(options, kv_dtype="auto") if is_coded_name(options.kv_dtype) else options
    choice = _remembered(found, judged, block_size, backend, cache_dir, machine, logger)
    figures = [measured.figures() for measured in choice.measured]
    logger.info("products", chosen=choice.name, reason=choice.reason, figures=figures)
    if choice.warning is not None:
        logger.warning("products", reason=choice.warning)
    artifacts = found.artifacts if choice.name == found.scheme else None
    return SettledProducts(_named(options, choice.name), choice, artifacts)


@dataclass(frozen=True, slots=True)
class _Measurable:
    """A model whose products can be measured here.

    artifacts: with its weights packed by `scheme`, plain where that is None.
    """

    artifacts: ModelArtifacts
    config: DecoderConfig
    scheme: str | None
    quantised_ops: QuantisedOps


def _measurable(options: ModelOptions, backend: Backend, cache_dir: Path) -> _Measurable | str:
    """What can be measured, or why nothing can."""
    if backend.device.type != "cpu":
        return f"the model runs on {backend.device}"
    if options.forward == "transformers":
        return "model.forward is transformers"
    if backend.quantised is None:
        return "products of quantised weights can't be compiled here"
    is_file = is_gguf(options.source)
    scheme: Quantization = "file" if is_file else "int8"
    if options.quantised:
        scheme = options.quantization
    # A folder isn't quantised just to tell how much slower is what was asked for.
    if not is_file and _dense_name(options) is not None:
        scheme = "none"
    try:
        artifacts = load_artifacts(replace(options, dtype="auto", quantization=scheme), cache_dir)
        config = parse_decoder_config(artifacts.config)
    except (NotLean, NotPackable) as reason:
        return str(reason)
    except ModelError as reason:
        # A folder can be served as it is; a file that can't be converted can't be served at all.
        if is_file or options.quantised:
            raise
        return str(reason)
    if _name(options) is None:
        if artifacts.tokenizer is None:
            return "the model has no tokenizer, so that its accuracy on a text can't be measured"
        forwards = CandidateForwards(
            artifacts, config, options, cache_dir, backend.choose_ops, backend.quantised.ops
        )
        if min(len(forwards.text_tokens(2)), config.max_position) < 2:
            return "the model takes no two tokens of a text, so that its accuracy can't be measured"
    return _Measurable(artifacts, config, None if scheme == "none" else scheme, backend.quantised.ops)


def _dense_name(options: ModelOptions) -> str | None:
    """The dtype that the configuration names for plain weights, None if it names none."""
    return None if options.quantised or options.dtype == "auto" else options.dtype


def _name(options: ModelOptions) -> str | None:
    """The products that the configuration names, None if it leaves them open."""
    return options.quantization if options.quantised else _dense_name(options)


def _named(options: ModelOptions, name: str) -> ModelOptions:
    """The options that lead to the products of that name."""
    if name == FLOAT32:
        return replace(options, dtype="float32", quantization="none")
    if name == BFLOAT16:
        return replace(options, dtype="bfloat16", quantization="none")
    assert name in ("file", "int8", "int4")
    return replace(options, dtype="auto", quantization=cast(Quantization, name))


def _remembered(
    found: _Measurable,
    options: ModelOptions,
    block_size: int,
    backend: Backend,
    cache_dir: Path,
    machine: Machine,
    logger: FilteringBoundLogger,
) -> ProductChoice:
    """The choice that was made before, else the one made now."""
    name = _name(options)
    names = (FLOAT32, BFLOAT16, found.scheme or FLOAT32) if name is None else (name,)
    depends_on = (
        _content_of(found.artifacts),
        cpu_identity(machine.cpuinfo),
        str(machine.memory >> 30),
        str(name),
        options.quantization,
        options.kv_dtype,
        str(block_size),
        str(options.deterministic),
        found.quantised_ops.name,
        str(torch.get_num_threads()),
        torch.__version__,
        __version__,
    )
    cache = ChoiceCache(cache_dir, found.artifacts.name, depends_on)
    choice = cache.read(names)
    if choice is None:
        measurement = _Measurement(found, options, backend, cache_dir, machine)
        logger.info("measuring_products", candidates=measurement.candidates)
        choice, steady = measurement.choose()
        if steady or choice.is_clear:
            cache.write(choice)
        else:
            reason = "other programs ran while products were timed; the next start measures them again"
            logger.warning("products", reason=reason)
    return choice


def _content_of(artifacts: ModelArtifacts) -> str:
    """Changes with the model's weights and configuration."""
    if artifacts.packed is not None:
        return artifacts.packed.name  # a conversion is named for the content of its source
    return content_key((artifacts.folder / "config.json", *artifacts.weight_files), "products")


class _Measurement:
    """Times the candidates for a model, and compares their logits with float32's."""

    def __init__(
        self,
        found: _Measurable,
        options: ModelOptions,
        backend: Backend,
        cache_dir: Path,
        machine: Machine,
    ) -> None:
        self._found, self._options, self._machine = found, options, machine
        self._forwards = CandidateForwards(
            found.artifacts, found.config, options, cache_dir, backend.choose_ops, found.quantised_ops
        )
        name = _name(options)
        wants_quantised = options.quantization != "none" or name is not None
        names = candidates_of(
            quantised=found.scheme if wants_quantised else None, has_bfloat16=has_bfloat16(machine.cpuinfo)
        )
        if name is not None:
            names = tuple(dict.fromkeys((*names, name)))
        self._pooled = [each for each in names if each == name or self._has_pool(each)]
        if not self._pooled:
            self._check_pool(names[0])
        self.candidates = tuple(each for each in self._pooled if each == name or self._fits(each))

    def choose(self) -> tuple[ProductChoice, bool]:
        """(what measuring decides, whether its times can be relied on). Raises ModelError for weights that
        can't be read."""
        found = self._found
        products = self._loaded()
        timed = self._machine.measure(products, found.config)
        del products
        name = _name(self._options)
        if name is not None:
            return obey(name, timed.seconds), timed.steady
        return choose_fastest(timed.seconds, self._mean_kl), timed.steady

    def _fits(self, name: str) -> bool:
        """Whether the machine's memory holds the whole model on such products."""
        found = self._found
        if found.scheme is None or name == found.scheme:
            return True
        dtype: torch.dtype = getattr(torch, name)
        return self._quantised.num_parameters * dtype.itemsize < self._machine.memory

    def _has_pool(self, name: str) -> bool:
        """Whether the KV pool that the configuration wants can hold what such products give."""
        try:
            self._check_pool(name)
        except ConfigError:
            return False
        return True

    def _check_pool(self, name: str) -> None:
        """Raises ConfigError."""
        quantised = name == self._found.scheme
        rows: torch.dtype = torch.float32 if quantised else getattr(torch, name)
        pool_dtype(self._options, self._forwards.ops(rows), quantised=quantised, rows=rows)

    def _loaded(self) -> dict[str, Products]:
        """The candidates, save those that this machine doesn't multiply deterministically where it's to."""
        found: dict[str, Products] = {}
        refusals: list[ModelError] = []
        for name in self.candidates:
            try:
                found[name] = self._one_layer(name)
            except ModelError as reason:
                if name in (self._found.scheme, _name(self._options)):
                    raise
                refusals.append(reason)
        if not found:
            raise refusals[0]
        return found

    def _one_layer(self, name: str) -> Products:
        """Products as fast as the model's: its own where they are packed, else of one layer of its sizes."""
        found = self._found
        if name == found.scheme:
            return self._quantised
        config = replace(
            found.config,
            num_layers=1,
            sliding_windows=found.config.sliding_windows[:1],
            rotated=found.config.rotated[:1],
        )
        dtype: torch.dtype = getattr(torch, name)
        return load_dense_products(
            config,
            SyntheticWeights(),
            self._forwards.ops(dtype),
            dtype,
            deterministic=bool(self._options.deterministic),
        )

    @cached_property
    def _quantised(self) -> QuantisedProducts:
        scheme = self._found.scheme
        assert scheme is not None
        if scheme in self._pooled:
            return self._forwards.products(scheme)
        # No candidate: its weights are only counted.
        return replace(self._forwards, options=replace(self._options, kv_dtype="auto")).products(scheme)

    @cached_property
    def _window(self) -> Sequence[int]:
        return self._forwards.text_tokens(min(_JUDGED_TOKENS, self._found.config.max_position))

    @cached_property
    def _expected(self) -> torch.Tensor:
        return self._forwards.logits(FLOAT32)(self._window)

    def _mean_kl(self, name: str) -> float:
        is_loaded = name == self._found.scheme
        logits = (
            self._forwards.quantised_logits(self._quantised) if is_loaded else self._forwards.logits(name)
        )
        return measure_accuracy(lambda _: self._expected, {name: logits}, [self._window])[name].mean_kl
