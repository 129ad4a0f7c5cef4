"""The one place that picks a backend for a machine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pageturner.kernels.checks import DTYPES, either
from pageturner.kernels.cpu.build import load_library
from pageturner.kernels.cpu.forward import CpuDecoder, DecoderWeights
from pageturner.kernels.cpu.ops import MAX_HEAD_DIM, CpuOps
from pageturner.kernels.cpu.quantised_ops import CpuQuantisedOps
from pageturner.kernels.errors import CompilerUnavailable, KernelArgumentError, KernelsUnavailable
from pageturner.kernels.interface import PagedOps, QuantisedOps
from pageturner.kernels.layout import KEY_TILE
from pageturner.kernels.torch_ops import TorchOps

logger = logging.getLogger(__name__)


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
    """The best backend for this machine, chosen once; make the pool with its `key_order`.

    cache_dir: where compiled operations are kept; None: compile nothing. group: query heads a kv head,
    where that is known. debug: CUDA kernels stop before they leave their arrays.

    On a GPU, a model or setting that the kernels do not cover runs in torch, and a warning says why. A
    machine that cannot run them raises KernelsUnavailable with the reason, unless allow_fallback: then it
    warns, too. Raises KernelArgumentError for a dtype that no backend has.
    """
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

    # Here, not above: serving on the CPU has no use for it.
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


@dataclass(frozen=True, slots=True)
class QuantisedKernels:
    """What computes with quantised weights. decoder: a whole forward as one call, where there is such."""

    ops: QuantisedOps
    decoder: Callable[[DecoderWeights], CpuDecoder] | None = None


def select_quantised(device: torch.device, cache_dir: Path | None) -> QuantisedKernels | None:
    """What computes with quantised weights on this machine, on as many threads as torch has now.

    None where nothing does: off the CPU, and where no compiler makes it, of which `select_ops` warns.
    """
    if device.type != "cpu" or cache_dir is None:
        return None
    try:
        library = load_library(cache_dir)
    except CompilerUnavailable:
        return None
    num_threads = torch.get_num_threads()
    return QuantisedKernels(
        CpuQuantisedOps(library), lambda weights: CpuDecoder(library, weights, num_threads)
    )


def _select_cpu(
    device: torch.device, *, head_dim: int, block_size: int, deterministic: bool, cache_dir: Path | None
) -> PagedOps:
    fits = head_dim % KEY_TILE == 0 and head_dim <= MAX_HEAD_DIM and block_size % KEY_TILE == 0
    if device.type == "cpu" and fits and cache_dir is not None:
        try:
            return CpuOps(load_library(cache_dir))
        except CompilerUnavailable as reason:
            logger.warning("attention runs in torch, several times slower: %s", reason)
    return TorchOps(deterministic=deterministic)
