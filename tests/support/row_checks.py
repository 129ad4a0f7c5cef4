"""What each kernel that works on rows must do, against `kernels.reference`, on whatever a launcher runs it.

The checks serve the emulator, a GPU, and the planted bugs alike. Each compares all the memory that a kernel
could have written, bit by bit where the definition fixes every rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from pageturner.kernels.cuda.row_grids import OCTET
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.layout import AttentionBatch
from pageturner.kernels.reference import ReferenceOps
from support import row_kernels
from support.paged import make_batch
from support.row_kernels import bits

NUM_LAYERS = 3
LAYER = 1
LARGEST_SHARE_ROUNDED_OTHERWISE = 0.01
"""Of elements that pass through a float32 sum or exponential before they are rounded to 16 bits: seen are up
to 0.002."""
BELOW_FLOAT32 = 1e-30
"""silu(x) is -0 in float32 where e^-x is infinite there: for x < -88.7, of which it is some 1e-37."""

Rows = Literal["contiguous", "merged", "padded", "unaligned", "odd", "transposed"]
"""How rows lie in memory: slices of a merged projection; so, but no row at a multiple of 16 bytes, or rows an
odd number of elements apart; each head by itself, padded to a multiple of 16 bytes, or with the rows of one
head together and heads an odd number of elements apart."""


def normal(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def noise(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits, so that most are NaNs and infinities of no other place."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(dtype)


def lay_out(parts: Sequence[torch.Tensor], rows: Rows) -> list[torch.Tensor]:
    """[T, heads, head_dim] each. All but contiguous rows are surrounded by NaN."""
    if rows == "contiguous":
        return list(parts)
    if rows == "padded":
        return [_padded(part) for part in parts]
    if rows == "transposed":
        return [_head_by_head(part) for part in parts]
    num_rows, _, head_dim = parts[0].shape
    width = sum(part.shape[1] for part in parts) * head_dim
    padded = -(-width // OCTET) * OCTET
    stride = {"merged": width, "unaligned": padded + OCTET, "odd": padded + 3}[rows]
    first = 1 if rows == "unaligned" else 0
    memory = parts[0].new_full((num_rows, stride), torch.nan)
    merged = memory[:, first : first + width]
    merged.copy_(torch.cat([part.flatten(1) for part in parts], dim=1))
    starts = torch.tensor([0, *(part.shape[1] * head_dim for part in parts)]).cumsum(0).tolist()
    return [
        merged[:, start : start + part[0].numel()].view(part.shape)
        for start, part in zip(starts, parts, strict=False)
    ]


def _padded(part: torch.Tensor) -> torch.Tensor:
    *outer, head_dim = part.shape
    heads = part.new_full((*outer, -(-head_dim // OCTET) * OCTET), torch.nan)[..., :head_dim]
    return heads.copy_(part)


def _head_by_head(part: torch.Tensor) -> torch.Tensor:
    num_rows, num_heads, head_dim = part.shape
    memory = part.new_full((num_heads, num_rows * head_dim + 3), torch.nan)
    heads = memory[:, : num_rows * head_dim].view(num_heads, num_rows, head_dim)
    heads.copy_(part.transpose(0, 1))
    return heads.transpose(0, 1)


@dataclass(frozen=True)
class Heads:
    """The shape of one layer and its rows."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    num_rows: int = 21


def paged_rows(heads: Heads, dtype: torch.dtype) -> tuple[torch.Tensor, AttentionBatch]:
    """A pool [blocks, layers, ...] of noise, and rows that go to slots all over it; every fourth to none."""
    prompt = heads.num_rows - 2
    lengths = [(prompt, prompt), (1, heads.block_size), (1, heads.block_size + 1)]
    needs = [-(-seq_len // heads.block_size) for _, seq_len in lengths]
    num_blocks = sum(needs) + 2
    deck = iter(torch.randperm(num_blocks, generator=torch.Generator().manual_seed(5)).tolist())
    batch = make_batch(lengths, [[next(deck) for _ in range(need)] for need in needs], heads.block_size)
    batch.slot_mapping[3::4] = -1
    shape = (num_blocks, NUM_LAYERS, 2, heads.num_kv_heads, heads.block_size, heads.head_dim)
    return noise(*shape, dtype=dtype, seed=6), batch


def check_write_kv(launcher: Launcher, heads: Heads, dtype: torch.dtype, rows: Rows = "merged") -> None:
    """The whole pool, bit by bit: the rows' slots hold them and nothing else has changed."""
    pool, batch = paged_rows(heads, dtype)
    shape = (heads.num_rows, heads.num_kv_heads, heads.head_dim)
    key, value = noise(*shape, dtype=dtype, seed=1), noise(*shape, dtype=dtype, seed=2)
    expected = pool.clone()
    ReferenceOps().write_kv(key, value, expected[:, LAYER], batch)

    device = launcher.runtime.device
    pool = pool.to(device)
    key, value = lay_out([key.to(device), value.to(device)], rows)
    row_kernels.write_kv(launcher, key, value, pool[:, LAYER], batch.slot_mapping.to(device))
    assert torch.equal(bits(pool.cpu()), bits(expected))


def check_rope(
    launcher: Launcher, heads: Heads, dtype: torch.dtype, table_dtype: torch.dtype, rows: Rows = "merged"
) -> None:
    """Query and pool bit by bit: the roundings are part of the definition."""
    pool, batch = paged_rows(heads, dtype)
    query = normal(heads.num_rows, heads.num_heads, heads.head_dim, dtype=dtype, seed=1)
    key = normal(heads.num_rows, heads.num_kv_heads, heads.head_dim, dtype=dtype, seed=2)
    value = noise(*key.shape, dtype=dtype, seed=3)
    angles = normal(heads.num_rows, heads.head_dim, dtype=torch.float32, seed=4)
    cos, sin = angles.cos().to(table_dtype), angles.sin().to(table_dtype)
    # In the first row the halves and the tables are equal: the low half is exactly 0, unless the products
    # are rounded at different times.
    half = heads.head_dim // 2
    query[0, :, half:], key[0, :, half:], sin[0] = query[0, :, :half], key[0, :, :half], cos[0]
    expected_pool = pool.clone()
    expected = ReferenceOps().rope_and_write_kv(query, key, value, cos, sin, expected_pool[:, LAYER], batch)

    device = launcher.runtime.device
    pool = pool.to(device)
    query, key, value = lay_out([part.to(device) for part in (query, key, value)], rows)
    slots = batch.slot_mapping.to(device)
    rotated = row_kernels.rope_and_write_kv(
        launcher, query, key, value, cos.to(device), sin.to(device), pool[:, LAYER], slots
    )
    assert torch.equal(rotated.cpu(), expected)
    assert torch.equal(bits(pool.cpu()), bits(expected_pool))


def check_rms_norm(
    launcher: Launcher,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    residual: bool,
    rows: Rows = "contiguous",
) -> None:
    """The sum bit by bit; the norm but for few elements, and those by one rounding before the weight."""
    hidden = normal(*shape, dtype=dtype, seed=1)
    hidden[0, 0] *= 0  # a row of zeros: only epsilon is left
    hidden[1, 0] *= 1e-3  # epsilon is most of the mean
    hidden[-1, -1] *= 100
    weight = normal(shape[2], dtype=dtype, seed=2)
    added = normal(*shape, dtype=dtype, seed=3) if residual else None
    expected, expected_sum = ReferenceOps().rms_norm(hidden, weight, 1e-5, added)

    device = launcher.runtime.device
    (strided,) = lay_out([hidden.to(device)], rows)
    added = None if added is None else added.to(device)
    normed, summed = row_kernels.rms_norm(launcher, strided, weight.to(device), 1e-5, added)
    assert torch.equal(summed.cpu(), expected_sum)
    assert_rounded_alike(normed.cpu(), expected)


def check_rows_of_any_batch(launcher: Launcher, size: int, dtype: torch.dtype) -> None:
    """A row of rms_norm has its bits in any number of rows, with any strides, at any address."""
    hidden = normal(7, 1, size, dtype=dtype, seed=1).to(launcher.runtime.device)
    weight = normal(size, dtype=dtype, seed=2).to(launcher.runtime.device)
    whole, _ = row_kernels.rms_norm(launcher, hidden, weight, 1e-5)
    laid_out = [lay_out([hidden], rows)[0] for rows in get_args(Rows)]
    for start, stop in ((0, 1), (2, 5), (6, 7)):
        for rows in laid_out:
            part, _ = row_kernels.rms_norm(launcher, rows[start:stop], weight, 1e-5)
            assert torch.equal(part, whole[start:stop])


def check_silu_and_mul(
    launcher: Launcher, num_rows: int, size: int, dtype: torch.dtype, gap: int = 0
) -> None:
    """gap: elements between rows."""
    gate_up = normal(num_rows, 2 * size, dtype=dtype, seed=1)
    extremes = torch.tensor([0.0, -0.0, 88, -88, 89, -89, 1000, -1000]).to(dtype)[:size]
    gate_up[0, : len(extremes)] = extremes
    expected = ReferenceOps().silu_and_mul(gate_up)
    memory = torch.full((num_rows, 2 * size + gap), torch.nan, dtype=dtype)
    memory[:, gap : gap + 2 * size] = gate_up
    strided = memory.to(launcher.runtime.device)[:, gap : gap + 2 * size]
    assert_rounded_alike(row_kernels.silu_and_mul(launcher, strided).cpu(), expected)


def assert_rounded_alike(result: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits but for a few elements whose unrounded values lay at the middle between two."""
    kind = torch.finfo(expected.dtype)
    nothing = max(BELOW_FLOAT32, 2 * kind.eps * kind.smallest_normal)
    torch.testing.assert_close(result, expected, rtol=2 * kind.eps, atol=nothing)
    different = int((result != expected).sum())
    most = max(1, int(LARGEST_SHARE_ROUNDED_OTHERWISE * expected.numel()))
    assert different <= most, f"{different} of {expected.numel()} are rounded otherwise"


def far_memory(file: Path, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of which only touched pages are there: to see addresses of more than 32 bits."""
    return torch.from_file(str(file), shared=True, size=num_elements, dtype=dtype)
