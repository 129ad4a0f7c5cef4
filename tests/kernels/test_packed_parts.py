"""Parts of packed weights: the groups of the whole, and in products the bits of the whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.grouped import KINDS, grouped_weight

from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.grouped import GroupedWeight
from pageturner.kernels.packed import ALIGNMENT, PackedWeight, pack, take_inputs, take_outputs, unpack
from pageturner.kernels.reference import ReferenceQuantisedOps

OUT, IN = 80, 128


def packed(kind: str, *, bias: bool = False) -> PackedWeight:
    return pack(grouped_weight(KINDS[kind], OUT, IN), torch.arange(float(OUT)) if bias else None)


def assert_same_groups(
    part: PackedWeight, outputs: Sequence[int], inputs: range, whole: PackedWeight
) -> None:
    found, expected = unpack(part), unpack(whole)
    group = expected.group
    groups = range(inputs.start // group, inputs.stop // group)
    assert (found.group, found.bits) == (group, expected.bits)
    assert torch.equal(found.codes, expected.codes[list(outputs)][:, list(inputs)])
    assert torch.equal(found.scales, expected.scales[list(outputs)][:, list(groups)])
    if expected.offsets is None:
        assert found.offsets is None
    else:
        assert found.offsets is not None
        assert torch.equal(found.offsets, expected.offsets[list(outputs)][:, list(groups)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "outputs", [(range(16, 48), range(64, 80)), (range(3, 20), range(20, 21), range(79, 80))]
)
def test_outputs_are_taken_with_their_groups_and_bias(kind: str, outputs: tuple[range, ...]) -> None:
    """By whole tiles, and from within them."""
    whole = packed(kind, bias=True)
    part = take_outputs(whole, outputs)
    chosen = [output for run in outputs for output in run]
    assert_same_groups(part, chosen, range(IN), whole)
    assert part.bias is not None
    assert part.bias.tolist() == chosen
    rows = torch.randn(3, IN, generator=torch.Generator().manual_seed(1))
    ops = ReferenceQuantisedOps()
    assert torch.equal(ops.linear(rows, part), ops.linear(rows, whole)[:, chosen])


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_taken_by_whole_groups(kind: str) -> None:
    whole = packed(kind, bias=True)
    part = take_inputs(whole, range(32, 96))
    assert_same_groups(part, range(OUT), range(32, 96), whole)
    assert part.bias is whole.bias
    for inputs in (range(8, 96), range(32, 90), range(32, 32)):
        with pytest.raises(KernelArgumentError, match="whole groups"):
            take_inputs(whole, inputs)


def test_parts_lie_where_the_caller_wants_them() -> None:
    memory, used = torch.zeros(1 << 16, dtype=torch.uint8), 0

    def allocate(num_bytes: int) -> torch.Tensor:
        nonlocal used
        used += num_bytes
        return memory[used - num_bytes : used]

    whole = packed("Q8_0")
    first, second = take_outputs(whole, (range(16),), allocate), take_inputs(whole, range(32), allocate)
    assert second.buffer.data_ptr() - first.buffer.data_ptr() == first.layout.num_bytes
    assert used % ALIGNMENT == 0
    assert_same_groups(first, range(16), range(IN), whole)


@given(cuts=st.lists(st.integers(0, 8), min_size=0, max_size=3), seed=st.integers(0, 1000))
def test_parts_of_inputs_add_up_exactly_where_every_sum_is_exact(cuts: list[int], seed: int) -> None:
    """With scales that are powers of two of like size, no addition rounds: then the order does not matter."""
    generator = torch.Generator().manual_seed(seed)
    group, groups = 32, 8
    codes = torch.randint(-8, 9, (16, group * groups), generator=generator).to(torch.int8)
    scales = 2.0 ** torch.randint(-3, 1, (16, groups), generator=generator)
    whole = pack(GroupedWeight(codes, scales.half(), None, group))
    rows = torch.randint(-127, 128, (5, group * groups), generator=generator).float()
    rows[:, ::group] = 127  # so that a row's scale is one, and its codes are its numbers
    ops = ReferenceQuantisedOps()
    bounds = [0, *sorted(cuts), groups]
    parts = [range(begin * group, end * group) for begin, end in itertools.pairwise(bounds)]
    total = torch.zeros(5, 16)
    for part in filter(len, parts):
        total += ops.linear(rows[:, part.start : part.stop], take_inputs(whole, part))
    assert torch.equal(total, ops.linear(rows, whole))
    assert torch.equal(total, rows @ unpack(whole).dequantised().T)
