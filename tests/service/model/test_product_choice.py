"""Which products `auto` takes, what it refuses, and when a choice by name is warned about."""

from __future__ import annotations

import math

import pytest

from pageturner.service.model.cpu_features import cpu_identity, has_bfloat16
from pageturner.service.model.product_choice import candidates_of, choose_fastest, obey
from pageturner.service.model.product_timing import score

AVX2 = "model name\t: AMD EPYC 7003\nflags\t\t: fpu sse2 avx avx2 fma f16c\n"
AVX512_BF16 = "model name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512f avx512_bf16 avx512_vnni\n"
SECONDS = {
    "float32": (0.036, 0.045, 0.103),
    "bfloat16": (0.011, 0.017, 0.048),
    "file": (0.004, 0.011, 0.035),
}


def test_the_fastest_is_taken_and_no_other_is_judged() -> None:
    asked: list[str] = []

    def kl_of(name: str) -> float:
        asked.append(name)
        return 0.0038

    choice = choose_fastest(SECONDS, kl_of)
    assert (choice.name, asked, choice.warning) == ("file", ["file"], None)
    assert [found.name for found in choice.measured] == ["file", "bfloat16", "float32"]
    assert [found.mean_kl for found in choice.measured] == [0.0038, None, None]
    assert choice.measured[0].figures() == "file 4 / 11 / 35 ms, KL 0.0038"


@pytest.mark.parametrize("kl", [0.01, 0.5, math.nan, math.inf])
def test_one_too_far_from_float32_is_never_chosen_and_that_is_said(kl: float) -> None:
    choice = choose_fastest(SECONDS, {"file": kl, "bfloat16": 0.0014}.__getitem__)
    assert choice.name == "bfloat16"
    assert choice.warning is not None
    assert choice.warning.startswith("too far from float32 and not chosen: file 4 / 11 / 35 ms")
    assert choice.measured[0].refused


def test_float32_is_what_is_left() -> None:
    assert choose_fastest(SECONDS, lambda _: 0.02).name == "float32"
    without = {name: seconds for name, seconds in SECONDS.items() if name != "float32"}
    assert choose_fastest(without, {"file": 0.03, "bfloat16": 0.02}.__getitem__).name == "bfloat16"


@pytest.mark.parametrize(
    ("cpuinfo", "names"),
    [
        (AVX2, ("float32", "file")),
        (AVX512_BF16, ("float32", "bfloat16", "file")),
        ("", ("float32", "bfloat16", "file")),
    ],
)
def test_bfloat16_is_a_candidate_only_where_the_processor_has_it(
    cpuinfo: str, names: tuple[str, ...]
) -> None:
    assert candidates_of(quantised="file", has_bfloat16=has_bfloat16(cpuinfo)) == names


def test_a_slow_choice_by_name_is_obeyed_with_a_warning() -> None:
    choice = obey("float32", SECONDS)
    assert choice.name == "float32"
    assert choice.warning is not None
    assert "float32 was asked for and takes 4.8 x as long as file here" in choice.warning
    assert obey("file", SECONDS).warning is None
    near = SECONDS | {"bfloat16": (0.0055, 0.016, 0.05)}
    assert obey("bfloat16", near).warning is None


def test_one_row_counts_as_much_as_many() -> None:
    assert score((0.001, 0.01, 0.1)) == pytest.approx(0.01)
    assert score((0.002, 0.01, 0.1)) == pytest.approx(score((0.001, 0.01, 0.2)))


def test_a_processor_is_known_by_name_and_flags() -> None:
    assert cpu_identity(AVX2) == "AMD EPYC 7003 avx avx2 f16c fma fpu sse2"
    assert cpu_identity(AVX2 * 2) == cpu_identity(AVX2) != cpu_identity(AVX512_BF16)
    assert cpu_identity("") == ""
