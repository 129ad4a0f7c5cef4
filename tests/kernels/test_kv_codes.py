"""Codes and scales of keys and values: the numbers of the definition, worked out a second time by hand."""

from __future__ import annotations

import math
import struct
from bisect import bisect_left

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


SIZES = [e4m3_value(code) for code in range(127)]
"""Of all codes without a sign, in their order."""


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
    size = abs(x)
    above = min(bisect_left(SIZES, size), len(SIZES) - 1)
    nearest = min((max(above - 1, 0), above), key=lambda code: (abs(SIZES[code] - size), code & 1))
    return math.copysign(SIZES[nearest], x)


def test_a_byte_of_the_pool_means_what_the_format_says() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = decode(codes[:, None], torch.ones(256, dtype=torch.bfloat16)).flatten().tolist()
    for code, value in enumerate(values):
        assert value == e4m3_value(code) or (math.isnan(value) and math.isnan(e4m3_value(code)))
    signed = torch.arange(-127, 128, dtype=torch.int8)
    assert decode(signed, torch.tensor(2.0).bfloat16()).tolist() == [2.0 * code for code in range(-127, 128)]


def candidates(smallest: float, dtype: torch.dtype) -> list[float]:
    """The scales to choose from: of floats eight, at as many eighths of an octave's bfloat16s."""
    if dtype is torch.int8:
        return [smallest]
    mantissa, exponent = math.frexp(smallest)  # in 2^-8, from 128 to 255
    eighths = [math.ldexp(mantissa, 8) + 16 * k for k in range(8)]
    within = [
        size if size < 256 else 256 + 2 * (size - 256) for size in eighths
    ]  # steps double at the octave
    return [math.ldexp(size, exponent - 8) for size in within]


def whole_error(row: list[float], scale: float, smallest: float) -> int:
    """Of floats of 8 bits, in the units of the definition, each operation rounded to float32."""
    inverse = float32(1 / scale)
    units = float32(float32(scale * float32(1 / smallest)) * 32)
    total = 0
    for x in row:
        steps = float32(abs(x) * inverse)
        error = float32((steps - nearest_code(steps, torch.float8_e4m3fn)) * units)
        total += int(float32(error * error))
    return total


def check_codes(dtype: torch.dtype, row: list[float]) -> None:
    codes, scale = encode(torch.tensor(row), dtype)
    smallest = bfloat16(float32(max(map(abs, row)) / MOST[dtype]))
    if smallest < TINY:
        assert float(scale) == 0
        assert not codes.view(torch.uint8).any()
        return
    expected = min(candidates(smallest, dtype), key=lambda scale: whole_error(row, scale, smallest))
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
@example(row=[448.0, 0.0])  # 448 * 1 and 256 * 1.75: the first of scales as good
@example(row=[480.0, 0.3, 17.0, -240.0])
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


def errors_of(given_rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Squared, of each row's numbers as floats of 8 bits by the row's scale; what is too large is cut off."""
    steps = (given_rows / scales[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (steps.double() * scales[:, None].double() - given_rows.double()).square().sum(dim=-1)


def test_scales_of_other_octaves_err_no_less() -> None:
    """Half a candidate errs as it does, and cuts off; twice as large a one lacks a bit at the small end."""
    given_rows = torch.randn(200, 64, generator=torch.Generator().manual_seed(3))
    given_rows[100:, :3] *= 12  # some channels of keys stand out
    _, scales = encode(given_rows, torch.float8_e4m3fn)
    found = errors_of(given_rows, scales.float())
    smallest = (given_rows.abs().amax(dim=-1) / 448).bfloat16()
    for octave in (0.25, 0.5, 1, 2, 4):
        for eighth in range(8):
            candidates = (smallest.view(torch.int16) + 16 * eighth).view(torch.bfloat16).float()
            assert bool((errors_of(given_rows, candidates * octave) > 0.999 * found).all())
    assert float(found.sum()) < 0.85 * float(errors_of(given_rows, smallest.float()).sum())


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
    "scales of half an octave": ("_OCTAVE = 1 << 7", "_OCTAVE = 1 << 6"),
    "errors are counted in steps of their own scale": ("units[..., None]", "32"),
    "the worst scale is taken": ("sums.argmin(", "sums.argmax("),
    "the last of scales as good is taken": (
        "sums.argmin(dim=-1, keepdim=True)",
        "SCALES - 1 - sums.flip(-1).argmin(dim=-1, keepdim=True)",
    ),
}


def check_all() -> None:
    for dtype in CODE_DTYPES:
        for row in ([1.0, 0.3, -0.7], [TINY * 100, TINY], [127.5, 1.0], [1e-3] * 5, [448.0], [1.0, 0.9]):
            check_codes(dtype, [float32(x) for x in row])
        check_poison(dtype, math.inf)


@pytest.mark.parametrize("name", BUGS)
def test_bugs_in_the_definition_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_all()
    monkeypatch.setitem(globals(), "encode", plant(kv_codes, *BUGS[name]).encode)
    with pytest.raises(AssertionError):
        check_all()
