"""Operations on a device, for tests whose tensors are on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from pageturner.kernels.address_checks import BATCH_TENSORS
from pageturner.kernels.interface import AttentionSpec, PagedOps
from pageturner.kernels.layout import AttentionBatch, KeyOrder


class OnDevice:
    """`PagedOps` that moves what it is given to `device`, strides and all, and what comes of it back.

    Where `device` is the CPU, the tensors themselves go through.
    """

    def __init__(self, ops: PagedOps, device: torch.device) -> None:
        self._ops = ops
        self._device = device

    @property
    def name(self) -> str:
        return self._ops.name

    @property
    def key_order(self) -> KeyOrder:
        return self._ops.key_order

    @property
    def narrow_pool(self) -> bool:
        return self._ops.narrow_pool

    @property
    def coded_pool(self) -> bool:
        return self._ops.coded_pool

    @property
    def row_invariant(self) -> bool:
        return self._ops.row_invariant

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch
    ) -> None:
        with self._written(kv_layer) as layer:
            self._ops.write_kv(self._to(key), self._to(value), layer, self._batch(batch))

    def attention(
        self, query: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        spec = replace(spec, sinks=None if spec.sinks is None else self._to(spec.sinks))
        return self._ops.attention(self._to(query), self._to(kv_layer), self._batch(batch), spec).cpu()

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
        query, key, value, cos, sin = map(self._to, (query, key, value, cos, sin))
        with self._written(kv_layer) as layer:
            rotated = self._ops.rope_and_write_kv(query, key, value, cos, sin, layer, self._batch(batch))
            return rotated.cpu()

    def rms_norm(
        self, hidden: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        added = None if residual is None else self._to(residual)
        normed, summed = self._ops.rms_norm(self._to(hidden), self._to(weight), eps, added)
        return normed.cpu(), summed.cpu()

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._ops.silu_and_mul(self._to(gate_up)).cpu()

    def copy_blocks(self, pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        with self._written(pool) as moved:
            self._ops.copy_blocks(moved, pairs)

    def transfer_blocks(
        self, source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]
    ) -> None:
        """Out of the device and, when it is there, awaited."""
        self._ops.transfer_blocks(self._to(source), destination, pairs)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _to(self, tensor: torch.Tensor) -> torch.Tensor:
        """With the storage around it, so that offset and strides stay as they are."""
        if tensor.device == self._device:
            return tensor
        flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        return flat.to(self._device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _batch(self, batch: AttentionBatch) -> AttentionBatch:
        if batch.seq_lens.device == self._device:
            return batch
        return replace(batch, **{name: self._to(getattr(batch, name)) for name in BATCH_TENSORS})  # type: ignore[arg-type]  # tensors all

    @contextmanager
    def _written(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        moved = self._to(tensor)
        yield moved
        if moved is not tensor:
            tensor.copy_(moved)
