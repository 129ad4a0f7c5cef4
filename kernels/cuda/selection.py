"""Whether the kernels cover a model, and the operations with them on a GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from pageturner.kernels.checks import dtype_name, either
from pageturner.kernels.cuda import tiles, variants
from pageturner.kernels.cuda.compiler import Compiler
from pageturner.kernels.cuda.cupy_runtime import CupyRuntime
from pageturner.kernels.cuda.ops import LEAST_BLOCK_SIZE, CudaOps
from pageturner.kernels.cuda.runtime import Launcher


def not_covered(dtype: torch.dtype, *, head_dim: int, block_size: int, group: int | None) -> str | None:
    """Why the kernels do not serve such a model, if they do not. group: None where it is not known."""
    if dtype not in variants.DTYPES:
        return f"the kernels take {either(variants.DTYPES)}, not {dtype_name(dtype)}"
    if head_dim not in tiles.HEAD_DIMS:
        return f"the kernels take head_dim {', '.join(map(str, tiles.HEAD_DIMS))}, not {head_dim}"
    if block_size < LEAST_BLOCK_SIZE or block_size & (block_size - 1):
        return f"the kernels take block_size {LEAST_BLOCK_SIZE} and its doubles, not {block_size}"
    if group is not None and group > tiles.MMA_ROWS:
        return f"the kernels take at most {tiles.MMA_ROWS} query heads a kv head, not {group}"
    return None


def make_cuda_ops(
    device: torch.device, dtype: torch.dtype, head_dim: int, cache_dir: Path, *, debug: bool
) -> CudaOps:
    """On a GPU, with what every model needs compiled: a machine that cannot is found out here.

    Raises KernelsUnavailable.
    """
    launcher = Launcher(CupyRuntime(device, Compiler(cache_dir, bounds_check=debug)))
    launcher.prepare(common_variants(dtype, head_dim))
    return CudaOps(launcher)


def common_variants(dtype: torch.dtype, head_dim: int) -> tuple[variants.Variant, ...]:
    """What models of this dtype and head_dim have in common; masks and caps load when first met."""
    return (
        variants.paged_decode(dtype, head_dim, bounded=False, softcap=False),
        variants.decode_merge(dtype, head_dim),
        variants.paged_prefill(dtype, head_dim, bounded=False, softcap=False),
        variants.write_kv(dtype),
        *(variants.rope_and_write_kv(dtype, table) for table in (torch.float32, dtype)),
        variants.rms_norm(dtype),
        variants.silu_and_mul(dtype),
        variants.copy_blocks(),
        variants.gather_blocks(),
        variants.scatter_blocks(),
    )
