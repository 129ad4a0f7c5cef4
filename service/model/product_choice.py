"""Which products a model runs on: the fastest on this machine whose logits stay near float32's.

Pure decisions over figures that others measure (`product_timing`, `accuracy`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pageturner.service.model.accuracy import KL_BOUND
from pageturner.service.model.product_timing import ROWS, score

FLOAT32, BFLOAT16 = "float32", "bfloat16"
_CLEAR_LEAD = 2.0
WARNED_RATIO = 1.5
"""A choice by name that takes so many times as long as another is obeyed, with a warning."""


@dataclass(frozen=True, slots=True)
class MeasuredProducts:
    """One candidate: `float32`, `bfloat16`, or a scheme of quantisation.

    seconds: of a step's products at each of `ROWS` rows. mean_kl: against float32 on a short text; None if it
    wasn't measured, since a faster one was taken.
    """

    name: str
    seconds: tuple[float, ...]
    mean_kl: float | None = None

    @property
    def refused(self) -> bool:
        """Whether its logits are too far from float32's."""
        return self.mean_kl is not None and not self.mean_kl < KL_BOUND

    def figures(self) -> str:
        """In words: `file 4.1 / 11 / 30 ms, KL 0.0038`."""
        times = " / ".join(f"{1000 * seconds:.3g}" for seconds in self.seconds)
        kl = "" if self.mean_kl is None else f", KL {self.mean_kl:.2g}"
        return f"{self.name} {times} ms{kl}"


@dataclass(frozen=True, slots=True)
class ProductChoice:
    """What was chosen, why, and the figures of all candidates (none if nothing was measured)."""

    name: str
    reason: str
    measured: tuple[MeasuredProducts, ...] = ()
    warning: str | None = None

    @property
    def is_clear(self) -> bool:
        """Whether the fastest leads by so much that disturbed times would not have told otherwise."""
        scores = [score(found.seconds) for found in self.measured]
        return len(scores) < 2 or _CLEAR_LEAD * scores[0] <= scores[1]


def candidates_of(*, quantised: str | None, has_bfloat16: bool) -> tuple[str, ...]:
    """What `auto` chooses among: bfloat16 only where the processor multiplies in it, else it's emulated.

    quantised: the scheme that fits the model, None if none does.
    """
    names = [FLOAT32, *([BFLOAT16] if has_bfloat16 else []), *([quantised] if quantised else [])]
    return tuple(names)


def choose_fastest(seconds: Mapping[str, Sequence[float]], kl_of: Callable[[str], float]) -> ProductChoice:
    """The fastest whose KL is below the bound, the nearest where none's is.

    seconds: of each candidate at each of `ROWS` rows. kl_of: asked from the fastest on, until one is near
    enough; float32's is 0.
    """
    by_speed = sorted(seconds, key=lambda name: score(seconds[name]))
    kl: dict[str, float] = {}
    for name in by_speed:
        kl[name] = 0.0 if name == FLOAT32 else kl_of(name)
        if kl[name] < KL_BOUND:
            break
    chosen = min(kl, key=lambda name: (not kl[name] < KL_BOUND, kl[name]))
    measured = tuple(MeasuredProducts(name, tuple(seconds[name]), kl.get(name)) for name in by_speed)
    rows = " / ".join(map(str, ROWS))
    reason = f"fastest of those near float32 (a step's products at {rows} rows, KL below {KL_BOUND})"
    refused = [found.figures() for found in measured if found.refused]
    warning = f"too far from float32 and not chosen: {'; '.join(refused)}" if refused else None
    return ProductChoice(chosen, reason, measured, warning)


def obey(name: str, seconds: Mapping[str, Sequence[float]]) -> ProductChoice:
    """The one that the configuration names, with a warning where it's far slower than another."""
    measured = tuple(
        MeasuredProducts(each, tuple(seconds[each]))
        for each in sorted(seconds, key=lambda n: score(seconds[n]))
    )
    fastest = measured[0]
    ratio = score(seconds[name]) / score(fastest.seconds)
    warning = None
    if ratio > WARNED_RATIO:
        figures = "; ".join(found.figures() for found in measured)
        warning = f"{name} was asked for and takes {ratio:.1f} x as long as {fastest.name} here: {figures}"
    return ProductChoice(name, "the configuration names it", measured, warning)
