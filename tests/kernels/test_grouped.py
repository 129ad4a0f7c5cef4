"""Weights in groups: what they are worth, how they are joined, and the order that products read."""

from __future__ import annotations

import pytest
import torch
from support.grouped import KINDS, Kind, grouped_weight

from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.grouped import GroupedWeight, concatenate
from pageturner.kernels.packed import ALIGNMENT, TILE, PackedWeight, check_mlp, pack, rows_of, unpack


def assert_equal(found: GroupedWeight, wanted: GroupedWeight) -> None:
    assert found.group == wanted.group
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.scales, wanted.scales)
    if wanted.offsets is None:
        assert found.offsets is None
    else:
        assert found.offsets is not None
        assert torch.equal(found.offsets, wanted.offsets)


def test_an_element_is_scale_times_code_plus_offset() -> None:
    weight = grouped_weight(KINDS["Q4_1"], 5, 96)
    assert weight.offsets is not None
    dequantised = weight.dequantised()
    for output, index in ((0, 0), (3, 31), (3, 32), (4, 95)):
        scale, offset = (float(values[output, index // 32]) for values in (weight.scales, weight.offsets))
        assert float(dequantised[output, index]) == pytest.approx(
            scale * float(weight.codes[output, index]) + offset, rel=1e-6
        )


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("shape", [(1, 32), (16, 64), (33, 96), (50, 576)])
def test_packing_keeps_every_number(kind: Kind, shape: tuple[int, int]) -> None:
    weight = grouped_weight(kind, *shape)
    packed = pack(weight)
    assert packed.buffer.data_ptr() % ALIGNMENT == 0
    assert packed.layout.tile_bytes % ALIGNMENT == 0
    assert_equal(unpack(packed), weight)


def test_the_order_of_bytes_is_as_documented() -> None:
    weight = grouped_weight(KINDS["Q4_1"], 40, 96)
    packed = pack(weight)
    output, index = 37, 75  # tile 2, lane 5; group 2, chunk 2 of its 8, byte 3
    tile = packed.buffer[2 * packed.layout.tile_bytes :]
    byte = int(tile[((2 * 4 + 2) * TILE + 5) * 4 + 3])
    assert byte & 15 == weight.codes[output, index]
    assert byte >> 4 == weight.codes[output, index + 16]  # four chunks further, in the high half
    scales = tile[packed.layout.codes_bytes :][: packed.layout.scales_bytes].view(torch.float16)
    assert scales[2 * TILE + 5] == weight.scales[output, 2]

    weight = grouped_weight(KINDS["Q8_0"], 40, 96)
    tile = pack(weight).buffer[2 * pack(weight).layout.tile_bytes :].view(torch.int8)
    assert tile[((2 * 8 + 2) * TILE + 5) * 4 + 3] == weight.codes[output, index]


def test_outputs_that_fill_up_a_tile_are_zero() -> None:
    weight = grouped_weight(KINDS["Q4_1"], 17, 32)
    packed = pack(weight)
    last = packed.buffer[packed.layout.tile_bytes :]
    assert not last[: packed.layout.codes_bytes].view(-1, TILE, 4)[:, 1:].any()
    assert not last[packed.layout.codes_bytes :].view(torch.float16).view(-1, TILE)[:, 1:].any()


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        ("Q4_1", "Q4_1", Kind(4, 32, torch.float16, True)),
        ("Q4_1", "int4", Kind(4, 32, torch.float16, True)),
        ("Q4_K", "Q6_K", Kind(8, 16, torch.float32, True)),
        ("Q8_0", "Q4_1", Kind(8, 32, torch.float16, True)),
    ],
)
def test_joining_widens_without_loss(first: str, second: str, wanted: Kind) -> None:
    weights = [grouped_weight(KINDS[first], 20, 64), grouped_weight(KINDS[second], 7, 64, seed=1)]
    joined = concatenate(weights)
    found = Kind(joined.bits, joined.group, joined.scales.dtype, joined.offsets is not None)
    assert found == wanted
    assert torch.equal(joined.dequantised(), torch.cat([weight.dequantised() for weight in weights]))


def test_weights_of_different_inputs_are_not_joined() -> None:
    kind = KINDS["Q4_1"]
    with pytest.raises(KernelArgumentError, match=r"of \[32, 64\] inputs"):
        concatenate([grouped_weight(kind, 4, 64), grouped_weight(kind, 4, 32)])


CODES = torch.zeros(4, 64, dtype=torch.uint8)
SCALES = torch.ones(4, 2, dtype=torch.float16)


@pytest.mark.parametrize(
    ("codes", "scales", "offsets", "group", "message"),
    [
        (CODES.int(), SCALES, None, 32, "codes is int32"),
        (CODES[0], SCALES, None, 32, r"codes is uint8\[64\]"),
        (CODES[:0], SCALES[:0], None, 32, "codes is uint8"),
        (CODES[:, :40], SCALES, None, 32, "whole groups"),
        (CODES, SCALES, None, 64, "whole groups"),
        (CODES + 16, SCALES, None, 32, "codes is up to 16"),
        (CODES, SCALES.double(), None, 32, "scales is float64"),
        (CODES, SCALES[:3], None, 32, "scales is float16"),
        (CODES, SCALES * torch.inf, None, 32, "scales is not finite"),
        (CODES, SCALES, SCALES * torch.nan, 32, "offsets is not finite"),
        (CODES, SCALES, SCALES.float(), 32, "offsets is float32"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, group: int, message: str
) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        GroupedWeight(codes, scales, offsets, group)


def test_a_buffer_of_another_size_and_a_bias_of_another_shape_are_refused() -> None:
    packed = pack(grouped_weight(KINDS["Q4_1"], 20, 64))
    with pytest.raises(KernelArgumentError, match="buffer"):
        PackedWeight(packed.layout, packed.buffer[1:])
    with pytest.raises(KernelArgumentError, match="buffer is strided"):
        PackedWeight(packed.layout, packed.buffer.repeat(2)[::2])
    with pytest.raises(KernelArgumentError, match="bias"):
        PackedWeight(packed.layout, packed.buffer, torch.zeros(19))
    with pytest.raises(KernelArgumentError, match="gate_up"):
        check_mlp(packed.layout, packed.layout)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_rows_of_an_embedding_are_those_of_the_whole(kind: Kind) -> None:
    weight = grouped_weight(kind, 37, 96)
    outputs = torch.tensor([36, 0, 15, 16, 16, 31])
    assert torch.equal(rows_of(pack(weight), outputs), weight.dequantised()[outputs])
