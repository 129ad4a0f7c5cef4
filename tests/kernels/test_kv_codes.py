"""Codes and scales of keys and values: the numbers of the definition, worked out a second time by hand."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.paged import assert_same
from support.planting import plant

from pageturner.kernels import kv_codes
from pageturner.kernels.kv_codes import MOST, decode, encode
from pageturner.kernels.layout import CODE_DTYPES

TINY = float(torch.finfo(torch.float32).tiny)
HUGE = float(torch.finfo(torch.float32).max)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
rows = st.lists(floats, min_size=1, max_size=24)


def e4m3_value(code: int) -> float:
    """What a byte means as the paper has it: bias 7, no infinities, all ones is no number."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return sign * size


def float32(x: float) -> float:
    return float(struct.unpack("f", struct.pack("f", x))[0])


def bfloat16(x: float) -> float:
    """x of float32 to the nearest, ties to even: the upper half of its bits."""
    bits = int.from_bytes(struct.pack("<f", x), "little")
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return float(struct.unpack("<f", rounded.to_bytes(4, "little"))[0])


def nearest_code(x: float, dtype: torch.dtype) -> float:
    """Of all codes the nearest; of two as near, the one whose last bit is 0."""
    if dtype is torch.int8:
        return float(round(x))  # of Python: ties to even
    codes = [code for code in range(256) if not math.isnan(e4m3_value(code))]
    return e4m3_value(min(codes, key=lambda code: (abs(e4m3_value(code) - x), code & 1)))


def test_a_byte_of_the_pool_means_what_the_format_says() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = decode(codes[:, None], torch.ones(256, dtype=torch.bfloat16)).flatten().tolist()
    for code, value in enumerate(values):
        assert value == e4m3_value(code) or (math.isnan(value) and math.isnan(e4m3_value(code)))
    signed = torch.arange(-127, 128, dtype=torch.int8)
    assert decode(signed, torch.tensor(2.0).bfloat16()).tolist() == [2.0 * code for code in range(-127, 128)]


def check_codes(dtype: torch.dtype, row: list[float]) -> None:
    codes, scale = encode(torch.tensor(row), dtype)
    expected = bfloat16(float32(max(map(abs, row)) / MOST[dtype]))
    if expected < TINY:
        assert float(scale) == 0
        assert not codes.view(torch.uint8).any()
        return
    assert float(scale) == expected
    inverse = float32(1 / expected)
    wanted = [nearest_code(float32(x * inverse), dtype) for x in row]
    assert codes.float().tolist() == wanted
    assert max(map(abs, wanted)) <= MOST[dtype]


@settings(max_examples=100, deadline=None)
@given(row=rows)
@example(row=[0.0, -0.0])
@example(row=[HUGE, -HUGE, 1.0])
@example(row=[TINY, TINY * 126, -TINY * 3])
@example(row=[float32(1e-38), -float32(1e-41)])
@example(row=[float32(127 * (1 + 2**-8 - 2**-20)), 1.0])  # scales that bfloat16 rounds down as far as it may
@example(row=[float32(448 * (1 + 2**-8 - 2**-20)), 1.0])
@pytest.mark.parametrize("dtype", CODE_DTYPES)
def test_codes_and_scales_are_those_of_the_definition(dtype: torch.dtype, row: list[float]) -> None:
    check_codes(dtype, row)


@settings(max_examples=100, deadline=None)
@given(row=rows)
@pytest.mark.parametrize("dtype", CODE_DTYPES)
def test_a_number_comes_back_within_half_a_step(dtype: torch.dtype, row: list[float]) -> None:
    """A step of int8 is the scale; of fp8 an eighth of the power of two below the number."""
    given_row = torch.tensor(row)
    codes, scale = encode(given_row, dtype)
    error = (decode(codes, scale).double() - given_row.double()).abs()
    if float(scale) == 0:
        assert float(given_row.abs().max()) <= MOST[dtype] * TINY
        return
    half = float(scale.double()) / 2
    bound = torch.full_like(error, half)
    if dtype is torch.float8_e4m3fn:
        bound = torch.maximum(given_row.double().abs() / 16, torch.full_like(error, half * 2**-9))
    assert bool((error <= bound * (1 + 2**-8)).all())


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", CODE_DTYPES)
def test_a_row_that_holds_no_number_is_none_and_its_neighbours_do_not_notice(
    dtype: torch.dtype, poison: float
) -> None:
    check_poison(dtype, poison)


def check_poison(dtype: torch.dtype, poison: float) -> None:
    given_rows = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(0))
    clean_codes, clean_scales = encode(given_rows, dtype)
    given_rows[1, 0, 5] = poison
    codes, scales = encode(given_rows, dtype)
    assert not codes[1, 0].view(torch.uint8).any()
    assert decode(codes, scales)[1, 0].isnan().all()
    untouched = [(0, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    for at in untouched:
        assert_same(decode(codes, scales)[at], decode(clean_codes, clean_scales)[at])


@pytest.mark.parametrize("dtype", CODE_DTYPES)
def test_a_row_has_the_codes_that_it_has_alone(dtype: torch.dtype) -> None:
    """So computing it again, in whatever company, writes what was there."""
    sizes = torch.tensor([1e-6, 1.0, 1e6])[:, None]
    together = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(1)) * sizes
    codes, scales = encode(together, dtype)
    for token in range(5):
        alone = encode(together[token], dtype)
        assert torch.equal(codes[token].view(torch.uint8), alone[0].view(torch.uint8))
        assert torch.equal(scales[token], alone[1])


@pytest.mark.parametrize("dtype", CODE_DTYPES)
def test_rows_of_half_the_bits_have_the_codes_of_their_values(dtype: torch.dtype) -> None:
    half = torch.randn(4, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    for narrow, wide in zip(encode(half, dtype), encode(half.float(), dtype), strict=True):
        assert torch.equal(narrow.view(torch.uint8), wide.view(torch.uint8))


BUGS = {
    "the scale is not what was kept": (".bfloat16()\n", "\n"),
    "codes are cut off": ("steps.round()", "steps.trunc()"),
    "a tiny scale counts": ("torch.finfo(torch.float32).tiny", "0"),
    "no number becomes zeros": ("scales.masked_fill(~finite, math.nan)", "scales.masked_fill(~finite, 0)"),
    "codes end at 126": ("127.0", "126.0"),
}


def check_all() -> None:
    for dtype in CODE_DTYPES:
        for row in ([1.0, 0.3, -0.7], [TINY * 100, TINY], [127.5, 1.0], [1e-3] * 5):
            check_codes(dtype, [float32(x) for x in row])
        check_poison(dtype, math.inf)


@pytest.mark.parametrize("name", BUGS)
def test_bugs_in_the_definition_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_all()
    monkeypatch.setitem(globals(), "encode", plant(kv_codes, *BUGS[name]).encode)
    with pytest.raises(AssertionError):
        check_all()
