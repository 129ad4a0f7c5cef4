"""Policies that answer nonsense, each in every way its axis allows; the core must survive them all."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pageturner.policies.events import PolicyEvent
from pageturner.policies.interfaces import Admission, BatchSplit, KeyChange, PolicySet, Reclaim
from pageturner.policies.views import (
    AdmissionView,
    BatchView,
    BlockView,
    LoadView,
    Rates,
    RequestView,
    VictimView,
)


class SpiteError(Exception):
    """Raises once more whenever it is looked at."""

    def __str__(self) -> str:
        raise GeneratorExit  # no Exception, and yet one that pytest can report

    __repr__ = __str__


RAISED: tuple[BaseException, ...] = (
    RuntimeError("junk"),
    SpiteError(),
    SystemExit(1),
    KeyboardInterrupt(),
    GeneratorExit(),
    StopIteration(),
    MemoryError(),
    RecursionError(),
    asyncio.CancelledError(),
)


class LyingInt(int):
    """Compares as nothing does, and not even with itself."""

    def __eq__(self, other: object) -> bool:
        raise SystemExit(4)

    __lt__ = __le__ = __gt__ = __ge__ = __eq__

    def __hash__(self) -> int:
        raise KeyboardInterrupt

    def __int__(self) -> int:
        return -7

    __index__ = __int__

    def __float__(self) -> float:
        raise SystemExit(5)


class LyingStr(str):
    """A text that is equal to everything and has no hash."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    def __lt__(self, other: object) -> bool:
        raise SystemExit(6)

    def __hash__(self) -> int:
        raise SystemExit(7)

    def __str__(self) -> str:
        return "another"


class LyingTuple(tuple[Any, ...]):
    """Longer than it says, and endless to iterate over."""

    def __len__(self) -> int:
        return 10**18

    def __iter__(self) -> Iterator[Any]:
        return itertools.count()


class Impostor:
    """Says that it is of any class that is asked for, and has no repr."""

    def __init__(self, claimed: type) -> None:
        self._claimed = claimed

    @property  # type: ignore[misc]  # it lies
    def __class__(self) -> Any:
        return self._claimed

    def __repr__(self) -> str:
        raise GeneratorExit

    def __eq__(self, other: object) -> bool:
        raise SystemExit(8)

    __hash__ = None  # type: ignore[assignment]  # a value that cannot be a key


@dataclass(frozen=True)
class LyingSplit(BatchSplit):
    """A BatchSplit whose numbers change each time they are read."""

    def __getattribute__(self, name: str) -> Any:
        return random.randrange(-3, 9) if name.endswith("_tokens") else super().__getattribute__(name)


ANYTHING: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: 3,
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: 10**400,
    lambda: "x",
    lambda: "1.5",
    lambda: LyingInt(1),
    lambda: LyingStr("r1"),
    lambda: LyingTuple((1, 2)),
    lambda: Impostor(tuple),
    lambda: itertools.count(),
    lambda: (1,) * 100_000,
    lambda: "x" * 1_000_000,
    lambda: {"r0": 1},
    lambda: {"r0", "r1"},
    lambda: _raise_midway(),
)
"""What no axis takes, or what only looks as if it were right."""


def _raise_midway() -> Iterator[str]:
    yield "r0"
    raise SystemExit(9)


@dataclass(frozen=True)
class _Junk:
    """rng: the only unseeded thing about junk would be its source, so it is given."""

    rng: random.Random = field(compare=False)

    def _any_of(self, *answers: Any) -> Any:
        """One of these answers, for the most part; else an exception, or an answer of ANYTHING."""
        kind = self.rng.randrange(4)
        if kind == 0:
            raise self.rng.choice(RAISED)
        return self.rng.choice(ANYTHING)() if kind == 1 else self.rng.choice(answers)


@dataclass(frozen=True)
class JunkQueue(_Junk):
    key_change: ClassVar[KeyChange] = KeyChange.WITH_TIME

    def key(self, request: RequestView, load: LoadView) -> Any:
        return self._any_of(
            (),
            ("a",),
            (1, "b"),
            (float("nan"),),
            (float("inf"),),
            (object(),),
            (LyingInt(2), LyingStr("c")),
            (True, 10**300),
            (10**4000,),
        )


@dataclass(frozen=True)
class ForgetfulQueue(JunkQueue):
    """Its memory raises, or becomes rubbish."""

    def initial_state(self) -> Any:
        return self._any_of((), (1,), 7)

    def fold(self, state: Any, event: PolicyEvent) -> Any:
        return self._any_of(state, (event,), None, Impostor(tuple))

    def key(self, request: RequestView, load: LoadView, *, state: Any = None) -> Any:
        return (LyingInt(len(state)),) if isinstance(state, tuple) else super().key(request, load)


@dataclass(frozen=True)
class UntouchableQueue(JunkQueue):
    """Looking up any of its attributes raises now and then."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__") and name != "rng":
            rng: random.Random = object.__getattribute__(self, "rng")
            if rng.randrange(8) == 0:
                raise rng.choice(RAISED)
        return object.__getattribute__(self, name)


@dataclass(frozen=True)
class JunkAdmission(_Junk):
    def decide(self, candidate: AdmissionView, load: LoadView) -> Any:
        return self._any_of(*Admission, "admit", Impostor(Admission))


@dataclass(frozen=True)
class JunkBatch(_Junk):
    def split(self, batch: BatchView) -> Any:
        return self._any_of(
            BatchSplit(0, 0),
            BatchSplit(-1, 5),
            BatchSplit(10**9, 0),
            BatchSplit(1, 0),
            BatchSplit(0, 1),
            BatchSplit(1, 1, 0),
            BatchSplit(0, batch.token_budget, 1),
            BatchSplit(LyingInt(1), LyingInt(1)),
            BatchSplit(True, True),
            BatchSplit("1", "1"),  # type: ignore[arg-type]  # it lies
            LyingSplit(1, 1),
            Impostor(BatchSplit),
        )


@dataclass(frozen=True)
class JunkVictim(_Junk):
    def rank(self, candidates: Sequence[VictimView], claimant: RequestView, load: LoadView) -> Any:
        ids = [view.request.request_id for view in candidates]
        if self.rng.randrange(4) == 0:
            candidates.clear()  # type: ignore[attr-defined]  # as a list would let it
        self.rng.shuffle(ids)
        return self._any_of(
            [],
            ids,
            ids,
            iter(ids),
            ids[:1],
            ids + ids,
            ["unknown", *ids],
            ids * 1000,
            itertools.cycle(ids),
            [LyingStr(name) for name in ids],
            [Impostor(str) for _ in ids],
            [[]],
            7,
        )


@dataclass(frozen=True)
class JunkReclaim(_Junk):
    def choose(self, victim: VictimView, num_blocks_short: int, rates: Rates, load: LoadView) -> Any:
        return self._any_of(*Reclaim, "swap", Impostor(Reclaim))


@dataclass(frozen=True)
class JunkEviction(_Junk):
    def score(self, block: BlockView) -> Any:
        return self._any_of(0, -1.5, True, LyingInt(3), Impostor(float))


def junk_policies(seed: int) -> PolicySet:
    """One of nonsense for each axis."""
    rng = random.Random(seed)
    queue = rng.choice((JunkQueue, ForgetfulQueue, UntouchableQueue))
    return PolicySet(
        queue(rng),
        JunkAdmission(rng),
        JunkBatch(rng),
        JunkVictim(rng),
        JunkReclaim(rng),
        JunkEviction(rng),
    )
