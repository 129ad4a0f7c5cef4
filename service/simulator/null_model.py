"""A model that takes no time and has no text: a sequence's next token is its seed and position, whatever came
before."""

from __future__ import annotations

from pageturner.service.core.outputs import SampledToken, ScheduledSequence, TextDelta
from pageturner.service.core.request import NewRequest

_NO_TEXT = TextDelta("")


class NullStopCondition:
    """For requests without text."""

    def start(self, seq_id: int, request: NewRequest) -> None:
        return None

    def append(self, seq_id: int, token_id: int, *, may_stop: bool, is_stop_token: bool) -> TextDelta:
        return _NO_TEXT

    def finish(self, seq_id: int) -> str:
        return ""


def sampled_tokens(part: ScheduledSequence, seed: int) -> tuple[SampledToken, ...]:
    """The drafts that come true, and the token behind them; one token where there are none."""
    first = part.end - part.num_drafts
    tokens = [seed + first]
    for draft in part.token_ids[len(part.token_ids) - part.num_drafts :]:
        if draft != tokens[-1]:
            break
        tokens.append(tokens[-1] + 1)
    return tuple(map(SampledToken, tokens))
