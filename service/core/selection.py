"""Which of a request's choices are told, and how likely each of them was. Events in, events out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    Event,
    FinishedEvent,
    SampledToken,
    TokenEvent,
)
from pageturner.service.core.sampling_params import SamplingParams


def best_choices(logprobs: Sequence[float], n: int) -> tuple[int, ...]:
    """The n choices of the highest cumulative log-probability, the best first; of equals the first."""
    return tuple(sorted(range(len(logprobs)), key=lambda index: (-logprobs[index], index))[:n])


class Selection:
    """Sums each choice's log-probabilities. Where more are sampled than are returned it keeps all of them
    to the end, and then tells the best by rank. Made for requests that need log-probabilities.

    has_all_tokens: False for an answer that is resumed: what its known tokens' log-probabilities were is not
    known here, so that no sum is told.
    """

    def __init__(self, params: SamplingParams, *, has_all_tokens: bool) -> None:
        self._params = params
        self._has_all_tokens = has_all_tokens
        self._sums = [0.0] * params.num_sequences
        self._texts: list[list[str]] = [[] for _ in self._sums]
        self._tokens: list[list[SampledToken]] = [[] for _ in self._sums]
        self._ends: dict[int, ChoiceFinishedEvent] = {}

    def told(self, event: Event) -> Iterator[Event]:
        """What the client is told now that this happened."""
        match event:
            case TokenEvent():
                for token in event.tokens:  # one by one, as a client adds them up
                    self._sums[event.index] += token.logprob or 0.0
                if self._params.is_selective:
                    self._texts[event.index].append(event.text)
                    self._tokens[event.index] += event.tokens
                else:
                    yield replace(event, tokens=self._as_asked(event.tokens))
            case ChoiceFinishedEvent():
                total = self._sums[event.index] if self._has_all_tokens else None
                end = replace(event, cumulative_logprob=total)
                if self._params.is_selective:
                    self._ends[event.index] = end
                else:
                    yield end
            case FinishedEvent(error=None):
                yield from self._best(event.request_id)
                yield event
            case _:
                yield event

    def _best(self, request_id: str) -> Iterator[Event]:
        """The choices that were kept back, by rank."""
        if not self._params.is_selective:
            return
        for rank, index in enumerate(best_choices(self._sums, self._params.n)):
            tokens, text = self._as_asked(self._tokens[index]), "".join(self._texts[index])
            yield TokenEvent(request_id, rank, tokens, text)
            yield replace(self._ends[index], request_id=request_id, index=rank)

    def _as_asked(self, tokens: Sequence[SampledToken]) -> tuple[SampledToken, ...]:
        """The tokens, without log-probabilities that the client did not ask for."""
        if self._params.logprobs is not None:
            return tuple(tokens)
        return tuple(SampledToken(token.token_id) for token in tokens)
