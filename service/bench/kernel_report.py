"""What `pageturner bench kernels` found, as a document and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pageturner.service.bench.attention_cases import Case
from pageturner.service.bench.cuda_kernels import BenchMachine, Result, Timing
from pageturner.service.bench.kernel_targets import TargetVerdict
from pageturner.service.bench.paper_estimate import Estimate, Gpu, TileInstructions


@dataclass(frozen=True, slots=True)
class Origin:
    """Where and when figures were taken. date: UTC, ISO 8601. command: as it was typed."""

    device: str
    driver: str
    versions: Mapping[str, str]
    date: str
    command: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A run on a GPU. stopped: why it ended early, if it did; the results are those until then."""

    machine: BenchMachine
    results: Sequence[Result]
    verdicts: Sequence[TargetVerdict]
    stopped: str | None = None

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "machine": asdict(self.machine),
            "stopped": self.stopped,
            "targets": [asdict(verdict) for verdict in self.verdicts],
            "results": [self._result(result) for result in self.results],
        }

    def _result(self, result: Result) -> dict[str, Any]:
        timings = [
            asdict(timing) | {"rate": result.rate(timing), "fraction": result.fraction(timing, self.machine)}
            for timing in result.timings
        ]
        return _case(result.case) | {
            "unit": result.unit.replace("GB/s", "B/s").replace("TFLOP/s", "FLOP/s"),
            "timings": timings,
            "skipped": result.skipped,
        }

    def lines(self) -> Iterator[str]:
        """For people."""
        machine = self.machine
        yield (
            f"this machine: a plain copy {machine.copy_bandwidth / 1e9:,.0f} GB/s, torch's matmul "
            f"{machine.matmul_flops / 1e12:,.0f} TFLOP/s (bfloat16)"
        )
        yield "decode in fractions of the copy's bandwidth, prefill of the matmul's FLOP/s"
        for result in self.results:
            yield ""
            yield f"{result.case}"
            if result.skipped is not None:
                yield f"  skipped: {result.skipped}"
            yield from (self._line(result, timing) for timing in result.timings)
        if self.stopped is not None:
            yield ""
            yield f"STOPPED after {len(self.results)} cases: {self.stopped}"
        yield ""
        yield "targets"
        yield from map(_verdict_line, self.verdicts)

    def _line(self, result: Result, timing: Timing) -> str:
        rate, fraction = result.rate(timing), result.fraction(timing, self.machine)
        if timing.seconds is None or rate is None or fraction is None:
            return f"  {timing.contender:<28}not at hand: {timing.why_not}"
        return (
            f"  {timing.contender:<28}{timing.seconds * 1e6:12,.1f} us{rate / result.unit_scale:10,.1f} "
            f"{result.unit:<8}{fraction:7.1%}   off by {timing.difference:.1e}"
        )


@dataclass(frozen=True, slots=True)
class Estimated:
    """The paper estimate, made where there is no GPU."""

    gpu: Gpu
    instructions: TileInstructions
    estimates: Sequence[Estimate]

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "measured": False,
            "gpu": asdict(self.gpu),
            "instructions": asdict(self.instructions),
            "estimates": [
                _case(found.case)
                | {
                    "warp_tiles": found.warp_tiles,
                    "seconds": found.seconds,
                    "bound": found.bound,
                    "memory_seconds": found.memory,
                    "issue_seconds": found.issue,
                    "issue_of_all_paths_seconds": found.issue_of_all,
                    "products_seconds": found.products,
                }
                for found in self.estimates
            ],
        }

    def lines(self) -> Iterator[str]:
        """For people."""
        gpu = self.gpu
        yield f"PAPER ESTIMATE for one {gpu.name}: nothing below was measured on a GPU."
        yield "A call takes the longest of three bounds at least, and some microseconds to start and to end:"
        yield (
            f"{gpu.bandwidth / 1e12:.2f} TB/s, {gpu.issue_rate / 1e9:,.0f} G instructions/s "
            f"({gpu.multiprocessors} SMs x {gpu.schedulers} schedulers x {gpu.clock / 1e9:.2f} GHz) and "
            f"{gpu.tensor_flops * gpu.mma_share / 1e12:,.0f} TFLOP/s of mma.sync."
        )
        yield f"Instructions of a tile: {self.instructions.source}."
        yield ""
        yield (
            f"{'':<32}{'MB moved':>10}{'warp tiles':>13}{'memory, us':>13}{'issue, us':>11} {'all paths':>10}"
            f"{'products, us':>14}   {'bound by':<13}{'at most':>8}"
        )
        for found in self.estimates:
            yield self._line(found)

    def _line(self, found: Estimate) -> str:
        case = found.case
        decodes = case.kind == "decode"
        rate = case.bytes_moved / 1e9 if decodes else case.flops / 1e12
        return (
            f"{case!s:<32}{case.bytes_moved / 1e6:10,.1f}{found.warp_tiles:13,}"
            f"{found.memory * 1e6:13,.2f}{found.issue * 1e6:11,.2f} {found.issue_of_all * 1e6:10,.2f}"
            f"{found.products * 1e6:14,.2f}"
            f"   {found.bound:<13}{rate / found.seconds:8,.0f} {'GB/s' if decodes else 'TFLOP/s'}"
        )


def _case(case: Case) -> dict[str, Any]:
    return asdict(case) | {"bytes_moved": case.bytes_moved, "flops": case.flops}


def _verdict_line(verdict: TargetVerdict) -> str:
    if verdict.figure is None:
        return f"  {'no case':<8}{verdict.target}"
    met = "met" if verdict.met else "MISSED"
    return f"  {met:<8}{verdict.target}; {verdict.figure:.3g} at worst ({verdict.worst})"
