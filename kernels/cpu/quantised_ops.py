"""Products with quantised weights in C++: checks here, one call each below."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_void_p

import torch

from pageturner.kernels import checks
from pageturner.kernels.cpu.entry import entry
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.grouped import GROUPS
from pageturner.kernels.known_tokens import KnownTokens, TokenScores
from pageturner.kernels.packed import PackedLayout, PackedWeight, check_mlp, check_rows
from pageturner.kernels.reference import QuantisedRows

_HEAD_BYTES = 16
"""Of a group of codes, before the codes."""


class PackedWeightStruct(ctypes.Structure):
    """products.h's PackedWeight. It points into the tensors: keep them."""

    _fields_ = (
        *((name, c_void_p) for name in ("tiles", "bias")),
        *((name, c_int64) for name in ("tile_bytes", "codes_bytes", "scales_bytes")),
        *((name, c_int32) for name in ("out_features", "in_features", "bits", "group")),
        *((name, c_int32) for name in ("float32_scales", "has_offsets")),
    )


class _NormRows(ctypes.Structure):
    """fused.h's NormRows."""

    _fields_ = (
        *((name, c_void_p) for name in ("hidden", "residual", "norm", "summed")),
        ("hidden_stride", c_int64),
        *((name, c_int32) for name in ("num_rows", "size")),
        ("eps", c_float),
    )


class KnownTokensStruct(ctypes.Structure):
    """scores.h's KnownTokens. It points into the tensors: keep them."""

    _fields_ = (
        *((name, c_void_p) for name in ("starts", "token_ids", "logprobs", "top_logprobs", "top_ids")),
        *((name, c_int32) for name in ("num_rows", "num_top")),
    )


STRUCTURES = {
    "packed_weight": PackedWeightStruct,
    "norm_rows": _NormRows,
    "known_tokens": KnownTokensStruct,
}


def known_tokens_struct(known: KnownTokens, scores: TokenScores) -> KnownTokensStruct:
    """known: checked, contiguous. scores: `TokenScores.empty`, to be written."""
    return KnownTokensStruct(
        starts=known.starts.data_ptr(),
        token_ids=known.token_ids.data_ptr(),
        logprobs=scores.logprobs.data_ptr(),
        top_logprobs=scores.top_logprobs.data_ptr(),
        top_ids=scores.top_ids.data_ptr(),
        num_rows=known.num_rows,
        num_top=scores.top_ids.shape[1],
    )


def packed_weight_struct(weight: PackedWeight, groups: Sequence[int] = GROUPS) -> PackedWeightStruct:
    """For operations in C++ that take it by pointer. groups: that they know. Raises KernelArgumentError for
    others, and off the CPU."""
    checks.check_on_cpu(buffer=weight.buffer, bias=weight.bias)
    layout = weight.layout
    if layout.group not in groups:
        raise KernelArgumentError("weight", f"in groups of {layout.group}", f"in groups of {tuple(groups)}")
    return PackedWeightStruct(
        tiles=weight.buffer.data_ptr(),
        bias=None if weight.bias is None else weight.bias.data_ptr(),
        tile_bytes=layout.tile_bytes,
        codes_bytes=layout.codes_bytes,
        scales_bytes=layout.scales_bytes,
        out_features=layout.out_features,
        in_features=layout.in_features,
        bits=layout.bits,
        group=layout.group,
        float32_scales=layout.scale_dtype is torch.float32,
        has_offsets=layout.has_offsets,
    )


class CpuQuantisedOps:
    """`QuantisedOps` in C++. Threads are torch's. library: what `build.load_library` returns."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        name = library.dot_name
        name.restype = ctypes.c_char_p
        self.name: str = name().decode()
        rows = (c_void_p, c_int64, c_int)
        self._quantise = entry(library, "quantise_rows_float32", *rows, c_int, c_int, c_void_p, c_int)
        self._linear = entry(library, "linear_quantised", c_void_p, *rows, c_void_p, c_void_p, c_int)
        self._norm_linear = entry(library, "norm_linear_quantised", *(c_void_p,) * 4, c_int)
        self._norm_mlp = entry(library, "norm_mlp_quantised", *(c_void_p,) * 6, c_int)
        self._norm_scores = entry(library, "norm_scores_quantised", *(c_void_p,) * 4, c_int)

    def quantise_rows(self, rows: torch.Tensor, group: int) -> QuantisedRows:
        """As `reference.quantise_rows`, for tests and benchmarks: products quantise their rows themselves."""
        checks.check_shape("rows", rows, (None, None), torch.float32)
        checks.check_on_cpu(rows=rows)
        rows = _dense(rows)
        num_rows, in_features = rows.shape
        codes = _code_rows(num_rows, in_features, group)
        self._quantise(
            rows.data_ptr(),
            rows.stride(0),
            num_rows,
            in_features,
            group,
            codes.data_ptr(),
            torch.get_num_threads(),
        )
        groups = codes.view(num_rows, in_features // group, _HEAD_BYTES + group)
        return QuantisedRows(
            codes=groups[..., _HEAD_BYTES:].reshape(num_rows, in_features),
            scales=groups[..., :4].contiguous().view(torch.float32).squeeze(-1),
            sums=groups[..., 8:12].contiguous().view(torch.int32).squeeze(-1),
        )

    def linear(self, rows: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        check_rows("rows", rows, weight.layout)
        checks.check_on_cpu(rows=rows)
        rows = _dense(rows)
        codes = _code_rows(len(rows), weight.layout.in_features, weight.layout.group)
        output = rows.new_empty(len(rows), weight.layout.out_features)
        self._linear(
            byref(packed_weight_struct(weight)),
            rows.data_ptr(),
            rows.stride(0),
            len(rows),
            codes.data_ptr(),
            output.data_ptr(),
            torch.get_num_threads(),
        )
        return output

    def norm_linear(
        self,
        hidden: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        weight: PackedWeight,
        residual: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        args = _NormArgs(hidden, norm, eps, weight.layout, residual)
        codes = _code_rows(len(hidden), weight.layout.in_features, weight.layout.group)
        output = hidden.new_empty(len(hidden), weight.layout.out_features)
        self._norm_linear(
            byref(args.struct),
            byref(packed_weight_struct(weight)),
            codes.data_ptr(),
            output.data_ptr(),
            torch.get_num_threads(),
        )
        return output, args.summed

    def norm_mlp(
        self,
        hidden: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        gate_up: PackedWeight,
        down: PackedWeight,
        residual: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_mlp(gate_up.layout, down.layout)
        args = _NormArgs(hidden, norm, eps, gate_up.layout, residual)
        codes, gated = (
            _code_rows(len(hidden), weight.layout.in_features, weight.layout.group)
            for weight in (gate_up, down)
        )
        output = hidden.new_empty(len(hidden), down.layout.out_features)
        self._norm_mlp(
            byref(args.struct),
            byref(packed_weight_struct(gate_up)),
            byref(packed_weight_struct(down)),
            codes.data_ptr(),
            gated.data_ptr(),
            output.data_ptr(),
            torch.get_num_threads(),
        )
        return output, args.summed

    def norm_scores(
        self,
        hidden: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        weight: PackedWeight,
        known: KnownTokens,
        residual: torch.Tensor | None = None,
    ) -> TokenScores:
        args = _NormArgs(hidden, norm, eps, weight.layout, residual)
        known.check(len(hidden), weight.layout.out_features)
        known = known.contiguous()
        scores = TokenScores.empty(known, weight.layout.out_features)
        codes = _code_rows(len(hidden), weight.layout.in_features, weight.layout.group)
        self._norm_scores(
            byref(args.struct),
            byref(packed_weight_struct(weight)),
            codes.data_ptr(),
            byref(known_tokens_struct(known, scores)),
            torch.get_num_threads(),
        )
        return scores


class _NormArgs:
    """Checked arguments of a norm; keeps what its struct points into."""

    def __init__(
        self,
        hidden: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        layout: PackedLayout,
        residual: torch.Tensor | None,
    ) -> None:
        check_rows("hidden", hidden, layout)
        checks.check_rms_norm(hidden, norm, residual)
        checks.check_on_cpu(hidden=hidden, norm=norm, residual=residual)
        self._hidden, self._norm = _dense(hidden), norm.contiguous()
        self._residual = None if residual is None else residual.contiguous()
        self.summed = hidden if residual is None else hidden.new_empty(hidden.shape)
        self.struct = _NormRows(
            hidden=self._hidden.data_ptr(),
            residual=None if self._residual is None else self._residual.data_ptr(),
            norm=self._norm.data_ptr(),
            summed=self.summed.data_ptr(),
            hidden_stride=self._hidden.stride(0),
            num_rows=hidden.shape[0],
            size=hidden.shape[1],
            eps=eps,
        )


def _dense(rows: torch.Tensor) -> torch.Tensor:
    """With only its rows strided."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _code_rows(num_rows: int, in_features: int, group: int) -> torch.Tensor:
    """Room for rows of CodeGroup."""
    return torch.empty(num_rows, in_features // group * (_HEAD_BYTES + group), dtype=torch.int8)
