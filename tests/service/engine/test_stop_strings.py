"""Stop strings against the plain definition, however the text is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from pageturner.service.core.outputs import TextDelta
from pageturner.service.engine.stop_strings import StopMatcher

SEARCH = settings(max_examples=2000, database=None, phases=[Phase.generate])
stop_sets = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)
piece_lists = st.lists(st.text("ab", max_size=4), max_size=8)


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The definition: the smallest end at which a stop is complete, and the longest stop there."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


def run(matcher: StopMatcher, pieces: Sequence[str]) -> tuple[str, str | None]:
    shown = ""
    for piece in pieces:
        delta = matcher.feed(piece)
        shown += delta.text
        if delta.matched_stop is not None:
            return shown + matcher.finish(), delta.matched_stop
    return shown + matcher.finish(), None


@given(piece_lists, stop_sets, st.booleans())
def test_the_outcome_is_that_of_the_whole_text(
    pieces: list[str], stops: list[str], include_stop: bool
) -> None:
    text = "".join(pieces)
    found = first_stop(text, stops)
    if found is None:
        expected: tuple[str, str | None] = text, None
    else:
        end, stop = found
        expected = text[: end if include_stop else end - len(stop)], stop
    assert run(StopMatcher(stops, include_stop=include_stop), pieces) == expected


@given(piece_lists, stop_sets)
def test_shown_text_never_holds_a_stop(pieces: list[str], stops: list[str]) -> None:
    shown, _ = run(StopMatcher(stops), pieces)
    assert not any(stop in shown for stop in stops)


@given(piece_lists, stop_sets)
def test_withheld_is_the_longest_end_that_may_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    matcher, text = StopMatcher(stops), ""
    for piece in pieces:
        text += piece
        if matcher.feed(piece).matched_stop is not None:
            assert matcher.withheld == ""
            return
        prefixes = {stop[:size] for stop in stops for size in range(len(stop))}
        assert matcher.withheld == max((p for p in prefixes if text.endswith(p)), key=len)


@given(piece_lists, piece_lists, stop_sets)
def test_a_stop_counts_by_where_it_is_complete(early: list[str], late: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(piece, may_stop=False).text for piece in early)
    text, matched = "".join(early), None
    for end in range(1, len("".join(late)) + 1):
        so_far = text + "".join(late)[:end]
        complete = [stop for stop in stops if so_far.endswith(stop)]
        if complete:
            matched = max(complete, key=len)
            expected = so_far[: -len(matched)]
            break
    else:
        expected = text + "".join(late)
    rest, found = run(matcher, late)
    assert (shown + rest, found) == (expected, matched)


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["b"])
    assert matcher.feed("abc") == TextDelta("a", "b")
    assert matcher.feed("more") == TextDelta("")
    assert matcher.finish() == ""


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty stop"):
        StopMatcher(["a", ""])


class WithinPieces(StopMatcher):
    """Looks for stops inside one piece only."""

    def feed(self, text: str, *, may_stop: bool = True) -> TextDelta:
        return StopMatcher(self._stops).feed(text + "\n")


class ForgetsItsPrefix(StopMatcher):
    """After a mismatch starts anew, instead of from the longest prefix still standing."""

    def _advance(self, character: str) -> str | None:
        self._failures = tuple((0,) * len(stop) for stop in self._stops)
        return super()._advance(character)


class ShortestWins(StopMatcher):
    """Of several stops complete at once, takes the shortest."""

    def _advance(self, character: str) -> str | None:
        completed = super()._advance(character)
        return completed and min((s for s in self._stops if completed.endswith(s)), key=len)


class NeverFlushes(StopMatcher):
    """Drops what it withheld at the end."""

    def finish(self) -> str:
        super().finish()
        return ""


@pytest.mark.parametrize("planted", [WithinPieces, ForgetsItsPrefix, ShortestWins, NeverFlushes])
def test_planted_bugs_are_found(planted: Callable[[Sequence[str]], StopMatcher]) -> None:
    def is_wrong(case: tuple[list[str], list[str]]) -> bool:
        pieces, stops = case
        return run(planted(stops), pieces) != run(StopMatcher(stops), ["".join(pieces)])

    assert find(
        st.tuples(piece_lists, stop_sets),
        is_wrong,
        settings=SEARCH,
        random=Random(0),
    )
