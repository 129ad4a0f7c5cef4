"""What the kernels are held to on a GPU, and whether a run of the benchmark shows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pageturner.service.bench.attention_contenders import BLOCK_SIZES, paged_name, sdpa_name
from pageturner.service.bench.cuda_kernels import BenchMachine, Result

COPY_FRACTION = 0.85
LARGE_CALL_BYTES = 200_000_000
"""From here on, a call moves so much that its start and its tail no longer count."""
HOPPER = (9, 0)
PREFILL_FLOPS = 300e12
PREFILL_HEAD_DIM = 128
LONG_PROMPT = 4096
"""From here on, a prompt fills the machine and the diagonal no longer counts."""
BLOCK_SIZE_TOLERANCE = 0.03


@dataclass(frozen=True, slots=True)
class TargetVerdict:
    """worst: the case in which the figure is furthest from the target; None where no case applies."""

    target: str
    figure: float | None
    met: bool | None
    worst: str | None


def verdicts(
    results: Sequence[Result], machine: BenchMachine, capability: tuple[int, int]
) -> tuple[TargetVerdict, ...]:
    """Each target over the cases it speaks of; on other GPUs than Hopper, prefill has no figure to meet."""
    small, large = (paged_name(block_size) for block_size in BLOCK_SIZES)
    decodes = [r for r in results if r.case.kind == "decode" and r.case.bytes_moved >= LARGE_CALL_BYTES]
    prefills = [
        r
        for r in results
        if r.case.kind == "prefill"
        and r.case.heads.head_dim == PREFILL_HEAD_DIM
        and r.case.context >= LONG_PROMPT
        and capability == HOPPER
    ]
    gathered = sdpa_name("flash", gathers=True)
    return (
        _least(
            f"decode: fraction of a copy's bandwidth, where a call moves {LARGE_CALL_BYTES / 1e6:.0f} MB",
            COPY_FRACTION,
            ((r, _over(r.amount / r.bound(machine), r.seconds(small))) for r in decodes),
        ),
        _least(
            f"prefill: TFLOP/s at head_dim {PREFILL_HEAD_DIM} on Hopper, from {LONG_PROMPT} tokens",
            PREFILL_FLOPS / 1e12,
            ((r, _over(r.amount / 1e12, r.seconds(small))) for r in prefills),
        ),
        _least(
            "all: speed over SDPA flash on gathered keys",
            1.0,
            ((r, _over(r.seconds(gathered), r.seconds(small))) for r in results),
        ),
        _least(
            "decode: speed of blocks of 16 over blocks of 64, where a call is large",
            1 - BLOCK_SIZE_TOLERANCE,
            ((r, _over(r.seconds(large), r.seconds(small))) for r in decodes),
        ),
    )


def _least(target: str, needed: float, figures: Iterable[tuple[Result, float | None]]) -> TargetVerdict:
    """At least `needed` in every case with a figure."""
    known: Iterator[tuple[float, str]] = (
        (figure, str(result.case)) for result, figure in figures if figure is not None
    )
    figure, worst = min(known, default=(None, None))
    target = f"{target}: at least {needed:g}"
    return TargetVerdict(target, figure, None if figure is None else figure >= needed, worst)


def _over(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or denominator is None else numerator / denominator
