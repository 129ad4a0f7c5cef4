"""Each primitive of the CUDA kernels against its definition in NumPy, on any runtime.

`CHECKS` holds one check a primitive and element type; each takes a launcher of a runtime that compiles the
files of `probe_sources`.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pageturner.kernels.cuda import variants
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.cuda.variants import Variant

Array = NDArray[np.generic]
Floats = NDArray[np.float32]
Bits = NDArray[np.uint16]
Registers = NDArray[np.uint32]
Check = Callable[[Launcher], None]

THREADS = 128
LANES = np.arange(32)
GROUP, PAIR = LANES // 4, LANES % 4 * 2
SMALLEST_NORMAL = 2.0**-126


class ProbeArguments(ctypes.Structure):
    """The struct of primitives_probe.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "extra", "output")),
        ("count", ctypes.c_int32),
    )


def probe_sources(folder: Path) -> Path:
    """A folder with the probes and the headers that they include."""
    for header in Path(variants.__file__).parent.glob("*.cuh"):
        shutil.copy(header, folder)
    shutil.copy(Path(__file__).parents[1] / "kernels" / "cuda" / "primitives_probe.cu", folder)
    return folder


def probe(
    launcher: Launcher,
    expression: str,
    output: Array,
    given: Array,
    extra: Array | None = None,
    *,
    count: int,
    num_threads: int | None = None,
    shared_bytes: int = 0,
) -> None:
    """Runs one probe on the device and brings `output`, which it fills, back. One block of `num_threads`, or
    enough of THREADS for `count`."""
    threads = num_threads or THREADS
    grid = 1 if num_threads else -(-count // THREADS)
    device = launcher.runtime.device
    on_device = [
        None if array is None else torch.from_numpy(array.view(np.uint8)).to(device)
        for array in (given, extra, output)
    ]
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in on_device]
    variant = Variant("primitives_probe.cu", expression, threads, shared_bytes, ProbeArguments)
    launcher.launch(variant, (grid, 1, 1), ProbeArguments(*pointers, count))
    filled = on_device[-1]
    assert filled is not None
    output.view(np.uint8)[...] = filled.cpu().numpy()


def widened(name: str, bits: Bits) -> Floats:
    """What the bits of a 16-bit float stand for."""
    if name == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrowed(name: str, values: Floats) -> Bits:
    """Round to nearest, ties to even. NaN as any NaN."""
    if name == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaN, quieted
        values = values.astype(np.float64).astype(np.float32)
    below = (values.view(np.uint32) >> 16).astype(np.uint16)
    above = below + np.uint16(1)  # further from zero
    reach = np.abs(_magnitudes(above) - np.abs(values.astype(np.float64)))
    slip = np.abs(np.abs(values.astype(np.float64)) - _magnitudes(below))
    up = (reach < slip) | ((reach == slip) & (below & 1 == 1))
    rounded = np.where(up & np.isfinite(values), above, below)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype(np.uint16)


def _magnitudes(bits: Bits) -> NDArray[np.float64]:
    """Of bfloat16 numbers, where infinity stands for the power of two that would follow the largest."""
    with np.errstate(invalid="ignore"):
        magnitudes = np.abs(widened("bfloat16", bits).astype(np.float64))
    return np.where(np.isinf(magnitudes), 2.0**128, magnitudes)


def all_bits() -> Bits:
    return np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def floats_to_round(name: str) -> Floats:
    """Every number of the type, all that lie midway between two, their neighbours, and arbitrary bits."""
    finite = widened(name, all_bits())
    finite = np.sort(finite[np.isfinite(finite)])
    midway = ((finite[:-1].astype(np.float64) + finite[1:]) / 2).astype(np.float32)
    largest = finite[-1].astype(np.float64) + (finite[-1].astype(np.float64) - finite[-2]) / 2
    edges = np.array([largest, -largest, np.inf, -np.inf, np.nan, 0.0, -0.0], np.float32)
    around = np.concatenate((finite, midway, edges[:2]))
    random = np.random.default_rng(0).integers(0, 1 << 32, 100_000, np.uint32).view(np.float32)
    up, down = np.float32(np.inf), np.float32(-np.inf)
    return np.concatenate((around, np.nextafter(around, up), np.nextafter(around, down), edges, random))


def assert_same(found: Floats, wanted: Floats) -> None:
    """The same bits, or both NaN."""
    alike = (found.view(np.uint32) == wanted.view(np.uint32)) | (np.isnan(found) & np.isnan(wanted))
    assert alike.all(), f"{found[~alike][:5]} where {wanted[~alike][:5]} was wanted"


def check_to_float(name: str, launcher: Launcher) -> None:
    found = np.empty(1 << 16, np.float32)
    probe(launcher, f"probe_to_float<{name}>", found, all_bits(), count=found.size)
    assert_same(found, widened(name, all_bits()))


def check_from_float(name: str, launcher: Launcher) -> None:
    values = floats_to_round(name)
    found = np.empty(values.size, np.uint16)
    probe(launcher, f"probe_from_float<{name}>", found, values, count=values.size)
    assert_same(widened(name, found), widened(name, narrowed(name, values)))


def check_pack(name: str, launcher: Launcher) -> None:
    values = floats_to_round(name)
    values = values[: values.size // 2 * 2]
    found = np.empty(values.size // 2, np.uint32)
    probe(launcher, f"probe_pack<{name}>", found, values, count=found.size)
    halves = np.stack((found & 0xFFFF, found >> 16), axis=1).astype(np.uint16).ravel()
    assert_same(widened(name, halves), widened(name, narrowed(name, values)))


def check_wide_product(launcher: Launcher) -> None:
    edges = np.array([0, 1, -1, 2**31 - 1, -(2**31), 65_536], np.int32)
    pairs = np.stack(np.meshgrid(edges, edges), axis=-1).reshape(-1, 2)
    found = np.empty(len(pairs), np.int64)
    probe(launcher, "probe_wide_product", found, np.ascontiguousarray(pairs), count=len(pairs))
    np.testing.assert_array_equal(found, pairs[:, 0].astype(np.int64) * pairs[:, 1])


def check_exp2(launcher: Launcher) -> None:
    edges = np.array([0, -0.0, 1, -126, 127, -150, -1000, -1e30, -np.inf, np.inf, 128.5, np.nan], np.float32)
    random = np.random.default_rng(1).uniform(-126, 127, 20_000).astype(np.float32)
    x = np.concatenate((edges, random, -np.geomspace(1e-38, 1, 500, dtype=np.float32)))
    found = np.empty_like(x)
    probe(launcher, "probe_exp2_approximate", found, x, count=x.size)
    with np.errstate(over="ignore"):
        exact = np.exp2(x.astype(np.float64))
    normal = (x >= -126) & (x <= 127)
    error = np.abs(found[normal] / exact[normal] - 1)
    assert error.max() < 2.0**-22
    assert_same(found[:2], np.ones(2, np.float32))
    assert np.all(found[x <= -150] == 0)
    assert np.all(found[x > 128] == np.inf)
    assert np.isnan(found[np.isnan(x)]).all()


def check_tanh(launcher: Launcher) -> None:
    edges = np.array([0, -0.0, np.inf, -np.inf, 100, -100, np.nan], np.float32)
    geometric = np.geomspace(1e-30, 20, 10_000, dtype=np.float32)
    x = np.concatenate((edges, geometric, -geometric))
    found = np.empty_like(x)
    probe(launcher, "probe_tanh_approximate", found, x, count=x.size)
    exact = np.tanh(x.astype(np.float64))
    assert_same(found[:2], x[:2])
    assert np.isnan(found[np.isnan(x)]).all()
    counted = np.isfinite(exact) & (exact != 0)
    assert np.abs(found[counted] / exact[counted] - 1).max() <= 2.0**-11


def _pairs(matrix: Bits, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Registers:
    """Registers that hold the element at (rows, columns), and the one to the right of it above."""
    low, high = matrix[rows, columns], matrix[rows, columns + 1]
    return (low | high.astype(np.uint32) << 16).astype(np.uint32)


def fragments(a: Bits, b: Bits) -> Registers:
    """[32 lanes, 6]: the operands of mma_m16n8k16, a 16 x 16 and b 16 x 8, as primitives.cuh deals them."""
    columns = b.T  # rows t, t + 1 of column g
    return np.stack(
        (
            _pairs(a, GROUP, PAIR),
            _pairs(a, GROUP + 8, PAIR),
            _pairs(a, GROUP, PAIR + 8),
            _pairs(a, GROUP + 8, PAIR + 8),
            _pairs(columns, GROUP, PAIR),
            _pairs(columns, GROUP, PAIR + 8),
        ),
        axis=1,
    )


def accumulators(d: Floats) -> Floats:
    """[32 lanes, 4]: d, 16 x 8, as primitives.cuh deals it."""
    return np.stack((d[GROUP, PAIR], d[GROUP, PAIR + 1], d[GROUP + 8, PAIR], d[GROUP + 8, PAIR + 1]), axis=1)


def check_mma(name: str, launcher: Launcher) -> None:
    """Small integers, whose product is exact, and arbitrary numbers, within what float32 sums may lose."""
    rng = np.random.default_rng(2)
    num_products = 12
    values = rng.standard_normal((num_products, 16, 24)).astype(np.float32)
    values[:4] = rng.integers(-8, 9, values[:4].shape)
    bits = narrowed(name, values.ravel()).reshape(values.shape)
    a, b = bits[:, :, :16], bits[:, :, 16:]
    before = rng.integers(-9, 10, (num_products, 16, 8)).astype(np.float32)
    found = np.empty((num_products, 32, 4), np.float32)
    probe(
        launcher,
        f"probe_mma<{name}>",
        found,
        np.stack([fragments(*each) for each in zip(a, b, strict=True)]),
        np.stack([accumulators(each) for each in before]),
        count=num_products,
        num_threads=32 * num_products,
    )
    wide_a, wide_b = (widened(name, each.ravel()).reshape(each.shape).astype(np.float64) for each in (a, b))
    exact, sizes = before + wide_a @ wide_b, np.abs(before) + np.abs(wide_a) @ np.abs(wide_b)
    for product in range(num_products):
        wanted = accumulators(exact[product].astype(np.float32))
        slack = np.zeros_like(wanted) if product < 4 else accumulators(sizes[product]) * 2.0**-20
        assert np.all(np.abs(found[product] - wanted) <= slack)


def check_ldmatrix(transposed: bool, launcher: Launcher) -> None:
    """Lanes name the rows of shared memory in arbitrary order."""
    rng = np.random.default_rng(3)
    rows = np.arange(32 * 8, dtype=np.uint16).reshape(32, 8)
    named = rng.permutation(32).astype(np.int32)
    found = np.empty((32, 4), np.uint32)
    probe(
        launcher,
        f"probe_ldmatrix<{str(transposed).lower()}>",
        found,
        rows,
        named,
        count=32,
        num_threads=32,
        shared_bytes=32 * 16,
    )
    matrices = rows[named].reshape(4, 8, 8)
    if transposed:
        matrices = matrices.transpose(0, 2, 1)
    wanted = np.stack([_pairs(matrix, GROUP, PAIR) for matrix in matrices], axis=1)
    np.testing.assert_array_equal(found, wanted)


def check_cp_async(launcher: Launcher) -> None:
    """Copies arrive with their group; one that is not valid brings zeros and reads nothing."""
    rng = np.random.default_rng(4)
    num_groups = 3
    given = rng.integers(1, 255, (num_groups, THREADS, 16), np.uint8)
    valid = rng.integers(0, 2, (num_groups, THREADS), np.int32)
    found = np.empty_like(given)
    probe(
        launcher,
        f"probe_cp_async<{num_groups}>",
        found,
        given,
        valid,
        count=THREADS,
        num_threads=THREADS,
        shared_bytes=given.size,
    )
    np.testing.assert_array_equal(found, given * valid[:, :, None].astype(np.uint8))


CHECKS: dict[str, Check] = {
    **{
        f"{check.__name__.removeprefix('check_')}-{name}": partial(check, name)
        for check in (check_to_float, check_from_float, check_pack, check_mma)
        for name in ("bfloat16", "float16")
    },
    "wide_product": check_wide_product,
    "exp2": check_exp2,
    "tanh": check_tanh,
    "ldmatrix": partial(check_ldmatrix, False),
    "ldmatrix-transposed": partial(check_ldmatrix, True),
    "cp_async": check_cp_async,
}
