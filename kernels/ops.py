"""The operations every backend offers, and the one place that picks a backend."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from pageturner.kernels.errors import CompilerUnavailable, KernelArgumentError, KernelsUnavailable
from pageturner.kernels.layout import KEY_TILE, AttentionBatch, KeyPage

logger = logging.getLogger(__name__)

MAX_KEYS = 2**31 - 1
"""Of a sequence: lengths are int32."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What is constant about one layer's attention.

    scale: factor on q.k. sliding_window: a row sees at most so many keys, itself included (None: all).
    logit_softcap: scores become cap * tanh(score / cap). sinks: float32 [num_heads], a logit per head
    that joins the softmax's denominator only. chunk: a row sees only keys of its own chunk of so many
    positions (llama4). Raises KernelArgumentError for a cap that is not positive, and for a window or chunk
    that is no positive int32.
    """

    scale: float
    sliding_window: int | None = None
    logit_softcap: float | None = None
    sinks: torch.Tensor | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name in ("sliding_window", "chunk"):
            bound = getattr(self, name)
            if bound is not None and not (isinstance(bound, int) and 0 < bound <= MAX_KEYS):
                raise KernelArgumentError(name, str(bound), f"1 to {MAX_KEYS}, or None")
        if self.logit_softcap is not None and not self.logit_softcap > 0:
            raise KernelArgumentError("logit_softcap", str(self.logit_softcap), "above 0, or None")


class PagedOps(Protocol):
    """Operations on a pool in the layout of `kernels.layout`; `kernels.reference` defines their results.

    `kv_layer` is pool[:, layer]: [num_blocks, 2, num_kv_heads, block_size, head_dim], strided.
    """

    @property
    def name(self) -> str: ...

    @property
    def key_page(self) -> KeyPage:
        """The key order this backend wants; the pool must be made with it."""
        ...

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch
    ) -> None:
        """Store key, value [T, num_kv_heads, head_dim] at batch.slot_mapping."""
        ...

    def attention(
        self, query: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        """query [T, num_heads, head_dim] -> [T, num_heads, head_dim], reading keys through block_tables."""
        ...

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
        """Rotate query and key by cos, sin [T, head_dim] (halves rotated, as llama); store key and value.

        Returns the rotated query.
        """
        ...

    def rms_norm(
        self, hidden: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed, residual): residual + hidden if one is given, else hidden, and its norm, times weight."""
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 * I] -> silu(first half) * second half."""
        ...

    def copy_blocks(self, pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Within one pool, all sources read before any destination is written."""
        ...

    def transfer_blocks(
        self, source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]
    ) -> None:
        """Between two pools (swap out, swap in); pairs are (source id, destination id)."""
        ...


def select_ops(
    device: torch.device,
    dtype: torch.dtype,
    *,
    head_dim: int,
    block_size: int,
    deterministic: bool,
    cache_dir: Path | None,
    group: int | None = None,
    allow_fallback: bool = False,
    debug: bool = False,
) -> PagedOps:
    """The best backend for this machine, chosen once; make the pool with its `key_page`.

    cache_dir: where compiled operations are kept; None: compile nothing. group: query heads a kv head,
    where that is known. debug: CUDA kernels stop before they leave their arrays.

    On a GPU, a model or setting that the kernels do not cover runs in torch, and a warning says why. A
    machine that cannot run them raises KernelsUnavailable with the reason, unless allow_fallback: then it
    warns, too. Raises KernelArgumentError for a dtype that no backend has.
    """
    # Here, not above: the backends import this file, and a compiler is only looked for when asked.
    from pageturner.kernels.checks import DTYPES, either
    from pageturner.kernels.torch_ops import TorchOps

    dtypes = (*DTYPES, torch.float16) if device.type == "cuda" else DTYPES
    if dtype not in dtypes:
        raise KernelArgumentError("dtype", str(dtype), f"{either(dtypes)} on {device}")
    if device.type != "cuda":
        return _select_cpu(
            device,
            head_dim=head_dim,
            block_size=block_size,
            deterministic=deterministic,
            cache_dir=cache_dir,
        )

    from pageturner.kernels.cuda.selection import make_cuda_ops, not_covered

    reason = not_covered(dtype, head_dim=head_dim, block_size=block_size, group=group)
    if deterministic:
        reason = "deterministic results were asked for"
    elif cache_dir is None:
        reason = "there is no folder for compiled kernels"
    elif reason is None:
        try:
            return make_cuda_ops(device, dtype, head_dim, cache_dir, debug=debug)
        except KernelsUnavailable as unavailable:
            if not allow_fallback:
                raise
            reason = str(unavailable)
    logger.warning("attention runs in torch on %s, several times slower: %s", device, reason)
    return TorchOps(deterministic=deterministic, dtypes=dtypes)


def _select_cpu(
    device: torch.device, *, head_dim: int, block_size: int, deterministic: bool, cache_dir: Path | None
) -> PagedOps:
    from pageturner.kernels.cpu.build import load_library
    from pageturner.kernels.cpu.ops import MAX_HEAD_DIM, CpuOps
    from pageturner.kernels.torch_ops import TorchOps

    fits = head_dim % KEY_TILE == 0 and head_dim <= MAX_HEAD_DIM and block_size % KEY_TILE == 0
    if device.type == "cpu" and fits and cache_dir is not None:
        try:
            return CpuOps(load_library(cache_dir))
        except CompilerUnavailable as reason:
            logger.warning("attention runs in torch, several times slower: %s", reason)
    return TorchOps(deterministic=deterministic)
