"""What a launch passes: ctypes mirrors of the structs in arguments.cuh, field by field."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p


class KvLayer(ctypes.Structure):
    """arguments.cuh's KvLayer: one layer of the pool."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("block_stride", "head_stride")),
        *((name, c_int32) for name in ("num_blocks", "block_size_log2")),
    )


class AttentionArguments(ctypes.Structure):
    """arguments.cuh's AttentionArguments, of decode, prefill and merge."""

    _fields_ = (
        *((name, c_void_p) for name in ("output", "query")),
        ("kv", KvLayer),
        *((name, c_void_p) for name in ("query_start_loc", "seq_lens", "block_tables", "sinks")),
        *((name, c_void_p) for name in ("decode_items", "num_decode_items")),
        *((name, c_void_p) for name in ("merge_items", "num_merge_items", "prefill_tiles")),
        *((name, c_void_p) for name in ("partial_outputs", "partial_sums")),
        ("query_stride", c_int64),
        *((name, c_int32) for name in ("table_stride", "num_kv_heads", "group", "window", "chunk")),
        *((name, c_float) for name in ("scale", "softcap")),
    )


class KvWriteArguments(ctypes.Structure):
    """arguments.cuh's KvWriteArguments."""

    _fields_ = (
        *((name, c_void_p) for name in ("key", "value", "query", "rotated_query", "cos", "sin")),
        ("kv", KvLayer),
        ("slot_mapping", c_void_p),
        *((name, c_int64) for name in ("key_stride", "value_stride", "query_stride")),
        *((name, c_int32) for name in ("num_rows", "num_heads", "num_kv_heads", "head_dim")),
    )


class RmsNormArguments(ctypes.Structure):
    """arguments.cuh's RmsNormArguments."""

    _fields_ = (
        *((name, c_void_p) for name in ("hidden", "residual", "weight", "normed", "summed")),
        *((name, c_int64) for name in ("outer_stride", "inner_stride")),
        *((name, c_int32) for name in ("outer", "inner", "size")),
        ("epsilon", c_float),
    )


class SiluAndMulArguments(ctypes.Structure):
    """arguments.cuh's SiluAndMulArguments."""

    _fields_ = (
        *((name, c_void_p) for name in ("gate_up", "output")),
        ("gate_up_stride", c_int64),
        *((name, c_int32) for name in ("num_rows", "size")),
    )


class CopyBlocksArguments(ctypes.Structure):
    """arguments.cuh's CopyBlocksArguments."""

    _fields_ = (
        *((name, c_void_p) for name in ("pool", "moves", "chain_starts")),
        ("block_bytes", c_int64),
        *((name, c_int32) for name in ("num_chains", "num_blocks")),
    )


class PackBlocksArguments(ctypes.Structure):
    """arguments.cuh's PackBlocksArguments, of gather and scatter."""

    _fields_ = (
        *((name, c_void_p) for name in ("pool", "packed", "block_ids")),
        ("block_bytes", c_int64),
        *((name, c_int32) for name in ("num_ids", "num_blocks")),
    )


MOST_ADAPTERS = 32
"""Of one launch: their factors are passed by value."""


class LowRankFactors(ctypes.Structure):
    """arguments.cuh's LowRankFactors: one adapter's part in one product."""

    _fields_ = (("a", c_void_p), ("b", c_void_p * 3), ("ranks", c_int32 * 3), ("unused", c_int32))


class LowRankArguments(ctypes.Structure):
    """arguments.cuh's LowRankArguments, of shrink and expand."""

    _fields_ = (
        *((name, c_void_p) for name in ("rows", "output", "hidden", "pieces", "row_ids")),
        *((name, c_int64) for name in ("row_stride", "output_stride")),
        *((name, c_int32) for name in ("num_rows", "in_features", "hidden_stride", "first_adapter")),
        ("starts", c_int32 * 4),
        ("factors", LowRankFactors * MOST_ADAPTERS),
    )
