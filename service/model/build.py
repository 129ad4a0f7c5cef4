"""ModelArtifacts -> a model that runs, by the lean decoder or by `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pageturner.kernels.cpu.ops import CpuOps
from pageturner.kernels.interface import PagedOps
from pageturner.kernels.layout import is_coded
from pageturner.kernels.selection import QuantisedKernels
from pageturner.service.errors import ConfigError, ModelError
from pageturner.service.model.artifacts import ModelArtifacts
from pageturner.service.model.backend import HeadShape
from pageturner.service.model.causal_model import CausalModel
from pageturner.service.model.decoder import Decoder
from pageturner.service.model.decoder_config import DecoderConfig, NotLean, parse_decoder_config
from pageturner.service.model.dense_products import load_dense_products
from pageturner.service.model.invariance import batch_variance
from pageturner.service.model.kv_dtypes import POOL_DTYPES, is_coded_name
from pageturner.service.model.loader import WeightFiles
from pageturner.service.model.options import ModelOptions
from pageturner.service.model.packed_file import PackedFile
from pageturner.service.model.quantised_decoder import QuantisedDecoder
from pageturner.service.model.quantised_products import load_quantised_products
from pageturner.service.model.tensor_parallel.collectives import ALONE, Collectives
from pageturner.service.model.tensor_parallel.cuts import gathered_cuts, summed_cuts
from pageturner.service.model.tensor_parallel.decoder import ParallelDecoder
from pageturner.service.model.tensor_parallel.parallel_layers import GatheredLayer, SummedLayer
from pageturner.service.model.tensor_parallel.sharded_weights import ShardedPackedFile, ShardedWeights
from pageturner.service.model.tensor_parallel.shards import Shard, plan_shards


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model and the operations that it was built with.

    deterministic: whether a row's bits are promised to depend on its own tokens alone. note: what an operator
    should know of that, if anything.
    """

    model: CausalModel
    ops: PagedOps
    deterministic: bool
    note: str | None = None


def build_model(
    artifacts: ModelArtifacts,
    options: ModelOptions,
    block_size: int,
    choose_ops: Callable[[HeadShape], PagedOps],
    device: torch.device | None = None,
    quantised: QuantisedKernels | None = None,
    collectives: Collectives = ALONE,
) -> BuiltModel:
    """The forward that runs this model right on the device (by default the CPU), and its operations.

    choose_ops: operations for a shape of heads. quantised: what computes with packed weights. collectives:
    with other ranks, which build the same at the same time; the model is then this rank's shard. Raises
    ModelError, with the reason, for a model that neither forward runs, or that `options` bind to one that
    does not, or that is not deterministic here though it was asked to be, and ConfigError for a KV dtype
    that its forward doesn't have, or ranks that it can't be cut for.
    """
    built = _build(artifacts, options, block_size, choose_ops, device, quantised, collectives)
    wanted, longest = options.max_position, built.model.max_position
    if wanted is not None and wanted > longest:
        reason = (
            f"{wanted} is more than the {longest} positions of the model; model.rope_scaling stretches them"
        )
        raise ConfigError("model.max_position", reason)
    return built


def _build(
    artifacts: ModelArtifacts,
    options: ModelOptions,
    block_size: int,
    choose_ops: Callable[[HeadShape], PagedOps],
    device: torch.device | None,
    quantised: QuantisedKernels | None,
    collectives: Collectives,
) -> BuiltModel:
    if artifacts.packed is not None:
        return _build_quantised(artifacts, options, block_size, choose_ops, quantised, collectives)
    config = None if options.forward == "transformers" else lean_config(artifacts, options)
    if config is not None:
        return _build_lean(config, artifacts, options, block_size, choose_ops, device, collectives)
    if options.kv_dtype not in ("auto", artifacts.dtype) and not is_coded_name(options.kv_dtype):
        reason = f"transformers' forward keeps KV in {artifacts.dtype}, that of its activations, or in codes"
        raise ConfigError("model.kv_dtype", f"{reason}, not in {options.kv_dtype}")
    # Importing transformers takes two seconds, which a lean start does not spend.
    from pageturner.service.model.transformers_model import load_transformers_model

    deterministic = bool(options.deterministic)
    model = load_transformers_model(
        artifacts,
        choose_ops,
        max_position=options.max_position,
        deterministic=deterministic,
        device=device,
        kv_dtype=None if options.kv_dtype == "auto" else POOL_DTYPES[options.kv_dtype],
        collectives=collectives,
        rope_scaling=options.rope_scaling,
    )
    return BuiltModel(model, model.ops, deterministic)


def lean_config(artifacts: ModelArtifacts, options: ModelOptions) -> DecoderConfig | None:
    """The decoder's config, None to hand over to transformers. Raises ModelError if options forbid that."""
    try:
        return parse_decoder_config(artifacts.config)
    except NotLean as reason:
        if options.forward == "lean" or options.quantised:
            raise ModelError(f"{artifacts.name} does not run on the lean decoder: {reason}") from reason
        return None


def _build_lean(
    config: DecoderConfig,
    artifacts: ModelArtifacts,
    options: ModelOptions,
    block_size: int,
    choose_ops: Callable[[HeadShape], PagedOps],
    device: torch.device | None,
    collectives: Collectives,
) -> BuiltModel:
    deterministic = bool(options.deterministic)
    shards = plan_shards(config, collectives.size)
    shard = shards[collectives.rank]
    ops = choose_ops(_heads_of(shard, config))
    dtype: torch.dtype = getattr(torch, artifacts.dtype)
    files = WeightFiles(artifacts.weight_files)
    products = load_dense_products(
        shard.config(config),
        files if shard.is_whole else ShardedWeights(files, config, shard),
        ops,
        dtype,
        kv_dtype=pool_dtype(options, ops, quantised=False, rows=dtype),
        deterministic=deterministic,
        device=device,
    )
    if shard.is_whole:
        model = Decoder(config, products, ops, options.max_position)
    else:
        layers = [SummedLayer(layer.products, collectives) for layer in products.layers]
        model = ParallelDecoder(
            config, shards, products, layers, summed_cuts, collectives, ops, options.max_position
        )
    if deterministic and (reason := batch_variance(model, ops, block_size)):
        raise ModelError(f"deterministic: {reason}")
    return BuiltModel(model, ops, deterministic)


def _build_quantised(
    artifacts: ModelArtifacts,
    options: ModelOptions,
    block_size: int,
    choose_ops: Callable[[HeadShape], PagedOps],
    quantised: QuantisedKernels | None,
    collectives: Collectives,
) -> BuiltModel:
    if quantised is None:
        raise ModelError(f"{artifacts.name}: products of quantised weights can't be computed here")
    config = lean_config(artifacts, options)
    assert config is not None, "quantised models are bound to the lean decoder"
    assert artifacts.packed is not None
    shards = plan_shards(config, collectives.size)
    shard = shards[collectives.rank]
    ops = choose_ops(_heads_of(shard, config))
    kv_dtype, scheme = pool_dtype(options, ops, quantised=True, rows=torch.float32), options.quantization
    model: Decoder
    if shard.is_whole:
        products = load_quantised_products(
            scheme, config, PackedFile(artifacts.packed), quantised.ops, kv_dtype
        )
        # The operations of another backend want another order of keys than the whole forward.
        whole = quantised.decoder if isinstance(ops, CpuOps) else None
        model = QuantisedDecoder(config, products, ops, options.max_position, whole)
    else:
        file = ShardedPackedFile(PackedFile(artifacts.packed, mapped=True), config, shard)
        products = load_quantised_products(
            scheme, shard.config(config), file, quantised.ops, kv_dtype, file.shapes
        )
        layers = [
            GatheredLayer(layer.products, shards, config.head_dim, collectives, ops)
            for layer in products.layers
        ]
        model = ParallelDecoder(
            config, shards, products, layers, gathered_cuts, collectives, ops, options.max_position
        )
    if options.deterministic is False or not (options.deterministic or ops.row_invariant):
        return BuiltModel(model, ops, deterministic=False)
    if (reason := batch_variance(model, ops, block_size)) is None:
        return BuiltModel(model, ops, deterministic=True)
    if options.deterministic:
        raise ModelError(f"deterministic: {reason}")
    return BuiltModel(model, ops, deterministic=False, note=reason)


def _heads_of(shard: Shard, config: DecoderConfig) -> HeadShape:
    return HeadShape(len(shard.heads), len(shard.kv_heads), config.head_dim)


def pool_dtype(options: ModelOptions, ops: PagedOps, *, quantised: bool, rows: torch.dtype) -> torch.dtype:
    """Of the KV pool: as options want it, else that of the rows, or bfloat16 beside quantised weights.

    What a step then reads is mostly the pool. Raises ConfigError where the operations don't read such a pool.
    """
    if options.kv_dtype == "auto":
        return torch.bfloat16 if quantised and ops.narrow_pool else rows
    dtype = POOL_DTYPES[options.kv_dtype]
    if ops.coded_pool if is_coded(dtype) else dtype is rows or (rows is torch.float32 and ops.narrow_pool):
        return dtype
    raise ConfigError("model.kv_dtype", f"{rows} rows can't be kept in {dtype} by the {ops.name} operations")
