"""Bugs planted in a copy of the quantised products' source, each caught by the named differential test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.machines import MACHINES, has
from support.ops import cpu_cache_dir
from support.planting import BuggyLibrary, ExpressionBug
from support.quantised_checks import CHECKS

from pageturner.kernels.cpu.quantised_ops import CpuQuantisedOps

Q4_1, Q8_0 = "shapes of Q4_1", "shapes of Q8_0"
BUGS: dict[str, tuple[ExpressionBug, str, str | None]] = {
    # name: bug, check, the machine in whose code it is (None: in all)
    name: (ExpressionBug(file, right, wrong), check, machine)
    for name, file, right, wrong, check, machine in (
        (
            "a dropped minimum", "products.h",
            "fma(offset, rows[row].shift - f32xW{}, totals[row])", "totals[row]", Q4_1, None,
        ),
        (
            "a scale off by one group", "products.h",
            "tile.scales + group * LANES + part", "tile.scales + (group ? group - 1 : 0) * LANES + part",
            Q4_1, None,
        ),
        (
            "every tile's bias is the first", "products.h",
            "weight.bias + index * LANES", "weight.bias", Q4_1, None,
        ),
        (
            "every block of rows is the first", "products.h",
            "first + std::int64_t{begin} * groups", "first + std::int64_t{0} * groups", "row counts", None,
        ),
        (
            "every stretch of rows is the first", "products.h",
            "item / slices * together", "item * 0 * together", "many rows", None,
        ),
        ("a wrong nibble", "dot.h", "both >> 4 & 0x0f0f", "both & 0x0f0f", Q4_1, None),
        (
            "subnormal scales are taken for normal", "simd.h",
            "reinterpret_cast<Floats>((bits & 0x7fff) << 13) * 0x1p112f",
            "reinterpret_cast<Floats>(((bits & 0x7fff) << 13) + (112 << 23))", "extreme scales", None,
        ),
        (
            "codes are cut, not rounded", "quantise.h",
            "reinterpret_cast<Ints>(x[part] * inverse + 12582912.0f) - 0x4b400000",
            "__builtin_convertvector(x[part] * inverse, Ints)", Q4_1, None,
        ),
        ("a subnormal scale is used", "quantise.h", "scale >= FLT_MIN", "scale > 0", "extreme scales", None),
        (
            "a block's sum is by another's maximum", "scores.h",
            "exp(load(block_largest + i) - splat(anchor))", "exp(splat(0.0f))", "known tokens", None,
        ),
        (
            "blocks are added up where they are full", "scores.h",
            "outputs < BLOCK", "false", "known tokens", None,
        ),
        (
            "every known token is of the panel's first row", "scores.h",
            "known.logprobs[i] = logits[known.token_ids[i] - output]",
            "known.logprobs[i] = logits[known.token_ids[i] - output - std::int64_t{row - begin} * BLOCK]",
            "many scored rows", None,
        ),
        (
            "of equals the last one stays", "scores.h",
            "candidate.logit > other.logit", "candidate.logit >= other.logit", "equal likelihoods", None,
        ),
        (
            "nothing but -inf is a distribution", "scores.h",
            "anchor == -INFINITY ? 0.0f : anchor", "anchor", "impossible tokens", None,
        ),
        (
            "blocks begin where the piece does", "scores.h",
            "row * stride + block", "row * stride + block - panel * PANEL", "known tokens", None,
        ),
        (
            "likeliest of the first panel alone", "scores.h",
            "other->id >= 0", "other->id < 0", "known tokens", None,
        ),
        (
            "infinities have a scale", "quantise.h",
            # elsewhere the codes of such a group are zeros, and infinity times none of them is NaN as well
            "largest == INFINITY", "false", "not finite", "avx-vnni as avx512vl",
        ),
        (
            "up is gate", "fused.h",
            "open_tile(gate_up, up_tiles + at, memory)", "open_tile(gate_up, at, memory)", "fused", None,
        ),
        (
            "every gated group is the first", "fused.h",
            "slice * code_row_bytes(group, group)", "slice * 0", "fused", None,
        ),
        (
            "raised codes start from zero", "dot.h",
            "rows[row].unsigned_start - Ints{}", "Ints{}", Q8_0, "avx-vnni as avx512vl",
        ),
        (
            "an int16 overflow in a group", "dot.h",
            "widened(narrow[row])", "widened(narrow[row] << 1) / 2", "extreme codes", "avx2",
        ),
        (
            "the code -128 saturates", "dot.h",
            "_mm256_abs_epi8(__m256i(weight))",
            "_mm256_min_epu8(_mm256_abs_epi8(__m256i(weight)), _mm256_set1_epi8(127))",
            "extreme codes", "avx2",
        ),
        (
            "an int16 overflow in a group, in the compiler's vectors", "dot.h",
            "widened(short_sums[row])", "widened(short_sums[row] << 1) / 2", "extreme codes", "portable",
        ),
    )
}  # fmt: skip


@pytest.fixture(scope="module", params=["native", "avx-vnni as avx512vl", "avx2", "portable"])
def buggy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BuggyLibrary:
    """Those bugs that are in this machine's code, all switched off."""
    flags, features = MACHINES[request.param]
    if not has(features):
        pytest.skip(f"no {' '.join(features)} here")
    wanted = None if request.param == "native" else request.param
    bugs = [bug for bug, _, machine in BUGS.values() if machine == wanted]
    folder = tmp_path_factory.mktemp("sources")
    return BuggyLibrary(bugs, folder, cpu_cache_dir(), pattern="products.cpp", machine=flags)


@pytest.fixture
def switched(buggy: BuggyLibrary) -> Iterator[BuggyLibrary]:
    yield buggy
    buggy.switch_off()


def test_each_bug_is_caught_and_nothing_else(switched: BuggyLibrary) -> None:
    ops = CpuQuantisedOps(switched.library)
    checks = {bug: (name, CHECKS[check]) for name, (bug, check, _) in BUGS.items()}
    for bug in switched.bugs:
        name, check = checks[bug]
        switched.switch_off()
        check(ops)
        switched.switch_on(bug)
        try:
            check(ops)
        except AssertionError:
            continue
        pytest.fail(f"not caught: {name}")
