"""The crossing from the engine thread to the loop: order, what waits and for how long, and the figures."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, cast

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from pageturner.service.core.outputs import SampledToken, SchedulerStats, TokenEvent
from pageturner.service.engine.api import AcceptedEvent
from pageturner.service.engine.outbox import LONGEST_REST, MOST_BUSY, Outbox
from pageturner.service.engine.thread_messages import EngineOutput

SEARCH = settings(max_examples=2000, database=None, phases=[Phase.generate])


class ToldLoop:
    """As much of an event loop as an outbox uses; `turn` runs what is due."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cpu = 0.0
        self.num_wakes = 0
        self.is_shut = False
        self._soon: list[Callable[[], None]] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def is_closed(self) -> bool:
        return self.is_shut

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        self.num_wakes += 1
        self._soon.append(callback)

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (when, len(self._timers), callback))

    def turn(self) -> None:
        while self._timers and self._timers[0][0] <= self.now:
            self._soon.append(heapq.heappop(self._timers)[2])
        soon, self._soon = self._soon, []
        for callback in soon:
            callback()


def make(outbox_class: type[Outbox] = Outbox) -> tuple[Outbox, ToldLoop, list[tuple[float, Any, int]]]:
    """crossed: when, what, and how many steps the figures know of."""
    loop = ToldLoop()
    crossed: list[tuple[float, Any, int]] = []

    def deliver(outputs: Sequence[EngineOutput], stats: SchedulerStats) -> None:
        crossed.extend((loop.now, output, stats.num_steps_total) for output in outputs)
        if not outputs:
            crossed.append((loop.now, None, stats.num_steps_total))

    return outbox_class(cast(Any, loop), deliver, lambda: loop.cpu), loop, crossed


def token(number: int) -> TokenEvent:
    return TokenEvent("r", 0, (SampledToken(number),), "")


def figures(number: int) -> SchedulerStats:
    return SchedulerStats(num_steps_total=number)


def test_one_wake_up_for_all_that_waits() -> None:
    outbox, loop, crossed = make()
    for number in range(3):
        outbox.put((token(number),), figures(number))
    assert loop.num_wakes == 1
    loop.turn()
    assert [output for _, output, _ in crossed] == [token(0), token(1), token(2)]


def test_tokens_cross_at_once_while_the_loop_keeps_up() -> None:
    outbox, loop, crossed = make()
    for number in range(1, 20):
        loop.now += 0.010
        loop.cpu += 0.010 * MOST_BUSY * 0.99
        outbox.put((token(number),), figures(number))
        loop.turn()
        assert crossed[-1][:2] == (loop.now, token(number))


def test_tokens_wait_for_a_loop_that_is_behind_and_cross_as_one() -> None:
    outbox, loop, crossed = make()
    loop.now, loop.cpu = 0.001, 0.002
    for number in range(4):
        outbox.put((token(number),), figures(number))
        loop.turn()
    assert crossed == []
    loop.now = 0.002 / MOST_BUSY
    loop.turn()
    assert len(crossed) == 4
    assert {at for at, _, _ in crossed} == {loop.now}


def test_nothing_waits_longer_than_the_longest_rest() -> None:
    outbox, loop, crossed = make()
    loop.cpu = 1e9
    outbox.put((token(1),), figures(1))
    loop.turn()
    assert crossed == []
    loop.now = LONGEST_REST
    loop.turn()
    assert len(crossed) == 1


def test_answers_do_not_wait_and_figures_never_go_back() -> None:
    outbox, loop, crossed = make()
    accepted = AcceptedEvent("s", 1, 2, 3)
    loop.cpu = 0.010
    outbox.put((token(1),), figures(1))
    outbox.put((accepted, token(2)), figures(2))
    loop.turn()
    assert [(output, steps) for _, output, steps in crossed] == [(accepted, 2)]
    outbox.cross()
    assert [(output, steps) for _, output, steps in crossed[1:]] == [(token(1), 2), (token(2), 2)]


def test_figures_alone_cross_at_once() -> None:
    outbox, loop, crossed = make()
    loop.cpu = 0.010
    outbox.put((), figures(7))
    loop.turn()
    assert crossed == [(0.0, None, 7)]


def test_a_closed_loop_is_left_alone() -> None:
    outbox, loop, _ = make()
    loop.is_shut = True
    outbox.put((token(1),), figures(1))
    assert loop.num_wakes == 0


moves = st.lists(
    st.sampled_from(["put", "answer", "turn"]) | st.tuples(st.floats(0, 0.1), st.floats(0, 0.1)), max_size=30
)
Moves = list[str | tuple[float, float]]


def play(script: Moves, outbox_class: type[Outbox] = Outbox) -> None:
    """Whatever the engine and the clock do: order, and a bound on the wait, and nothing lost."""
    outbox, loop, crossed = make(outbox_class)
    num_events = num_answers = 0
    answers_before: dict[int, int] = {}
    for move in script:
        if move == "put":
            outbox.put((token(num_events),), figures(num_events))
            answers_before[num_events] = num_answers
            num_events += 1
        elif move == "answer":
            num_answers += 1
            outbox.put((AcceptedEvent("s", num_answers, 0, 0),), figures(num_events))
        elif move == "turn":
            loop.turn()
        else:
            assert isinstance(move, tuple)
            loop.now += move[0]
            loop.cpu += move[1]
            loop.turn()
    for _ in range(2):  # asked for in one turn, due by the next
        loop.now += LONGEST_REST
        loop.turn()
    events: list[int] = []
    answers: list[int] = []
    for _, output, _ in crossed:
        if isinstance(output, AcceptedEvent):
            answers.append(output.seed)
        else:
            number = output.tokens[0].token_id
            events.append(number)
            assert len(answers) >= answers_before[number], "tokens overtook an answer"
    assert events == list(range(num_events))
    assert answers == list(range(1, num_answers + 1))
    known = [steps for _, _, steps in crossed]
    assert known == sorted(known)


@given(moves)
def test_nothing_is_lost_or_overtaken(script: Moves) -> None:
    play(script)


class AsksOnce(Outbox):
    def cross(self) -> None:
        super().cross()
        self._is_asked = True


class NewestFirst(Outbox):
    def cross(self) -> None:
        self._events.reverse()
        super().cross()


class OvertakesAnswers(Outbox):
    def cross(self) -> None:
        answers, self._answers = self._answers, deque()
        super().cross()
        self._answers = answers


class FiguresGoBack(Outbox):
    def _hand_over(self, number: int, outputs: Sequence[EngineOutput], stats: SchedulerStats) -> None:
        self._newest = 0, stats
        super()._hand_over(number, outputs, stats)


@pytest.mark.parametrize("planted", [AsksOnce, NewestFirst, OvertakesAnswers, FiguresGoBack])
def test_planted_bugs_are_found(planted: type[Outbox]) -> None:
    def is_wrong(script: Moves) -> bool:
        try:
            play(script, planted)
        except AssertionError:
            return True
        return False

    find(moves, is_wrong, settings=SEARCH, random=Random(0))
