"""Matrix products: weights packed once for oneDNN, and rows whose bits do not depend on their batch.

oneDNN's packed weights save the reordering that F.linear does on every call, about half the time of a
small batch. The two operators are private to torch, so they are looked up and tried once a dtype;
F.linear stands in where they are missing or wrong.

A product is *row-invariant* if a row's bits depend neither on how many rows it is multiplied with, nor on
its place among them. No library promises that, so for each shape it is measured for which numbers of rows
this machine keeps it, and a deterministic Linear splits and pads its rows into those numbers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812 - the name every reader of torch expects

from pageturner.service.errors import ModelError

Product = Callable[[torch.Tensor], torch.Tensor]

BASE_ROWS = 8
"""The number of rows whose bits the others must have; below it some machines add up in another order."""
HEAD_ROW_TILES = (1, 2, 4, *range(BASE_ROWS, 65, 8))
ROW_TILES = (*HEAD_ROW_TILES, *range(128, 513, 64))
_PROBED_ROWS = 16
_PROBED_WEIGHT_ROWS = 256
_WORTH_PADDING = 8
"""Up to so many rows of padding cost less than a second pass over the weights."""


class Linear:
    """y = x W^T + b, [rows, in] -> [rows, out], for one weight.

    row_tiles: empty multiplies all rows at once. Else rows go in pieces of these sizes (ascending), the
    last one padded with zeros.
    """

    def __init__(self, multiply: Product, row_tiles: Sequence[int] = ()) -> None:
        self._multiply = multiply
        self._row_tiles = row_tiles

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._row_tiles or x.shape[0] in self._row_tiles:
            return self._multiply(x)
        pieces = []
        start = 0
        for tile in tiles_of(x.shape[0], self._row_tiles):
            rows = x[start : start + tile]
            num_rows = rows.shape[0]
            if num_rows < tile:
                rows = F.pad(rows, (0, 0, 0, tile - num_rows))
            pieces.append(self._multiply(rows)[:num_rows])
            start += tile
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class LinearFactory:
    """Makes the Linears of one model. Deterministic ones are probed, once a shape."""

    def __init__(self, *, deterministic: bool) -> None:
        self._deterministic = deterministic
        self._row_tiles: dict[tuple[int, int, torch.dtype, bool], tuple[int, ...]] = {}

    def __call__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        candidates: Sequence[int] = ROW_TILES,
    ) -> Linear:
        """For a weight [out, in] and a bias [out]. candidates: numbers of rows worth multiplying at once.

        Raises ModelError if this machine cannot multiply rows of this shape deterministically.
        """
        if not self._deterministic:
            return Linear(product(weight, bias))
        out_features, in_features = weight.shape
        key = (out_features, in_features, weight.dtype, bias is not None)
        if key not in self._row_tiles:
            self._row_tiles[key] = probe_row_invariance(
                product,
                (out_features, in_features),
                weight.dtype,
                candidates,
                with_bias=bias is not None,
                device=weight.device,
            )
        return Linear(product(weight, bias), self._row_tiles[key])


def tiles_of(num_rows: int, row_tiles: Sequence[int]) -> list[int]:
    """Sizes, out of row_tiles (ascending), of the pieces that cover num_rows; only the last exceeds them."""
    sizes = []
    while num_rows > 0:
        holding = next((tile for tile in row_tiles if tile >= num_rows), None)
        fitting = [tile for tile in row_tiles if tile <= num_rows]
        if holding is not None and (not fitting or holding - num_rows < _WORTH_PADDING):
            sizes.append(holding)
        else:
            sizes.append(fitting[-1])
        num_rows -= sizes[-1]
    return sizes


def probe_row_invariance(
    make: Callable[[torch.Tensor, torch.Tensor | None], Product],
    shape: tuple[int, int],
    dtype: torch.dtype,
    candidates: Sequence[int],
    *,
    with_bias: bool = False,
    device: torch.device | None = None,
) -> tuple[int, ...]:
    """Those candidate numbers of rows in which every row has the bits it has among BASE_ROWS.

    make: weight, bias -> product, of which one with a weight of `shape` is tried. Its exact results are all
    zero, so what comes out is rounding alone, and another order of additions shows in nearly every
    number. (Ordinary results hide it: a bfloat16 swallows all but one in thousands of such differences.)
    Every place of every candidate is looked at. Raises ModelError if a row's place matters even among
    BASE_ROWS.
    """
    out_features, in_features = shape
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(in_features, generator=generator)

    def cancelling(rows: int, sign: int) -> torch.Tensor:
        """[rows, in]: each column has a partner, equal in weights and opposite in inputs."""
        half = torch.randn(rows, in_features // 2, generator=generator)
        spare = torch.zeros(rows, in_features % 2)
        return torch.cat((half, sign * half, spare), dim=1)[:, order].to(device, dtype)

    some = cancelling(min(out_features, _PROBED_WEIGHT_ROWS), 1)
    weight = some.repeat(-(-out_features // some.shape[0]), 1)[:out_features].contiguous()
    multiply = make(weight, torch.zeros(out_features, dtype=dtype, device=device) if with_bias else None)
    x = cancelling(max(_PROBED_ROWS, *candidates), -1)

    def by(rows: int, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([multiply(piece) for piece in torch.split(x, rows)])

    expected = by(BASE_ROWS, x)
    turned = torch.cat([multiply(piece.flip(0)).flip(0) for piece in torch.split(x, BASE_ROWS)])
    if not torch.equal(expected, turned):
        raise ModelError(f"deterministic: {dtype} products on this machine depend on a row's place")
    probed = {rows: max(rows, _PROBED_ROWS // rows * rows) for rows in candidates}
    return tuple(
        rows
        for rows in sorted(candidates)
        if torch.equal(by(rows, x[: probed[rows]]), expected[: probed[rows]])
    )


def product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """x -> x W^T + b with the weight packed where torch can: on the CPU."""
    if weight.device.type != "cpu" or not _packing_works(weight.dtype):
        return lambda x: F.linear(x, weight, bias)
    return _packed(weight, bias)


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def run(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = multiply(x, packed, bias, "none", [], "")
        return result

    return run


@cache
def _packing_works(dtype: torch.dtype) -> bool:
    """Whether torch's private operators are there, take this dtype, and agree with F.linear."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(16, 32, generator=generator).to(dtype) for _ in range(2))
    bias = torch.randn(16, generator=generator).to(dtype)
    try:
        found = _packed(weight, bias)(x)
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    return torch.allclose(found.float(), F.linear(x, weight, bias).float(), rtol=2e-2, atol=2e-2)
