"""A lean decoder's forward with quantised weights as one call into forward.cpp: checks here."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from weakref import finalize

import torch

from pageturner.kernels import address_checks, checks
from pageturner.kernels.cpu.entry import entry
from pageturner.kernels.cpu.ops import MAX_HEAD_DIM
from pageturner.kernels.cpu.packed_low_rank import CpuAdapter
from pageturner.kernels.cpu.quantised_ops import (
    KnownTokensStruct,
    PackedWeightStruct,
    known_tokens_struct,
    packed_weight_struct,
)
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.known_tokens import KnownTokens, TokenScores
from pageturner.kernels.layout import CODE_DTYPES, KEY_TILE, AttentionBatch, KeyOrder, token_elements
from pageturner.kernels.low_rank import AdapterRows, LayerLowRank, LayerSizes, ProductSizes
from pageturner.kernels.packed import PackedWeight

PHASES = (
    "host",
    "embed",
    "norm",
    "qkv",
    "rope",
    "attention",
    "quantise",
    "out",
    "gate_up",
    "down",
    "head",
)
"""forward.h's Phase."""

NOTHING_KNOWN = KnownTokens(torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
"""Of no row."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer. Norms are float32 [hidden_size], those of q and k [head_dim]."""

    attention_norm: torch.Tensor
    qkv: PackedWeight
    """[(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]"""
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    rotated: bool
    """Whether positions turn q and k."""
    attention: AttentionSpec
    out: PackedWeight
    mlp_norm: torch.Tensor
    gate_up: PackedWeight
    """[2 * I, hidden_size]: the outputs of gate, then those of up."""
    down: PackedWeight


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """A whole model. cos, sin: float32 [positions, head_dim]."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    embedding: PackedWeight
    """[vocab_size, hidden_size]"""
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: PackedWeight
    cos: torch.Tensor
    sin: torch.Tensor

    def tensors(self) -> dict[str, tuple[torch.Tensor | None, tuple[int, ...]]]:
        """Every plain tensor by name, with the shape that it must have."""
        hidden, heads = (self.embedding.layout.in_features,), (self.head_dim,)
        positions = (self.cos.shape[0], self.head_dim)
        found: dict[str, tuple[torch.Tensor | None, tuple[int, ...]]] = {
            "norm": (self.norm, hidden),
            "cos": (self.cos, positions),
            "sin": (self.sin, positions),
        }
        for index, layer in enumerate(self.layers):
            found |= {
                f"layers.{index}.attention_norm": (layer.attention_norm, hidden),
                f"layers.{index}.mlp_norm": (layer.mlp_norm, hidden),
                f"layers.{index}.q_norm": (layer.q_norm, heads),
                f"layers.{index}.k_norm": (layer.k_norm, heads),
                f"layers.{index}.sinks": (layer.attention.sinks, (self.num_heads,)),
            }
        return found

    def low_rank_sizes(self) -> tuple[LayerSizes, ...]:
        """Of each layer's products, what its low-rank parts must fit."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden = self.embedding.layout.in_features

        def of(product: PackedWeight, *sizes: int) -> ProductSizes:
            return ProductSizes(sizes, product.layout.in_features, product.layout.group)

        return tuple(
            (
                of(layer.qkv, query, key, key),
                of(layer.out, hidden),
                of(layer.gate_up, *[layer.down.layout.in_features] * 2),
                of(layer.down, hidden),
            )
            for layer in self.layers
        )

    def products(self) -> dict[str, tuple[PackedWeight, tuple[int, int]]]:
        """Every weight of a product by name, with the (out, in) that it must have."""
        hidden, query = self.embedding.layout.in_features, self.num_heads * self.head_dim
        found = {"head": (self.head, (self.embedding.layout.out_features, hidden))}
        for index, layer in enumerate(self.layers):
            inner = layer.down.layout.in_features
            found |= {
                f"layers.{index}.qkv": (layer.qkv, (query + 2 * self.num_kv_heads * self.head_dim, hidden)),
                f"layers.{index}.out": (layer.out, (hidden, query)),
                f"layers.{index}.gate_up": (layer.gate_up, (2 * inner, hidden)),
                f"layers.{index}.down": (layer.down, (hidden, inner)),
            }
        return found


class _LayerArgs(ctypes.Structure):
    """forward.h's DecoderLayer."""

    _fields_ = (
        *((name, PackedWeightStruct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm", "sinks")),
        *((name, c_int32) for name in ("rotated", "sliding_window", "chunk")),
        *((name, c_float) for name in ("scale", "softcap")),
    )


class _ModelArgs(ctypes.Structure):
    """forward.h's DecoderModel."""

    _fields_ = (
        *((name, PackedWeightStruct) for name in ("embedding", "head")),
        ("layers", ctypes.POINTER(_LayerArgs)),
        *((name, c_void_p) for name in ("norm", "cos", "sin")),
        *((name, c_int32) for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim")),
        ("eps", c_float),
    )


class _StepArgs(ctypes.Structure):
    """forward.h's DecoderStep."""

    _fields_ = (
        *((name, c_void_p) for name in ("token_ids", "positions", "slot_mapping")),
        *((name, c_void_p) for name in ("query_start_loc", "seq_lens", "block_tables", "logit_rows")),
        *((name, c_void_p) for name in ("pool", "logits", "adapters", "adapter_of_row")),
        *((name, c_int64) for name in ("table_stride", "layer_stride", "block_stride")),
        *((name, c_int64) for name in ("value_stride", "head_stride")),
        *((name, c_int32) for name in ("num_rows", "num_sequences", "num_logit_rows", "block_size")),
        *((name, c_int32) for name in ("num_adapters", "adapter_ranks")),
        ("known", KnownTokensStruct),
    )


STRUCTURES = {"decoder_layer": _LayerArgs, "decoder_model": _ModelArgs, "decoder_step": _StepArgs}


class CpuDecoder:
    """The forward of one model, with threads of its own that sleep between steps.

    A row's bits depend on its own tokens alone, and are those of `CpuOps` and `CpuQuantisedOps` called one
    by one. library: what `build.load_library` returns. Raises KernelArgumentError for weights that do not
    fit each other.
    """

    key_order = KeyOrder.TILED16

    def __init__(self, library: ctypes.CDLL, weights: DecoderWeights, num_threads: int) -> None:
        _check(weights)
        self._weights = weights  # C++ holds pointers into them
        self._low_rank_sizes = weights.low_rank_sizes()
        self._checked_batch = address_checks.CheckedBatch()
        self._forward = {
            dtype: entry(library, f"decoder_forward_{checks.dtype_name(dtype)}", c_void_p, c_void_p)
            for dtype in (*checks.DTYPES, *CODE_DTYPES)
        }
        self._profile = entry(library, "decoder_profile", c_void_p, c_void_p)
        create = entry(library, "decoder_create", c_void_p, c_int, c_void_p)
        model, self._handle = _model_args(weights), c_void_p()
        create(byref(model), num_threads, byref(self._handle))
        destroy = entry(library, "decoder_destroy", c_void_p)
        # Not at the end of the process, where a daemon thread may still be inside `forward`.
        finalize(self, destroy, self._handle).atexit = False

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        logit_rows: torch.Tensor,
        pool: torch.Tensor,
        adapters: tuple[AdapterRows, Sequence[CpuAdapter]] | None = None,
    ) -> torch.Tensor:
        """token_ids int64 [T], logit_rows int64 [R] of rows -> logits float32 [R, vocab_size].

        As `forward_scored`, where no row scores.
        """
        return self.forward_scored(token_ids, batch, logit_rows, NOTHING_KNOWN, pool, adapters)[0]

    def forward_scored(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        logit_rows: torch.Tensor,
        known: KnownTokens,
        pool: torch.Tensor,
        adapters: tuple[AdapterRows, Sequence[CpuAdapter]] | None = None,
    ) -> tuple[torch.Tensor, TokenScores]:
        """(logits of the first of the logit_rows, what the last known.num_rows of them say of known tokens):
        float32 [R - known.num_rows, vocab_size], and in place of logits that are never written `norm_scores`.

        Writes the KV of every row that has a slot into pool [num_blocks, num_layers, 2, num_kv_heads,
        block_size, head_dim], float32 or bfloat16, or one of codes. adapters: which row has which of them.
        Not for two threads at once. Raises MemoryError for a step that the system has no memory for.
        """
        num_rows = batch.slot_mapping.shape[0]
        self._check_step(token_ids, batch, logit_rows, pool)
        vocab_size, num_sampled = self._weights.head.layout.out_features, len(logit_rows) - known.num_rows
        if num_sampled < 0:
            found = f"{known.num_rows} among {len(logit_rows)} rows"
            raise KernelArgumentError("known", found, "no more than there are")
        known.check(known.num_rows, vocab_size)
        known = known.contiguous()
        scores = TokenScores.empty(known, vocab_size)
        token_ids, logit_rows, positions = (
            token_ids.contiguous(),
            logit_rows.contiguous(),
            batch.positions.contiguous(),
        )
        slots, tables = batch.slot_mapping.contiguous(), batch.block_tables.contiguous()
        starts, seq_lens = batch.query_start_loc.contiguous(), batch.seq_lens.contiguous()
        logits = torch.empty(num_sampled, vocab_size)
        args = _StepArgs(
            token_ids=token_ids.data_ptr(),
            positions=positions.data_ptr(),
            slot_mapping=slots.data_ptr(),
            query_start_loc=starts.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            block_tables=tables.data_ptr(),
            logit_rows=logit_rows.data_ptr(),
            pool=pool.data_ptr(),
            logits=logits.data_ptr(),
            table_stride=tables.shape[1],
            block_stride=pool.stride(0),
            layer_stride=pool.stride(1),
            value_stride=pool.stride(2),
            head_stride=pool.stride(3),
            num_rows=num_rows,
            num_sequences=batch.num_sequences,
            num_logit_rows=len(logit_rows),
            block_size=pool.shape[4],
            known=known_tokens_struct(known, scores),
        )
        if adapters is not None:
            rows, used = adapters
            self._check_adapters(num_rows, rows, used)
            pointers = (c_void_p * len(used))(*(ctypes.addressof(adapter.structs) for adapter in used))
            args.adapters, args.num_adapters = ctypes.addressof(pointers), len(used)
            args.adapter_of_row = rows.of_row.ctypes.data
            args.adapter_ranks = max(adapter.ranks for adapter in used)
        self._forward[pool.dtype](self._handle, byref(args))
        return logits, scores

    def prepare(self, layers: Sequence[LayerLowRank]) -> CpuAdapter:
        """An adapter for `forward`; layers: as `CpuPackedLowRankOps.prepare` made them. Raises
        KernelArgumentError for one of another model."""
        return CpuAdapter(layers, self._low_rank_sizes)

    def profile(self) -> dict[str, float]:
        """Seconds in each of PHASES since the last call. The first call turns the clock on."""
        seconds = (c_double * len(PHASES))()
        self._profile(self._handle, byref(seconds))
        return dict(zip(PHASES, seconds, strict=True))

    def _check_adapters(self, num_rows: int, rows: AdapterRows, used: Sequence[CpuAdapter]) -> None:
        if not used or len(used) != rows.num_adapters or len(rows.of_row) != num_rows:
            found = f"{len(used)} for {rows.num_adapters} of {len(rows.of_row)} rows"
            raise KernelArgumentError("adapters", found, f"as many as those of {num_rows} rows")
        if any(adapter.sizes is not self._low_rank_sizes for adapter in used):
            raise KernelArgumentError("adapters", "with one of another decoder", "those that `prepare` made")

    def _check_step(
        self, token_ids: torch.Tensor, batch: AttentionBatch, logit_rows: torch.Tensor, pool: torch.Tensor
    ) -> None:
        weights = self._weights
        token = token_elements(weights.head_dim, pool.dtype)
        shape = (None, len(weights.layers), 2, weights.num_kv_heads, None, token)
        checks.check_shape("pool", pool, shape)
        kv_layer = pool[:, 0]
        checks.check_kv_layer(kv_layer, self.key_order)
        checks.check_on_cpu(pool=pool, token_ids=token_ids, logit_rows=logit_rows, batch=batch.seq_lens)
        self._checked_batch.check(batch, kv_layer)
        num_rows = batch.slot_mapping.shape[0]
        checks.check_shape("token_ids", token_ids, (num_rows,), torch.int64)
        checks.check_shape("logit_rows", logit_rows, (None,), torch.int64)
        for name, indices, end in (
            ("token_ids", token_ids, weights.embedding.layout.out_features),
            ("positions", batch.positions, weights.cos.shape[0]),
            ("logit_rows", logit_rows, num_rows),
        ):
            if len(indices):
                low, high = (int(bound) for bound in indices.aminmax())
                if low < 0 or high >= end:
                    raise KernelArgumentError(name, f"{low} to {high}", f"0 to {end - 1}")


def _check(weights: DecoderWeights) -> None:
    if not weights.layers or weights.num_kv_heads < 1 or weights.num_heads % weights.num_kv_heads:
        found = f"{len(weights.layers)} layers of {weights.num_heads} heads over {weights.num_kv_heads}"
        raise KernelArgumentError("weights", found, "a layer, and heads a multiple of kv heads")
    if weights.head_dim % KEY_TILE or not 0 < weights.head_dim <= MAX_HEAD_DIM:
        wanted = f"a multiple of {KEY_TILE}, at most {MAX_HEAD_DIM}"
        raise KernelArgumentError("head_dim", str(weights.head_dim), wanted)
    for name, (tensor, shape) in weights.tensors().items():
        if tensor is not None:
            checks.check_shape(name, tensor, shape, torch.float32)
            checks.check_on_cpu(**{name: tensor})
            if not tensor.is_contiguous():
                raise KernelArgumentError(name, f"strided {list(tensor.stride())}", "contiguous")
    for name, (weight, (out_features, in_features)) in weights.products().items():
        layout = weight.layout
        if (layout.out_features, layout.in_features) != (out_features, in_features):
            found = f"of [{layout.out_features}, {layout.in_features}]"
            raise KernelArgumentError(name, found, f"[{out_features}, {in_features}]")
    for index, layer in enumerate(weights.layers):
        if (layer.q_norm is None) != (layer.k_norm is None):
            raise KernelArgumentError(f"layers.{index}", "with one of q_norm and k_norm", "both or neither")


def _model_args(weights: DecoderWeights) -> _ModelArgs:
    layers = (_LayerArgs * len(weights.layers))(*map(_layer_args, weights.layers))
    return _ModelArgs(
        embedding=packed_weight_struct(weights.embedding),
        head=packed_weight_struct(weights.head),
        layers=layers,
        norm=weights.norm.data_ptr(),
        cos=weights.cos.data_ptr(),
        sin=weights.sin.data_ptr(),
        num_layers=len(layers),
        num_heads=weights.num_heads,
        num_kv_heads=weights.num_kv_heads,
        head_dim=weights.head_dim,
        eps=weights.eps,
    )


def _layer_args(layer: LayerWeights) -> _LayerArgs:
    def address(tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    spec = layer.attention
    return _LayerArgs(
        qkv=packed_weight_struct(layer.qkv),
        out=packed_weight_struct(layer.out),
        gate_up=packed_weight_struct(layer.gate_up),
        down=packed_weight_struct(layer.down),
        attention_norm=address(layer.attention_norm),
        mlp_norm=address(layer.mlp_norm),
        q_norm=address(layer.q_norm),
        k_norm=address(layer.k_norm),
        sinks=address(spec.sinks),
        rotated=layer.rotated,
        sliding_window=spec.sliding_window or 0,
        chunk=spec.chunk or 0,
        scale=spec.scale,
        softcap=spec.logit_softcap or 0.0,
    )
