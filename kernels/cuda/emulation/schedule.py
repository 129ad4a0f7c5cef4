"""In which order emulated threads run: a kernel that is right gives the same bits under all of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Order(IntEnum):
    """Of the threads of a block, and of the blocks of a grid. The values are those of machine.h."""

    AS_NUMBERED = 0
    REVERSED = 1
    SHUFFLED = 2


@dataclass(frozen=True, slots=True)
class Schedule:
    """A thread runs until it must wait; then another takes over.

    greedy: the first in order that can run, so that the first warp runs as far ahead of the others as its
    barriers allow; otherwise threads take turns. eager_copies: an asynchronous copy is done when it is
    started, as early as a GPU may; otherwise when it is waited for, as late as a GPU may.
    """

    name: str
    order: Order = Order.AS_NUMBERED
    seed: int = 0
    greedy: bool = False
    eager_copies: bool = False

    def __str__(self) -> str:
        return self.name


IN_ORDER = Schedule("in-order")
REVERSED = Schedule("reversed", Order.REVERSED)
SHUFFLED = Schedule("shuffled", Order.SHUFFLED, seed=7)
GREEDY = Schedule("greedy", greedy=True)
GREEDY_EAGER = Schedule("greedy-eager", greedy=True, eager_copies=True)
SCHEDULES = (IN_ORDER, REVERSED, SHUFFLED, GREEDY, GREEDY_EAGER)
