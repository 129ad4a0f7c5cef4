"""What the client of a search that begins anew is told: what it lacks, or that its answers are others."""

from __future__ import annotations

from pageturner.service.core.known_answers import KnownAnswers
from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    Event,
    FinishedEvent,
    FinishReason,
    RequestTimings,
    SampledToken,
    TokenEvent,
    Usage,
)
from pageturner.service.core.request import ResumedChoice
from pageturner.service.errors import NotResumable, RequestAborted

TIMINGS = RequestTimings(0.0, 0.0, 0.0, 0, 0, 0)
END = FinishedEvent("r", Usage(1, 0, 3), TIMINGS)


def told(known: list[ResumedChoice], *events: Event) -> list[Event]:
    answers = KnownAnswers(known)
    return [news for event in events for news in answers.told(event)]


def tokens(index: int, *token_ids: int, text: str = "") -> TokenEvent:
    return TokenEvent("r", index, tuple(map(SampledToken, token_ids)), text)


def test_only_what_is_missing_is_told() -> None:
    known = [ResumedChoice((5, 6), 2), ResumedChoice((), 0)]
    first, second, end = told(known, tokens(0, 5, 6, 7, text="abc"), tokens(1, 8, text="d"), END)
    assert first == tokens(0, 7, text="c")
    assert (second, end) == (tokens(1, 8, text="d"), END)


def test_an_answer_that_never_comes_is_no_longer_the_one_that_was_begun() -> None:
    """A form may have fewer texts than choices, and the client tokens of one that there is not."""
    known = [ResumedChoice((5,), 0), ResumedChoice((9,), 0)]
    events = told(known, tokens(0, 5, 6), ChoiceFinishedEvent("r", 0, FinishReason.STOP), END)
    assert events[:1] == [tokens(0, 6)]
    (end,) = (event for event in events if isinstance(event, FinishedEvent))
    assert isinstance(end.error, NotResumable)
    assert "choice 1" in str(end.error)


def test_an_error_of_the_search_is_told_as_it_is() -> None:
    known = [ResumedChoice((5,), 0)]
    aborted = FinishedEvent("r", Usage(1, 0, 0), TIMINGS, RequestAborted("gone"))
    (end,) = told(known, aborted)
    assert isinstance(end, FinishedEvent)
    assert isinstance(end.error, RequestAborted)
