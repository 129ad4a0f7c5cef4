"""Signs and numbers as the view writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pageturner.service.client import BlockUse
from pageturner.service.top.block_map import USES


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters that a terminal has. uses: a block by its use, told apart without colours too."""

    uses: dict[BlockUse, str]
    course: str
    none: str
    dot: str


UNICODE = Glyphs(dict(zip(USES, "█▓░▒·", strict=True)), course="▁▂▃▄▅▆▇█", none="-", dot="·")
ASCII = Glyphs(dict(zip(USES, "#%~o.", strict=True)), course="_.-=+*#@", none="-", dot="|")


def glyphs_of(encoding: str | None) -> Glyphs:
    """What an output of this encoding shows."""
    try:
        "█▓░▒·▁".encode(encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return ASCII
    return UNICODE


def count(number: float) -> str:
    """1,234 and 12.3k: at most five characters from a thousand on."""
    if abs(number) < 9999.5:
        return f"{number:,.0f}"
    for unit, size in (("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if abs(number) < 999.5 * size:
            return f"{number / size:.3g}{unit}"
    return f"{number / 1e12:.3g}T"


def rate(number: float | None, glyphs: Glyphs) -> str:
    """A number a second; of little, with a digit behind the point."""
    if number is None:
        return glyphs.none
    return f"{number:.1f}" if 0 < abs(number) < 10 else count(number)


def duration(seconds: float | None, glyphs: Glyphs = UNICODE) -> str:
    """18 ms, 1.2 s, 3 m 20 s, 2 h 5 m, 3 d 4 h."""
    if seconds is None:
        return glyphs.none
    if seconds < 0.9995:
        return f"{max(0.0, seconds) * 1000:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for size, unit, small_size, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "m")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // small_size} {small}"
    return f"{whole // 60} m {whole % 60} s"


def share(part: float, whole: float, glyphs: Glyphs) -> str:
    """78 %."""
    return f"{100 * part / whole:.0f} %" if whole else glyphs.none


def course_line(values: Sequence[float], width: int, glyphs: Glyphs) -> str:
    """The newest values, on the right, from nothing to the largest."""
    shown = list(values[-width:]) if width > 0 else []
    top = max(shown, default=0.0)
    last = len(glyphs.course) - 1
    return "".join(glyphs.course[round(last * value / top) if top else 0] for value in shown)
