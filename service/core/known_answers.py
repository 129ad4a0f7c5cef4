"""What the client of a search that begins anew has of its answers, and need not be told again.

A beam search is not gone on with from what its client received, which says nothing of the other beams. It is
done once more, to the same end where steps are exact, and what the client has is left out of what is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    Event,
    FinishedEvent,
    ScoredTokensEvent,
    TokenEvent,
)
from pageturner.service.core.request import ResumedChoice
from pageturner.service.errors import NotResumable


class KnownAnswers:
    """Events in, events out. choices: what the client has of each, its number of characters stated.

    Where the search comes to other tokens than the client has, nothing more is told, and the request ends
    with NotResumable.
    """

    def __init__(self, choices: Sequence[ResumedChoice]) -> None:
        self._choices = choices
        self._num_tokens = [0] * len(choices)
        self._num_characters = [0] * len(choices)
        self._error: NotResumable | None = None

    def told(self, event: Event) -> Iterator[Event]:
        """What is news to the client of what happened."""
        match event:
            case FinishedEvent():
                for index, choice in enumerate(self._choices):
                    if self._error is None and self._num_tokens[index] < len(choice.token_ids):
                        self._give_up(index)
                yield event if self._error is None else replace(event, error=event.error or self._error)
            case _ if self._error is not None:
                return
            case TokenEvent():
                yield from self._news(event)
            case ChoiceFinishedEvent():
                choice = self._choices[event.index]
                if self._num_tokens[event.index] < len(choice.token_ids):
                    self._give_up(event.index)
                elif not choice.is_finished:
                    yield event
            case ScoredTokensEvent() if any(choice.token_ids for choice in self._choices):
                return  # of the prompt, which came before any token
            case _:
                yield event

    def _news(self, event: TokenEvent) -> Iterator[TokenEvent]:
        index, choice = event.index, self._choices[event.index]
        first = self._num_tokens[index]
        known = choice.token_ids[first : first + len(event.tokens)]
        if known != tuple(token.token_id for token in event.tokens[: len(known)]):
            self._give_up(index)
            return
        num_had = max(0, (choice.num_characters or 0) - self._num_characters[index])
        self._num_tokens[index] += len(event.tokens)
        self._num_characters[index] += len(event.text)
        tokens, text = event.tokens[len(known) :], event.text[num_had:]
        if (tokens or text) and not choice.is_finished:
            yield replace(event, tokens=tokens, text=text)

    def _give_up(self, index: int) -> None:
        reason = f"the search came to other tokens than choice {index} began with"
        self._error = NotResumable(reason, "")
