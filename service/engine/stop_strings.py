"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from pageturner.service.core.outputs import TextDelta


class StopMatcher:
    """Lets text through until a stop string is complete, withholding only what may become one.

    The match that is complete first wins; of several that end at the same character, the longest.
    So the outcome depends on the text alone, never on how it was cut into pieces. Withheld is the
    longest end of the text so far that is a proper prefix of a stop. (Knuth, Morris and Pratt 1977,
    one automaton a stop: O(1) amortised a character and stop.)
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if not all(stops):
            raise ValueError("an empty stop string would match everywhere")
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._failures = tuple(_failure_function(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._include_stop = include_stop
        self._withheld = ""
        self._is_done = False

    @property
    def withheld(self) -> str:
        return self._withheld

    def feed(self, text: str, *, may_stop: bool = True) -> TextDelta:
        """The text to show now. A stop completed while may_stop is False passes as ordinary text.

        After a match nothing more comes out.
        """
        if self._is_done:
            return TextDelta("")
        # Most text begins no stop, and then nothing is to be matched.
        if not self._withheld and self._first_characters.isdisjoint(text):
            return TextDelta(text)
        text = self._withheld + text
        for end in range(len(self._withheld) + 1, len(text) + 1):
            completed = self._advance(text[end - 1])
            if completed is not None and may_stop:
                self._is_done, self._withheld = True, ""
                return TextDelta(text[: end if self._include_stop else end - len(completed)], completed)
        shown = len(text) - max(self._matched)
        self._withheld = text[shown:]
        return TextDelta(text[:shown])

    def finish(self) -> str:
        """What was withheld: no more text comes, so it is no stop."""
        withheld, self._withheld, self._is_done = self._withheld, "", True
        return withheld

    def _advance(self, character: str) -> str | None:
        """Take one character in each automaton; the longest stop that it completes."""
        completed = None
        for i, stop in enumerate(self._stops):
            matched, failure = self._matched[i], self._failures[i]
            while matched and stop[matched] != character:
                matched = failure[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                completed = completed or stop
                matched = failure[matched - 1]
            self._matched[i] = matched
        return completed


def _failure_function(pattern: str) -> tuple[int, ...]:
    """For each prefix of the pattern, its longest proper end that is a prefix again."""
    failure = [0] * len(pattern)
    matched = 0
    for i in range(1, len(pattern)):
        while matched and pattern[matched] != pattern[i]:
            matched = failure[matched - 1]
        matched += pattern[matched] == pattern[i]
        failure[i] = matched
    return tuple(failure)
