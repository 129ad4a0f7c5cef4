"""What every implementation of quantised products must give: the bits of the definition."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from pageturner.kernels.grouped import GroupedWeight
from pageturner.kernels.interface import QuantisedOps
from pageturner.kernels.known_tokens import KnownTokens, TokenScores
from pageturner.kernels.packed import PackedWeight, pack
from pageturner.kernels.reference import ReferenceQuantisedOps
from pageturner.kernels.reference_scores import bound_of, token_scores
from support.grouped import KINDS, Kind, grouped_weight

Check = Callable[[QuantisedOps], None]
REFERENCE = ReferenceQuantisedOps()


def random_rows(num_rows: int, in_features: int, seed: int = 0) -> torch.Tensor:
    """Of very different sizes from group to group, with groups of zeros."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randn(num_rows, in_features // 16, 16, generator=generator)
    sizes = torch.exp(2 * torch.randn(num_rows, in_features // 16, 1, generator=generator))
    sizes[torch.rand(sizes.shape, generator=generator) < 0.05] = 0
    return (groups * sizes).flatten(1)


def assert_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal everywhere, NaN where the other is."""
    assert found.shape == wanted.shape
    different = (found != wanted) & ~(found.isnan() & wanted.isnan())
    assert not different.any(), f"{int(different.sum())} of {found.numel()} differ"


def check_linear(ops: QuantisedOps, rows: torch.Tensor, packed: PackedWeight) -> None:
    assert_bits(ops.linear(rows, packed), REFERENCE.linear(rows, packed))


def shapes(kind: Kind) -> Check:
    """Widths of one group and of many, whole tiles and others, one row and several blocks of them."""

    def check(ops: QuantisedOps) -> None:
        for num_rows, out_features, in_features in (
            (1, 50, 576), (2, 16, 32), (5, 33, 96), (17, 64, 1536), (70, 21, 64), (0, 16, 32),
        ):  # fmt: skip
            bias = torch.linspace(-1, 1, out_features) if out_features % 2 else None
            packed = pack(grouped_weight(kind, out_features, in_features), bias)
            check_linear(ops, random_rows(num_rows, in_features), packed)

    return check


def row_counts(ops: QuantisedOps) -> None:
    for kind in ("Q4_1", "Q8_0"):
        packed = pack(grouped_weight(KINDS[kind], 40, 64))
        for num_rows in (*range(1, 19), 31, 33):
            check_linear(ops, random_rows(num_rows, 64, seed=num_rows), packed)


def extreme_codes(ops: QuantisedOps) -> None:
    """The largest sums there are: nothing may saturate or wrap."""
    rows = torch.ones(6, 96)
    rows[1] = -1
    rows[2, ::2] = -1
    rows[3, 1::2] = -1
    rows[4] = torch.linspace(-1, 1, 96)
    rows[5, ::4] = 0
    for bits, dtype, codes in (
        (4, torch.uint8, (15, 0, (15, 0), (0, 15))),
        (8, torch.int8, (-128, 127, (-128, 127), (127, -128), (-128, -127))),
    ):
        for code in codes:
            pattern = torch.tensor(code if isinstance(code, tuple) else (code, code), dtype=dtype)
            for group in (32, 16):
                scales = torch.ones(18, 96 // group, dtype=torch.float16)
                offsets = -scales if bits == 4 else None
                weight = GroupedWeight(pattern.repeat(18, 48), scales, offsets, group)
                check_linear(ops, rows, pack(weight))


def extreme_scales(ops: QuantisedOps) -> None:
    """Scales that are subnormal, zero and the largest; rows too small and too large to have a scale."""
    rows = random_rows(6, 96)
    for row, size in enumerate((1e-30, 1e-37, 1e-40, 1e-45, 1e30)):
        rows[row] *= size
    for dtype, sizes in (
        (torch.float16, (6e-8, 3e-5, 0.0, 65504.0, -65504.0, -6e-8)),
        (torch.float32, (1e-45, 1e-39, 0.0, 3e38, -3e38, -1e-45)),
    ):
        for name in ("Q4_1", "Q8_0"):
            weight = grouped_weight(KINDS[name], 18, 96)
            scales = torch.tensor(sizes, dtype=dtype).repeat(9).view(18, 3)
            offsets = None if weight.offsets is None else scales.flip(0)
            check_linear(ops, rows, pack(replace(weight, scales=scales, offsets=offsets)))


def not_finite(ops: QuantisedOps) -> None:
    """NaN in every output of the row, and in no other."""
    for kind in KINDS.values():
        packed = pack(grouped_weight(kind, 20, 96))
        rows = random_rows(12, 96)
        for row, value in ((1, math.inf), (4, -math.inf), (9, math.nan)):
            rows[row, 5 * row] = value
        found = ops.linear(rows, packed)
        assert found.isnan().all(1).nonzero().flatten().tolist() == [1, 4, 9]
        assert_bits(found, REFERENCE.linear(rows, packed))


def alignment(ops: QuantisedOps) -> None:
    """A weight at any byte, rows at any float, apart by any stride, and transposed."""
    for kind in KINDS.values():
        packed = pack(grouped_weight(kind, 33, 64))
        wide = random_rows(9, 96)
        for shift in (1, 2, 36):
            moved = torch.zeros(len(packed.buffer) + shift, dtype=torch.uint8)
            moved[shift:] = packed.buffer
            found = ops.linear(wide[:, 3:67], replace(packed, buffer=moved[shift:]))
            assert_bits(found, REFERENCE.linear(wide[:, 3:67], packed))
        check_linear(ops, random_rows(64, 16).T, packed)


def batch_mates(ops: QuantisedOps) -> None:
    """A row's bits are the same alone, among others and by any number of threads."""
    packed = pack(grouped_weight(KINDS["Q4_1"], 700, 576))
    rows = random_rows(70, 576)
    whole = ops.linear(rows, packed)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for begin, end in ((0, 1), (0, 70), (3, 12), (60, 70), (69, 70)):
                assert_bits(ops.linear(rows[begin:end], packed), whole[begin:end])
    finally:
        torch.set_num_threads(before)


def many_rows(ops: QuantisedOps) -> None:
    """More than are taken through a tile at once."""
    packed = pack(grouped_weight(KINDS["Q4_1"], 20, 1536))
    # Others each time: a row that isn't written keeps what the memory held, a former run's right values.
    rows = random_rows(300, 1536) * (1 + torch.rand(1))
    check_linear(ops, rows, packed)


@dataclass(frozen=True)
class Mlp:
    """Operands of the fused forms."""

    gate_up: PackedWeight
    down: PackedWeight
    norm: torch.Tensor
    hidden: torch.Tensor
    residual: torch.Tensor


def make_mlp(up: Kind, down: Kind, num_rows: int, size: int, inner: int) -> Mlp:
    return Mlp(
        gate_up=pack(grouped_weight(up, 2 * inner, size), torch.linspace(-1, 1, 2 * inner)),
        down=pack(grouped_weight(down, size, inner, seed=1)),
        norm=torch.linspace(0.5, 1.5, size),
        hidden=random_rows(num_rows, size, seed=2),
        residual=random_rows(num_rows, size, seed=3),
    )


MLPS = {
    "one row": ("Q4_1", "Q4_1", 1, 576, 1536),
    "no row": ("Q4_1", "Q4_1", 0, 64, 32),
    "one group": ("Q4_1", "Q4_1", 3, 32, 32),
    "groups of 16 behind": ("Q4_K", "Q6_K", 17, 96, 48),
    "groups of 16 before": ("Q6_K", "Q8_0", 9, 80, 96),
    "many rows": ("Q8_0", "Q4_1", 300, 1536, 64),
}


def fused(ops: QuantisedOps) -> None:
    """Near the definition: the order of a norm's sum and the last bit of an exponential are free, and a code
    that was near a tie is then another."""
    for up, down, *sizes in MLPS.values():
        mlp = make_mlp(KINDS[str(up)], KINDS[str(down)], *map(int, sizes))
        for residual in (None, mlp.residual):
            norm = (mlp.hidden, mlp.norm, 1e-5)
            for (found, left), (wanted, summed) in (
                (
                    ops.norm_linear(*norm, mlp.gate_up, residual),
                    REFERENCE.norm_linear(*norm, mlp.gate_up, residual),
                ),
                (
                    ops.norm_mlp(*norm, mlp.gate_up, mlp.down, residual),
                    REFERENCE.norm_mlp(*norm, mlp.gate_up, mlp.down, residual),
                ),
            ):
                assert_bits(left, summed)
                assert found.shape == wanted.shape
                if len(found):
                    assert (found - wanted).abs().max() <= 0.01 * wanted.abs().max()


@dataclass(frozen=True)
class Scored:
    """Operands of `norm_scores`."""

    head: PackedWeight
    norm: torch.Tensor
    hidden: torch.Tensor
    residual: torch.Tensor
    known: KnownTokens

    def scores(self, ops: QuantisedOps) -> TokenScores:
        return ops.norm_scores(self.hidden, self.norm, 1e-5, self.head, self.known, self.residual)

    def check(self, ops: QuantisedOps) -> None:
        """By definition, of the logits that the same operations give."""
        logits, _ = ops.norm_linear(self.hidden, self.norm, 1e-5, self.head, self.residual)
        found, wanted = self.scores(ops), token_scores(logits, self.known)
        for some, right in (
            (found.logprobs, wanted.logprobs),
            (found.top_logprobs, wanted.top_logprobs),
        ):
            assert torch.equal(some.isnan(), right.isnan())
            near = (some == right) | ((some - right).abs() <= bound_of(right)) | right.isnan()
            assert near.all(), f"off by up to {(some - right)[~near].abs().max()}"
        finite = ~wanted.top_logprobs.isnan()
        assert torch.equal(found.top_ids[finite], wanted.top_ids[finite])


def make_scored(
    kind: str, vocab_size: int, counts: Sequence[int], num_top: int, size: int = 64, seed: int = 0
) -> Scored:
    """counts: tokens that each row scores."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    ids = torch.randint(0, vocab_size, (int(starts[-1]),), generator=generator).int()
    bias = torch.linspace(-3, 3, vocab_size) if vocab_size % 2 else None
    return Scored(
        head=pack(grouped_weight(KINDS[kind], vocab_size, size, seed=seed), bias),
        norm=torch.linspace(0.5, 1.5, size),
        hidden=random_rows(len(counts), size, seed=seed + 2),
        residual=random_rows(len(counts), size, seed=seed + 3),
        known=KnownTokens(starts, ids, num_top),
    )


def known_tokens(ops: QuantisedOps) -> None:
    """One block of outputs and many, whole and others; rows that score one token, none and many."""
    for kind, vocab_size, counts, num_top in (
        ("Q8_0", 50, (1,) * 7, 0),
        ("Q4_1", 128, (1, 0, 9), 1),
        ("Q8_0", 129, (1,) * 3, 2),
        ("Q6_K", 2048, (2, 1), 20),
        ("Q8_0", 5001, (1, 40, 0, 1, 1, 3), 5),
        ("Q4_1", 4, (2, 2), 20),
        ("Q8_0", 40, (), 1),
    ):
        make_scored(kind, vocab_size, counts, num_top).check(ops)


def many_scored_rows(ops: QuantisedOps) -> None:
    """More than are taken through a block at once, to each token its own row."""
    make_scored("Q8_0", 2200, (1,) * 320, 3, size=1536).check(ops)


def equal_likelihoods(ops: QuantisedOps) -> None:
    """Of equals the lowest ids come first, across vectors, blocks and panels of outputs."""
    scored = make_scored("Q8_0", 4999, (1, 1), 9)
    weight = grouped_weight(KINDS["Q8_0"], 4999, 64)
    steps = torch.zeros(4999)
    steps[[4998, 4900, 2049, 2048, 2047, 640, 127, 128, 3]] = 7.0
    zeros = pack(replace(weight, codes=torch.zeros_like(weight.codes)), steps)
    replace(scored, head=zeros).check(ops)
    replace(scored, head=replace(zeros, bias=torch.full((4999,), -2.5))).check(ops)


def impossible_tokens(ops: QuantisedOps) -> None:
    """A bias of -inf is a logit like any other; +inf, NaN and a row of nothing but -inf have no scores."""
    scored = make_scored("Q8_0", 301, (3, 1, 200), 4)
    for ids, value in (
        (slice(0, 128), -math.inf),
        (slice(5, 300), -math.inf),
        (slice(0, 301), -math.inf),
        (slice(300, 301), math.inf),
        (slice(130, 131), math.nan),
    ):
        bias = torch.linspace(-3, 3, 301)
        bias[ids] = value
        replace(scored, head=replace(scored.head, bias=bias)).check(ops)
    hidden = scored.hidden.clone()
    hidden[1, 7] = math.nan
    replace(scored, hidden=hidden).check(ops)


def far_likelihoods(ops: QuantisedOps) -> None:
    """Logits so far apart that exponentials of most vanish, or would overflow without a maximum."""
    for factor in (1e-3, 100.0, 1e4):
        scored = make_scored("Q8_0", 1500, (1, 2), 3)
        replace(scored, norm=scored.norm * factor).check(ops)


def scored_alone(ops: QuantisedOps) -> None:
    """A row's scores are the same bits alone, among others and by any number of threads."""
    scored = make_scored("Q8_0", 3000, tuple(1 + row % 3 for row in range(70)), 4, size=576)
    whole = scored.scores(ops)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for begin, end in ((0, 1), (0, 70), (3, 12), (69, 70)):
                part = replace(
                    scored,
                    hidden=scored.hidden[begin:end],
                    residual=scored.residual[begin:end],
                    known=scored.known.of_rows(begin, end),
                ).scores(ops)
                first, last = scored.known.starts[[begin, end]].tolist()
                assert_bits(part.logprobs, whole.logprobs[first:last])
                assert_bits(part.top_logprobs, whole.top_logprobs[begin:end])
                assert torch.equal(part.top_ids, whole.top_ids[begin:end])
    finally:
        torch.set_num_threads(before)


CHECKS: dict[str, Check] = {
    **{f"shapes of {name}": shapes(kind) for name, kind in KINDS.items()},
    "row counts": row_counts,
    "extreme codes": extreme_codes,
    "extreme scales": extreme_scales,
    "not finite": not_finite,
    "alignment": alignment,
    "batch mates": batch_mates,
    "many rows": many_rows,
    "fused": fused,
    "known tokens": known_tokens,
    "many scored rows": many_scored_rows,
    "equal likelihoods": equal_likelihoods,
    "impossible tokens": impossible_tokens,
    "far likelihoods": far_likelihoods,
    "scored alone": scored_alone,
}
