"""Attention of one layer on a GPU: ours beside others', and beside what the machine can do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from pageturner.service.bench.attention_cases import Case, Inputs, make_inputs
from pageturner.service.bench.attention_contenders import AttentionContender, NotAtHand
from pageturner.service.bench.stopwatch import Stopwatch

COPY_BYTES = 1 << 30
MATMUL_SIZE = 8192


@dataclass(frozen=True, slots=True)
class BenchMachine:
    """What the GPU reaches without us, measured in the same run.

    copy_bandwidth: bytes/s read and written by a plain device copy. matmul_flops: FLOP/s of torch's largest
    square product in bfloat16.
    """

    copy_bandwidth: float
    matmul_flops: float


@dataclass(frozen=True, slots=True)
class Timing:
    """One contender in one case. seconds: the median, None where it took no part, for the reason why_not.

    difference: the largest from our result, of numbers of order 1.
    """

    contender: str
    seconds: float | None
    difference: float | None = None
    why_not: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A case and what each contender made of it; skipped: why no contender was run."""

    case: Case
    timings: tuple[Timing, ...]
    skipped: str | None = None

    def seconds(self, contender: str) -> float | None:
        """Of a call of the contender of that name; None where it took no part."""
        return next((timing.seconds for timing in self.timings if timing.contender == contender), None)

    def rate(self, timing: Timing) -> float | None:
        """Bytes/s of a decode, FLOP/s of a prefill: by what had to be moved or computed, not what was."""
        if timing.seconds is None:
            return None
        return self.amount / timing.seconds

    @property
    def amount(self) -> int:
        """Bytes of a decode, FLOPs of a prefill."""
        return self.case.bytes_moved if self.case.kind == "decode" else self.case.flops

    def fraction(self, timing: Timing, machine: BenchMachine) -> float | None:
        """Of the copy's bandwidth, or of the product's FLOP/s."""
        rate, bound = self.rate(timing), self.bound(machine)
        return None if rate is None else rate / bound

    def bound(self, machine: BenchMachine) -> float:
        """The machine's own rate, in the unit of `rate`."""
        return machine.copy_bandwidth if self.case.kind == "decode" else machine.matmul_flops

    @property
    def unit(self) -> Literal["GB/s", "TFLOP/s"]:
        """In which reports show rates."""
        return "GB/s" if self.case.kind == "decode" else "TFLOP/s"

    @property
    def unit_scale(self) -> float:
        """Bytes/s or FLOP/s of one `unit`."""
        return 1e9 if self.case.kind == "decode" else 1e12


def measure_machine(
    device: torch.device,
    stopwatch: Stopwatch,
    copy_bytes: int,
    matmul_size: int,
) -> BenchMachine:
    """The rates of a plain copy of `copy_bytes` and of a square bfloat16 product."""
    source = torch.zeros(copy_bytes, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    copied = stopwatch.median_seconds(lambda: destination.copy_(source))
    left, right = (
        torch.ones(matmul_size, matmul_size, dtype=torch.bfloat16, device=device) for _ in range(2)
    )
    product = torch.empty_like(left)
    multiplied = stopwatch.median_seconds(lambda: torch.mm(left, right, out=product))
    return BenchMachine(2 * copy_bytes / copied, 2 * matmul_size**3 / multiplied)


def measure_cases(
    cases: Iterable[Case],
    contenders: Sequence[AttentionContender],
    device: torch.device,
    stopwatch: Stopwatch,
    free_bytes: Callable[[], int],
) -> Iterator[Result]:
    """A result a case, as it is measured. The first contender's output is what the others are compared with.

    free_bytes: of the device's memory; a case that would not fit is skipped.
    """
    for case in cases:
        free = free_bytes()
        if case.memory_bytes > free:
            skipped = f"needs {case.memory_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
            yield Result(case, (), skipped)
            continue
        yield Result(case, tuple(_timings(case, contenders, device, stopwatch)))


def _timings(
    case: Case, contenders: Sequence[AttentionContender], device: torch.device, stopwatch: Stopwatch
) -> Iterator[Timing]:
    inputs: Inputs | None = None
    ours: dict[int, torch.Tensor] = {}
    for contender in contenders:
        block_size = contender.block_size
        if inputs is None or inputs.kv_layer.shape[3] != block_size:
            inputs = None  # so that its memory serves the next
            inputs = make_inputs(case, block_size, device)
        yield _timing(contender, inputs, ours, stopwatch)


def _timing(
    contender: AttentionContender, inputs: Inputs, ours: dict[int, torch.Tensor], stopwatch: Stopwatch
) -> Timing:
    """Nothing that it makes outlives it, for `call` holds on to the inputs."""
    try:
        call = contender.prepare(inputs)
        output = call()
    except NotAtHand as reason:
        return Timing(contender.name, None, why_not=str(reason))
    except torch.OutOfMemoryError as error:
        return Timing(contender.name, None, why_not=str(error).partition(". ")[0])
    # Pools of different block sizes hold different numbers: each is compared within its own.
    expected = ours.setdefault(contender.block_size, output)
    difference = float((output.float() - expected.float()).abs().max())
    del output
    return Timing(contender.name, stopwatch.median_seconds(call), difference)
