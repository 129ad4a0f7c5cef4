"""Parts of packed weights: the groups of the whole, and in products the bits of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support.grouped import KINDS, grouped_weight

from pageturner.kernels.packed import ALIGNMENT, PackedWeight, pack, take_outputs, unpack
from pageturner.kernels.reference import ReferenceQuantisedOps

OUT, IN = 80, 128


def packed(kind: str, *, bias: bool = False) -> PackedWeight:
    return pack(grouped_weight(KINDS[kind], OUT, IN), torch.arange(float(OUT)) if bias else None)


def assert_same_groups(part: PackedWeight, outputs: Sequence[int], whole: PackedWeight) -> None:
    found, expected, chosen = unpack(part), unpack(whole), list(outputs)
    assert (found.group, found.bits) == (expected.group, expected.bits)
    assert torch.equal(found.codes, expected.codes[chosen])
    assert torch.equal(found.scales, expected.scales[chosen])
    if expected.offsets is None:
        assert found.offsets is None
    else:
        assert found.offsets is not None
        assert torch.equal(found.offsets, expected.offsets[chosen])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "outputs", [(range(16, 48), range(64, 80)), (range(3, 20), range(20, 21), range(79, 80))]
)
def test_outputs_are_taken_with_their_groups_and_bias(kind: str, outputs: tuple[range, ...]) -> None:
    """By whole tiles, and from within them."""
    whole = packed(kind, bias=True)
    part = take_outputs(whole, outputs)
    chosen = [output for run in outputs for output in run]
    assert_same_groups(part, chosen, whole)
    assert part.bias is not None
    assert part.bias.tolist() == chosen
    rows = torch.randn(3, IN, generator=torch.Generator().manual_seed(1))
    ops = ReferenceQuantisedOps()
    assert torch.equal(ops.linear(rows, part), ops.linear(rows, whole)[:, chosen])


def test_parts_lie_where_the_caller_wants_them() -> None:
    memory, used = torch.zeros(1 << 16, dtype=torch.uint8), 0

    def allocate(num_bytes: int) -> torch.Tensor:
        nonlocal used
        used += num_bytes
        return memory[used - num_bytes : used]

    whole = packed("Q8_0")
    first, second = (take_outputs(whole, (part,), allocate) for part in (range(16), range(20, 60)))
    assert second.buffer.data_ptr() - first.buffer.data_ptr() == first.layout.num_bytes
    assert used % ALIGNMENT == 0
    assert_same_groups(first, range(16), whole)
    assert_same_groups(second, range(20, 60), whole)
