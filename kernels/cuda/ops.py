"""The operations in CUDA: checks here, a launch or three each below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from pageturner.kernels import address_checks, checks
from pageturner.kernels.cuda import row_grids, swap, tiles, variants
from pageturner.kernels.cuda.arguments import (
    AttentionArguments,
    CopyBlocksArguments,
    KvLayer,
    KvWriteArguments,
    RmsNormArguments,
    SiluAndMulArguments,
)
from pageturner.kernels.cuda.attention_plan import AttentionShape
from pageturner.kernels.cuda.attention_planner import AttentionPlanner
from pageturner.kernels.cuda.block_moves import chains_of
from pageturner.kernels.cuda.device_plan import DevicePlan, to_device
from pageturner.kernels.cuda.low_rank import CudaLowRankOps
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.cuda.steps import Step, Steps
from pageturner.kernels.cuda.variants import DTYPES
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.layout import AttentionBatch, KeyOrder, head_dim_of, is_coded

LEAST_BLOCK_SIZE = tiles.DECODE_KEYS
OCTET = row_grids.OCTET
MOST_CODED_DIM = 256
"""What half a warp makes codes of (write_kv.cu)."""
SCORE_FACTORS = (1e-15, 1e6)
"""What scales and caps must lie between: then float32 holds their ratio, and scores times them so exactly
that two to the highest one, less the same as rounded, is no infinity. (From 1e10 on, it was.)"""


class CudaOps:
    """`PagedOps` by kernels of this package, on whatever the launcher's runtime runs them.

    dtype bfloat16 or float16; attention for head_dim in tiles.HEAD_DIMS and blocks of 16, 32, 64 ...
    tokens. Everything is enqueued on torch's current stream; tensors that an operation makes or copies
    belong to that stream, whose order keeps their memory until the kernels have run. Arguments that a kernel
    cannot read as they lie are copied; the pool, which it would have to write back, is refused.

    split: see AttentionPlanner. For one thread and one stream: steps take turns with one buffer of partial
    results. Transfers may be enqueued on another.
    """

    key_order = KeyOrder.PLAIN
    narrow_pool = False
    coded_pool = True
    row_invariant = False

    def __init__(self, launcher: Launcher, *, split: int | None = None) -> None:
        self._launcher = launcher
        # A tensor's device has its index, which a runtime's may leave out.
        self.device = torch.empty(0, device=launcher.runtime.device).device
        self.planner = AttentionPlanner(launcher.runtime.num_multiprocessors, split)
        self._steps = Steps(self.device, self.planner)

    @property
    def name(self) -> str:
        """`cuda`, or `cuda-emulated`."""
        return self._launcher.runtime.name

    def low_rank_ops(self, dtype: torch.dtype) -> CudaLowRankOps:
        """For adapters; on the same launcher."""
        return CudaLowRankOps(self._launcher, dtype)

    @property
    def attention_shapes(self) -> tuple[AttentionShape, ...]:
        """Those that `attention` was asked for so far: after one forward, all of a model's."""
        return tuple(self._steps.shapes)

    def register(self, batch: AttentionBatch, plans: Mapping[AttentionShape, DevicePlan]) -> None:
        """Attend to `batch` by `plans`, which the caller that captures it fills before each replay.

        What its tensors and plans hold by then is not looked at: the caller that fills them checks it
        (`address_checks.check_addresses`). Raises KernelArgumentError for tensors that are elsewhere or
        strided.
        """
        self._steps.register(batch, plans)

    def forget(self, batch: AttentionBatch) -> None:
        """Undo `register`."""
        self._steps.forget(batch)

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch
    ) -> None:
        step = self._check(kv_layer, batch)
        dtype = checks.own_dtype(key, kv_layer, DTYPES)
        checks.check_key_value(key, value, kv_layer, batch.slot_mapping.shape[0], dtype)
        checks.check_device(self.device, key=key, value=value)
        key, value = _rows(key), _rows(value)
        arguments = KvWriteArguments(
            key=key.data_ptr(),
            value=value.data_ptr(),
            kv=_kv(kv_layer),
            slot_mapping=step.slot_mapping.data_ptr(),
            key_stride=key.stride(0),
            value_stride=value.stride(0),
            num_rows=key.shape[0],
            num_kv_heads=key.shape[1],
            head_dim=key.shape[2],
        )
        if is_coded(kv_layer.dtype):
            variant = variants.coded_write_kv(key.dtype, kv_layer.dtype, None)
            self._launcher.launch(variant, row_grids.coded_write_kv(arguments, rotated=False), arguments)
        else:
            self._launcher.launch(variants.write_kv(key.dtype), row_grids.write_kv(arguments), arguments)

    def attention(
        self, query: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        step = self._check(kv_layer, batch)
        dtype = checks.own_dtype(query, kv_layer, DTYPES)
        checks.check_query(query, kv_layer, batch.slot_mapping.shape[0], dtype)
        checks.check_sinks(spec.sinks, query.shape[1])
        _check_score_factors(spec)
        checks.check_device(self.device, query=query, sinks=spec.sinks)
        num_kv_heads, head_dim = kv_layer.shape[2], head_dim_of(kv_layer)
        if head_dim not in tiles.HEAD_DIMS:
            raise KernelArgumentError("query", f"of head_dim {head_dim}", f"one of {tiles.HEAD_DIMS}")
        group = query.shape[1] // num_kv_heads
        shape = AttentionShape(num_kv_heads, group, head_dim, spec.sliding_window or 0, spec.chunk or 0)
        plan = self._steps.plan(step, shape)
        query = _vector_rows(query)
        sinks = None if spec.sinks is None else spec.sinks.contiguous()
        output = query.new_empty(query.shape)
        arguments = AttentionArguments(
            output=output.data_ptr(),
            query=query.data_ptr(),
            kv=_kv(kv_layer),
            query_start_loc=step.query_start_loc.data_ptr(),
            seq_lens=step.seq_lens.data_ptr(),
            block_tables=step.block_tables.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            decode_items=plan.decode_items_address,
            num_decode_items=plan.num_decode_items_address,
            merge_items=plan.merge_items_address,
            num_merge_items=plan.num_merge_items_address,
            prefill_tiles=plan.prefill_tiles_address,
            partial_outputs=plan.partial_outputs.data_ptr(),
            partial_sums=plan.partial_sums.data_ptr(),
            query_stride=query.stride(0),
            table_stride=step.block_tables.shape[1],
            num_kv_heads=num_kv_heads,
            group=group,
            window=shape.window,
            chunk=shape.chunk,
            scale=spec.scale,
            softcap=spec.logit_softcap or 0.0,
        )
        merge_rows = min(tiles.MMA_ROWS, batch.max_query_len * group)
        softcap = spec.logit_softcap is not None
        code = kv_layer.dtype if is_coded(kv_layer.dtype) else None
        self._launch_attention(dtype, code, shape, plan, arguments, merge_rows=merge_rows, softcap=softcap)
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
        step = self._check(kv_layer, batch)
        dtype = checks.own_dtype(query, kv_layer, DTYPES)
        checks.check_query(query, kv_layer, batch.slot_mapping.shape[0], dtype)
        checks.check_key_value(key, value, kv_layer, query.shape[0], dtype)
        checks.check_rope(query, cos, sin)
        checks.check_device(self.device, query=query, key=key, value=value, cos=cos, sin=sin)
        num_rows, num_heads, head_dim = query.shape
        if head_dim % (2 * OCTET):
            raise KernelArgumentError("query", checks.describe(query), f"head_dim a multiple of {2 * OCTET}")
        query, key, value = _rows(query), _rows(key), _rows(value)
        cos, sin = _table(cos), _table(sin)
        output = query.new_empty(query.shape)
        arguments = KvWriteArguments(
            key=key.data_ptr(),
            value=value.data_ptr(),
            query=query.data_ptr(),
            rotated_query=output.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            kv=_kv(kv_layer),
            slot_mapping=step.slot_mapping.data_ptr(),
            key_stride=key.stride(0),
            value_stride=value.stride(0),
            query_stride=query.stride(0),
            num_rows=num_rows,
            num_heads=num_heads,
            num_kv_heads=key.shape[1],
            head_dim=head_dim,
        )
        if is_coded(kv_layer.dtype):
            variant = variants.coded_write_kv(dtype, kv_layer.dtype, cos.dtype)
            self._launcher.launch(variant, row_grids.coded_write_kv(arguments, rotated=True), arguments)
        else:
            variant = variants.rope_and_write_kv(dtype, cos.dtype)
            self._launcher.launch(variant, row_grids.rope_and_write_kv(arguments), arguments)
        return output

    def rms_norm(
        self, hidden: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        checks.check_rms_norm(hidden, weight, residual, DTYPES)
        checks.check_device(self.device, hidden=hidden, weight=weight, residual=residual)
        rows = hidden if hidden.dim() == 3 else hidden.reshape(-1, 1, hidden.shape[-1])
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        added = None if residual is None else residual.contiguous()
        weight = weight.contiguous()
        normed = hidden.new_empty(hidden.shape)
        summed = hidden if added is None else hidden.new_empty(hidden.shape)
        arguments = RmsNormArguments(
            hidden=rows.data_ptr(),
            residual=None if added is None else added.data_ptr(),
            weight=weight.data_ptr(),
            normed=normed.data_ptr(),
            summed=None if added is None else summed.data_ptr(),
            outer_stride=rows.stride(0),
            inner_stride=rows.stride(1),
            outer=rows.shape[0],
            inner=rows.shape[1],
            size=rows.shape[2],
            epsilon=eps,
        )
        self._launcher.launch(variants.rms_norm(hidden.dtype), row_grids.rms_norm(arguments), arguments)
        return normed, summed

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        checks.check_gate_up(gate_up, DTYPES)
        checks.check_device(self.device, gate_up=gate_up)
        gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        output = gate_up.new_empty(num_rows, size)
        arguments = SiluAndMulArguments(
            gate_up=gate_up.data_ptr(),
            output=output.data_ptr(),
            gate_up_stride=gate_up.stride(0),
            num_rows=num_rows,
            size=size,
        )
        variant = variants.silu_and_mul(gate_up.dtype)
        self._launcher.launch(variant, row_grids.silu_and_mul(arguments), arguments)
        return output

    def copy_blocks(self, pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        address_checks.check_copy(pool, pairs)
        checks.check_device(self.device, pool=pool)
        if not pool.is_contiguous() or not checks.is_vector_aligned(pool.flatten(1)):
            raise KernelArgumentError("pool", f"strided {list(pool.stride())}", "contiguous, aligned blocks")
        chains = chains_of(pairs)
        if not chains:
            return
        moves = np.array([move for chain in chains for move in chain], dtype=np.int32)
        starts = np.cumsum([0, *map(len, chains)], dtype=np.int32)
        words = to_device(np.concatenate((moves.ravel(), starts)), self.device)
        arguments = CopyBlocksArguments(
            pool=pool.data_ptr(),
            moves=words.data_ptr(),
            chain_starts=words.data_ptr() + moves.nbytes,
            block_bytes=pool[0].nbytes,
            num_chains=len(chains),
            num_blocks=pool.shape[0],
        )
        self._launcher.launch(variants.copy_blocks(), row_grids.copy_blocks(arguments), arguments)

    def transfer_blocks(
        self, source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]
    ) -> None:
        address_checks.check_transfer(source, destination, pairs)
        swap.transfer_blocks(self._launcher, source, destination, pairs)

    def _check(self, kv_layer: torch.Tensor, batch: AttentionBatch) -> Step:
        checks.check_kv_layer(kv_layer, self.key_order, DTYPES)
        checks.check_device(self.device, kv_layer=kv_layer)
        checks.check_vector_blocks(kv_layer, LEAST_BLOCK_SIZE)
        if is_coded(kv_layer.dtype) and head_dim_of(kv_layer) > MOST_CODED_DIM:
            wanted = f"head_dim at most {MOST_CODED_DIM}"
            raise KernelArgumentError("kv_layer", checks.describe(kv_layer), wanted)
        return self._steps.of(batch, kv_layer)

    def _launch_attention(
        self,
        dtype: torch.dtype,
        code: torch.dtype | None,
        shape: AttentionShape,
        plan: DevicePlan,
        arguments: AttentionArguments,
        *,
        merge_rows: int,
        softcap: bool,
    ) -> None:
        options = {"bounded": bool(shape.window or shape.chunk), "softcap": softcap}
        capacity, kv_heads = plan.capacity, shape.num_kv_heads
        launch = self._launcher.launch
        if capacity.prefill_tiles:
            if code is None:
                prefill = variants.paged_prefill(dtype, shape.head_dim, **options)
            else:
                prefill = variants.coded_prefill(dtype, code, shape.head_dim, **options)
            launch(prefill, (capacity.prefill_tiles, kv_heads, 1), arguments)
        if capacity.decode_items:
            if code is None:
                decode = variants.paged_decode(dtype, shape.head_dim, **options)
            else:
                decode = variants.coded_decode(dtype, code, shape.head_dim, **options)
            launch(decode, (capacity.decode_items, kv_heads, 1), arguments)
        if capacity.merge_items:
            merge = variants.decode_merge(dtype, shape.head_dim)
            launch(merge, (capacity.merge_items, kv_heads, merge_rows), arguments)


def _check_score_factors(spec: AttentionSpec) -> None:
    """The kernels find the highest score before they scale it, so the factor must be above 0. That is the
    scale, or the cap where there is one: the scale is then applied first, and may have any sign."""
    least, most = SCORE_FACTORS
    if spec.logit_softcap is None:
        if not least <= spec.scale <= most:
            raise KernelArgumentError("scale", str(spec.scale), f"from {least} to {most}")
    elif not least <= spec.logit_softcap <= most:
        raise KernelArgumentError("logit_softcap", str(spec.logit_softcap), f"from {least} to {most}")
    elif not abs(spec.scale) <= most:
        raise KernelArgumentError("scale", str(spec.scale), f"from {-most} to {most}")


def _kv(kv_layer: torch.Tensor) -> KvLayer:
    """With equal strides of keys and values, which are halves of one layer."""
    block_stride, half, head_stride, _, _ = kv_layer.stride()
    keys = kv_layer.data_ptr()
    return KvLayer(
        keys=keys,
        values=keys + half * kv_layer.element_size(),
        block_stride=block_stride,
        head_stride=head_stride,
        num_blocks=kv_layer.shape[0],
        block_size_log2=kv_layer.shape[3].bit_length() - 1,
    )


def _rows(rows: torch.Tensor) -> torch.Tensor:
    """[T, heads, head_dim] whose heads of one row are adjacent; rows may be anywhere."""
    dense = rows.stride(2) == 1 and rows.stride(1) == rows.shape[2]
    return rows if dense else rows.contiguous()


def _vector_rows(rows: torch.Tensor) -> torch.Tensor:
    """The same, and each row at a multiple of 16 bytes."""
    rows = _rows(rows)
    return rows if checks.is_vector_aligned(rows) else rows.clone(memory_format=torch.contiguous_format)


def _table(table: torch.Tensor) -> torch.Tensor:
    """cos or sin, read by 16 bytes."""
    table = table.contiguous()
    return table if checks.is_vector_aligned(table) else table.clone()
