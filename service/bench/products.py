"""The matrix products of one step alone: quantised, in float32 and in bfloat16, in turns.

The sizes are SmolLM2-135M's: layers of 4-bit weights with offsets (Q4_1), a head of 8-bit ones (Q8_0). Every
layer has weights of its own, so that they come from memory as in a step. Each product is one call; the
service's quantised step is one call for all of them and saves what calls cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from pageturner.kernels.cpu.build import NATIVE, load_library
from pageturner.kernels.cpu.quantised_ops import CpuQuantisedOps
from pageturner.kernels.grouped import GroupedWeight
from pageturner.kernels.packed import PackedWeight, pack
from pageturner.service.bench.machines import MACHINES, cpu_flags
from pageturner.service.model.linear import product

ROWS = (1, 4, 16, 64, 512)
LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""(out, in) of q|k|v, the attention's output, gate|up and down."""
HEAD = (49152, 576)
NUM_LAYERS = 30
_GROUP = 32
Step = Callable[[Mapping[int, torch.Tensor]], object]


@dataclass(frozen=True, slots=True)
class ProductTiming:
    """One contender at one number of rows."""

    contender: str
    rows: int
    milliseconds: float
    """Of all products of a step, the median of its rounds."""
    gigabytes_per_second: float
    """Of weights."""
    giga_multiplications_per_second: float
    """Multiply-adds, by all threads."""


@dataclass(frozen=True, slots=True)
class _Contender:
    name: str
    bytes_a_step: int
    step: Step


def measure_products(
    cache_dir: Path, rows: Sequence[int], rounds: int, report: Callable[[str], object]
) -> list[ProductTiming]:
    """By contender and rows. Raises CompilerUnavailable where nothing can be compiled.

    cache_dir: of compiled operations. report: told of each contender and number of rows when it is done.
    """
    flags_here = cpu_flags()
    contenders = [_quantised(cache_dir, NATIVE)]
    for flags, needed in MACHINES.values():
        contender = _quantised(cache_dir, flags) if flags_here.issuperset(needed) else contenders[0]
        if contender.name not in {other.name for other in contenders}:
            contenders.append(contender)
    contenders.append(_float(torch.float32))
    if "avx512_bf16" in flags_here:
        contenders.append(_float(torch.bfloat16))

    multiplications = sum(out * size for out, size in LAYER) * NUM_LAYERS + HEAD[0] * HEAD[1]
    timings = []
    for count in rows:
        inputs = {size: torch.randn(count, size) for size in (576, 1536)}
        seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        for number in range(rounds + 1):  # the first wakes threads and caches
            for contender in contenders:
                began = time.perf_counter()
                contender.step(inputs)
                if number:
                    seconds[contender.name].append(time.perf_counter() - began)
        for contender in contenders:
            middle = median(seconds[contender.name])
            timings.append(
                ProductTiming(
                    contender.name,
                    count,
                    1e3 * middle,
                    contender.bytes_a_step / middle / 1e9,
                    count * multiplications / middle / 1e9,
                )
            )
        report(f"{count} rows")
    return timings


def product_lines(timings: Sequence[ProductTiming]) -> Iterator[str]:
    """A table, line by line."""
    yield f"products of a step of SmolLM2-135M, {torch.get_num_threads()} threads, medians"
    yield f"{'':12}  rows        ms  weights GB/s  multiply-adds G/s"
    for timing in sorted(timings, key=lambda timing: timing.contender):
        yield (
            f"{timing.contender:12} {timing.rows:5} {timing.milliseconds:9.2f} "
            f"{timing.gigabytes_per_second:13.1f} {timing.giga_multiplications_per_second:18.0f}"
        )


def _quantised(cache_dir: Path, machine: Sequence[str]) -> _Contender:
    ops = CpuQuantisedOps(load_library(cache_dir, machine=machine))
    layer = [pack(_grouped(shape, torch.uint8)) for shape in LAYER]
    copies = [
        PackedWeight(weight.layout, weight.buffer.clone()) for _ in range(NUM_LAYERS) for weight in layer
    ]
    weights = [*copies, pack(_grouped(HEAD, torch.int8))]

    def step(inputs: Mapping[int, torch.Tensor]) -> None:
        for weight in weights:
            ops.linear(inputs[weight.layout.in_features], weight)

    return _Contender(ops.name, sum(weight.layout.num_bytes for weight in weights), step)


def _grouped(shape: tuple[int, int], dtype: torch.dtype) -> GroupedWeight:
    low, high = (0, 16) if dtype is torch.uint8 else (-127, 128)
    scales = torch.full((shape[0], shape[1] // _GROUP), 0.01, dtype=torch.float16)
    codes = torch.randint(low, high, shape, dtype=dtype)
    return GroupedWeight(codes, scales, -scales if dtype is torch.uint8 else None, _GROUP)


def _float(dtype: torch.dtype) -> _Contender:
    shapes = [*LAYER * NUM_LAYERS, HEAD]
    products = [(size, product(torch.randn(out, size).to(dtype), None)) for out, size in shapes]

    def step(inputs: Mapping[int, torch.Tensor]) -> None:
        with torch.inference_mode():
            converted = {size: rows.to(dtype) for size, rows in inputs.items()}
            for size, multiply in products:
                multiply(converted[size])

    num_bytes = sum(out * size for out, size in shapes) * dtype.itemsize
    return _Contender(str(dtype).removeprefix("torch."), num_bytes, step)
