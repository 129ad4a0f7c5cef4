"""Stop strings that spell special tokens, which show no text.

A special token in such a stop is met in two ways: as the token, and as text that spells it. So each stop is
sought twice, once with a stand-in of one character for each special token, which its token adds to the text
that is searched and which is never shown. Stand-ins are lone surrogates: no text holds one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from re import Match

from pageturner.service.core.outputs import TextDelta
from pageturner.service.engine.control_tokens import ControlTokens
from pageturner.service.engine.stop_strings import StopMatcher

_FIRST_STAND_IN = 0xD800


@dataclass(frozen=True, slots=True)
class SpecialStops:
    """The stops of one request. stand_ins: what each special token in them adds to the searched text, by id.
    spelled: each stop with stand-ins -> as the request spells it."""

    stand_ins: Mapping[int, str]
    spelled: Mapping[str, str]

    @classmethod
    def of(cls, stops: Sequence[str], controls: ControlTokens) -> SpecialStops:
        """Empty where no stop spells a special token."""
        stand_ins: dict[int, str] = {}
        ids = controls.ids if stops else {}

        def stand_in(found: Match[str]) -> str:
            return stand_ins.setdefault(ids[found[0]], chr(_FIRST_STAND_IN + len(stand_ins)))

        marked = {controls.replace(stop, stand_in): stop for stop in stops}
        return cls(stand_ins, {mark: stop for mark, stop in marked.items() if mark != stop})

    def matcher(self, stops: Sequence[str], *, include_stop: bool) -> StopMatcher:
        """Of the stops in both forms."""
        return StopMatcher((*stops, *self.spelled), include_stop=include_stop)

    def shown(self, delta: TextDelta, *, include_stop: bool) -> TextDelta:
        """What a matcher gave, without stand-ins and with the stop as the request spells it."""
        if not self.stand_ins:
            return delta
        text, matched = delta.text, delta.matched_stop
        if matched is None or matched not in self.spelled:
            return TextDelta(self.hide(text), matched)
        stop = self.spelled[matched]
        if include_stop:
            return TextDelta(self.hide(text.removesuffix(matched)) + stop, stop)
        return TextDelta(self.hide(text), stop)

    def hide(self, text: str) -> str:
        """The text without stand-ins."""
        return text.translate({ord(stand_in): None for stand_in in self.stand_ins.values()})


NO_SPECIAL_STOPS = SpecialStops({}, {})
