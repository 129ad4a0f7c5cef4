"""A run: faults in a seeded order, each settled before the next, and the figures of it all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from chaos.faults import FAULTS, strangers
from chaos.faults.kind import Fault
from chaos.faults.lives import LIVES
from chaos.faults.processes import LONG
from chaos.ledger import Ledger
from chaos.server import Figures
from chaos.site import Site, site

EVERYTHING: Mapping[str, Fault] = {**FAULTS, **LIVES, **strangers.FAULTS, **LONG}
ALONE = frozenset(
    {
        "flood over the bounds",  # others' requests would be refused
        "gzip and deflate bombs",  # the server's peak of memory is looked at
        "wrong configurations",  # the policies must stay as they are
        *LONG,
        "server stopped for 3 s",
    }
)
"""Faults of which no other may be done at the same time."""

FAULT_SECONDS = 200.0
"""A fault that takes longer hangs."""

MOST_PROBLEMS = 20
"""After so many the run stops: what follows would only repeat them."""

Progress = Callable[[str, Ledger, Figures], None]


@dataclass(frozen=True, slots=True)
class Report:
    """What a run did and found. before: when each fault had been done once; after: at the end."""

    seed: int
    seconds: float
    num_requests: int
    num_accepted: int
    num_lost: int
    codes: Mapping[str, int]
    faults: Mapping[str, int]
    before: Figures
    after: Figures
    problems: Sequence[str]

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self) | {"num_faults": sum(self.faults.values())}


def no_progress(name: str, ledger: Ledger, figures: Figures) -> None:
    """Tell nothing."""


async def run(
    model: Path | str,
    folder: Path,
    *,
    seed: int,
    seconds: float = 0.0,
    names: Sequence[str] = tuple(EVERYTHING),
    at_once: int = 1,
    flags: Sequence[str] = (),
    progress: Progress = no_progress,
) -> Report:
    """Every fault once, in a random order, and again until so many seconds are over.

    at_once: so many faults are done at the same time, and settled together. flags: of the server.
    """
    random, ledger = Random(seed), Ledger()
    began = time.monotonic()
    async with site(model, folder, ledger, flags) as place:
        before: Figures | None = None
        while len(ledger.problems) < MOST_PROBLEMS:
            for wave in waves(names, at_once, random):
                await _do(place, wave, random)
                progress(" + ".join(wave), ledger, place.server.figures())
                if len(ledger.problems) >= MOST_PROBLEMS:
                    break
            before = before or place.server.figures()
            if time.monotonic() - began >= seconds:
                break
        after = place.server.figures()
    return Report(
        seed,
        round(time.monotonic() - began, 1),
        ledger.num_requests,
        ledger.num_accepted,
        ledger.num_lost,
        dict(ledger.codes.most_common()),
        dict(sorted(ledger.faults.items())),
        before or after,
        after,
        ledger.problems,
    )


def waves(names: Sequence[str], at_once: int, random: Random) -> list[tuple[str, ...]]:
    """All of the faults in a random order, so many at once, but for those that must be alone."""
    social = [name for name in names if name not in ALONE]
    random.shuffle(social)
    found = [tuple(social[start : start + at_once]) for start in range(0, len(social), at_once)]
    found += [(name,) for name in names if name in ALONE]
    random.shuffle(found)
    return found


async def _do(place: Site, wave: Sequence[str], random: Random) -> None:
    num_problems = len(place.ledger.problems)
    place.ledger.faults.update(wave)
    try:
        async with asyncio.timeout(FAULT_SECONDS):
            await asyncio.gather(*(EVERYTHING[name](place, Random(random.random())) for name in wave))
    except Exception as error:  # told with the names of what led to it
        place.ledger.problem(f"{type(error).__name__}: {error}")
    try:
        await place.settle()
    except Exception as error:  # likewise
        place.ledger.problem(f"settling: {type(error).__name__}: {error}")
    told = place.ledger.problems[num_problems:]
    place.ledger.problems[num_problems:] = [f"{' + '.join(wave)}: {text}" for text in told]
