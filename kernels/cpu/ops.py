"""The operations for the CPU in C++: checks here, one call each below."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_void_p
from itertools import product

import torch

from pageturner.kernels import address_checks, block_copy, checks
from pageturner.kernels.cpu.entry import entry
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.layout import CODE_DTYPES, KEY_TILE, AttentionBatch, KeyOrder, head_dim_of

MAX_HEAD_DIM = 1024

_Dtypes = tuple[torch.dtype, ...]
_Function = Callable[..., object]
_POOLED = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    *product(checks.DTYPES, CODE_DTYPES),
)
"""Of rows and pool."""
_TURNED = (
    *((*pooled, torch.float32) for pooled in _POOLED),
    *((*pooled, torch.bfloat16) for pooled in _POOLED if pooled[0] is torch.bfloat16),
)
"""Of rows, pool, and cos and sin."""


class _AttentionArgs(ctypes.Structure):
    """attention.h's AttentionArgs."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "output", "kv_layer")),
        *((name, c_void_p) for name in ("query_start_loc", "seq_lens", "block_tables", "sinks")),
        *((name, c_int64) for name in ("query_stride", "table_stride")),
        *((name, c_int64) for name in ("block_stride", "value_stride", "head_stride")),
        *((name, c_int32) for name in ("num_sequences", "num_heads", "num_kv_heads", "head_dim")),
        *((name, c_int32) for name in ("block_size", "sliding_window", "chunk")),
        *((name, c_float) for name in ("scale", "softcap")),
    )


class _KvWriteArgs(ctypes.Structure):
    """rows.h's KvWriteArgs."""

    _fields_ = (
        *((name, c_void_p) for name in ("key", "value", "kv_layer", "slot_mapping")),
        *((name, c_int64) for name in ("key_stride", "value_row_stride")),
        *((name, c_int64) for name in ("block_stride", "value_stride", "head_stride")),
        *((name, c_int32) for name in ("num_rows", "num_kv_heads", "head_dim", "block_size")),
    )


class _RotateArgs(ctypes.Structure):
    """rows.h's RotateArgs."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "output", "cos", "sin")),
        ("query_stride", c_int64),
        ("num_heads", c_int32),
    )


class _RmsNormArgs(ctypes.Structure):
    """rows.h's RmsNormArgs."""

    _fields_ = (
        *((name, c_void_p) for name in ("hidden", "residual", "weight", "normed", "summed")),
        *((name, c_int64) for name in ("outer_stride", "inner_stride")),
        *((name, c_int32) for name in ("outer", "inner", "size")),
        ("eps", c_float),
    )


STRUCTURES = {
    "attention": _AttentionArgs,
    "kv_write": _KvWriteArgs,
    "rotate": _RotateArgs,
    "rms_norm": _RmsNormArgs,
}


class CpuOps:
    """`PagedOps` in C++, for head_dim a multiple of 16 and blocks of TILED16 keys.

    A row's result depends on its own tokens alone, bit for bit: on no other row, chunk, batch or number
    of threads. Threads are torch's. library: what `build.load_library` returns.
    """

    name = "cpu"
    key_order = KeyOrder.TILED16
    narrow_pool = True
    coded_pool = True
    row_invariant = True

    def __init__(self, library: ctypes.CDLL) -> None:
        def by_dtypes(name: str, keys: Sequence[_Dtypes], *argtypes: type) -> dict[_Dtypes, _Function]:
            return {
                key: entry(library, "_".join((name, *map(checks.dtype_name, key))), *argtypes, c_int)
                for key in keys
            }

        self.library = library
        self._checked_batch = address_checks.CheckedBatch()
        alone, pooled, turned = [(dtype,) for dtype in checks.DTYPES], list(_POOLED), list(_TURNED)
        self._write_kv = by_dtypes("write_kv", pooled, c_void_p)
        self._attention = by_dtypes("attention", pooled, c_void_p)
        self._rms_norm = by_dtypes("rms_norm", alone, c_void_p)
        self._silu_and_mul = by_dtypes("silu_and_mul", alone, c_void_p, c_void_p, c_int64, c_int32, c_int32)
        self._rope_and_write_kv = by_dtypes("rope_and_write_kv", turned, c_void_p, c_void_p)

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch
    ) -> None:
        self._check(kv_layer, batch)
        num_rows, dtype = batch.slot_mapping.shape[0], checks.row_dtype(key, kv_layer)
        checks.check_key_value(key, value, kv_layer, num_rows, dtype)
        checks.check_on_cpu(key=key, value=value)
        key, value, slots = _rows(key), _rows(value), batch.slot_mapping.contiguous()
        args = _kv_write_args(key, value, kv_layer, slots)
        self._write_kv[key.dtype, kv_layer.dtype](byref(args), torch.get_num_threads())

    def attention(
        self, query: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        self._check(kv_layer, batch)
        num_rows, dtype = batch.slot_mapping.shape[0], checks.row_dtype(query, kv_layer)
        checks.check_query(query, kv_layer, num_rows, dtype)
        checks.check_sinks(spec.sinks, query.shape[1])
        checks.check_on_cpu(query=query, sinks=spec.sinks)
        query = _rows(query)
        tables = batch.block_tables.contiguous()
        starts, seq_lens = batch.query_start_loc.contiguous(), batch.seq_lens.contiguous()
        sinks = None if spec.sinks is None else spec.sinks.contiguous()
        output = query.new_empty(query.shape)
        args = _AttentionArgs(
            query=query.data_ptr(),
            output=output.data_ptr(),
            kv_layer=kv_layer.data_ptr(),
            query_start_loc=starts.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            block_tables=tables.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            query_stride=query.stride(0),
            table_stride=tables.shape[1],
            block_stride=kv_layer.stride(0),
            value_stride=kv_layer.stride(1),
            head_stride=kv_layer.stride(2),
            num_sequences=batch.num_sequences,
            num_heads=query.shape[1],
            num_kv_heads=kv_layer.shape[2],
            head_dim=head_dim_of(kv_layer),
            block_size=kv_layer.shape[3],
            sliding_window=spec.sliding_window or 0,
            chunk=spec.chunk or 0,
            scale=spec.scale,
            softcap=spec.logit_softcap or 0.0,
        )
        self._attention[query.dtype, kv_layer.dtype](byref(args), torch.get_num_threads())
        return output

    def rope_and_write_kv(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_layer: torch.Tensor,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        self._check(kv_layer, batch)
        num_rows, dtype = batch.slot_mapping.shape[0], checks.row_dtype(query, kv_layer)
        checks.check_query(query, kv_layer, num_rows, dtype)
        checks.check_key_value(key, value, kv_layer, query.shape[0], query.dtype)
        checks.check_rope(query, cos, sin)
        checks.check_on_cpu(query=query, key=key, value=value, cos=cos, sin=sin)
        query, key, value = _rows(query), _rows(key), _rows(value)
        cos, sin, slots = cos.contiguous(), sin.contiguous(), batch.slot_mapping.contiguous()
        output = query.new_empty(query.shape)
        rotate = _RotateArgs(
            query=query.data_ptr(),
            output=output.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            query_stride=query.stride(0),
            num_heads=query.shape[1],
        )
        write = _kv_write_args(key, value, kv_layer, slots)
        rope = self._rope_and_write_kv[query.dtype, kv_layer.dtype, cos.dtype]
        rope(byref(rotate), byref(write), torch.get_num_threads())
        return output

    def rms_norm(
        self, hidden: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        checks.check_rms_norm(hidden, weight, residual)
        checks.check_on_cpu(hidden=hidden, weight=weight, residual=residual)
        rows = (
            hidden
            if hidden.dim() == 3 and hidden.stride(-1) == 1
            else hidden.reshape(-1, 1, hidden.shape[-1])
        )
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        added = None if residual is None else residual.contiguous()
        weight = weight.contiguous()
        normed = hidden.new_empty(hidden.shape)
        summed = hidden if added is None else hidden.new_empty(hidden.shape)
        args = _RmsNormArgs(
            hidden=rows.data_ptr(),
            residual=None if added is None else added.data_ptr(),
            weight=weight.data_ptr(),
            normed=normed.data_ptr(),
            summed=summed.data_ptr(),
            outer_stride=rows.stride(0),
            inner_stride=rows.stride(1),
            outer=rows.shape[0],
            inner=rows.shape[1],
            size=rows.shape[2],
            eps=eps,
        )
        self._rms_norm[hidden.dtype,](byref(args), torch.get_num_threads())
        return normed, summed

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        checks.check_gate_up(gate_up)
        checks.check_on_cpu(gate_up=gate_up)
        gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        output = gate_up.new_empty(rows, size)
        self._silu_and_mul[gate_up.dtype,](
            gate_up.data_ptr(), output.data_ptr(), gate_up.stride(0), rows, size, torch.get_num_threads()
        )
        return output

    def copy_blocks(self, pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        block_copy.copy_blocks(pool, pairs)

    def transfer_blocks(
        self, source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]
    ) -> None:
        block_copy.transfer_blocks(source, destination, pairs)

    def _check(self, kv_layer: torch.Tensor, batch: AttentionBatch) -> None:
        checks.check_kv_layer(kv_layer, self.key_order)
        if (head_dim := head_dim_of(kv_layer)) % KEY_TILE or head_dim > MAX_HEAD_DIM:
            raise KernelArgumentError(
                "kv_layer",
                checks.describe(kv_layer),
                f"head_dim a multiple of {KEY_TILE}, at most {MAX_HEAD_DIM}",
            )
        checks.check_on_cpu(kv_layer=kv_layer)
        if self._checked_batch.check(batch, kv_layer):
            checks.check_on_cpu(seq_lens=batch.seq_lens)  # and so all of the batch


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """[T, heads, head_dim] with only its rows strided."""
    if heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]:
        return heads
    return heads.contiguous()


def _kv_write_args(
    key: torch.Tensor, value: torch.Tensor, kv_layer: torch.Tensor, slots: torch.Tensor
) -> _KvWriteArgs:
    return _KvWriteArgs(
        key=key.data_ptr(),
        value=value.data_ptr(),
        kv_layer=kv_layer.data_ptr(),
        slot_mapping=slots.data_ptr(),
        key_stride=key.stride(0),
        value_row_stride=value.stride(0),
        block_stride=kv_layer.stride(0),
        value_stride=kv_layer.stride(1),
        head_stride=kv_layer.stride(2),
        num_rows=key.shape[0],
        num_kv_heads=kv_layer.shape[2],
        head_dim=head_dim_of(kv_layer),
        block_size=kv_layer.shape[3],
    )
