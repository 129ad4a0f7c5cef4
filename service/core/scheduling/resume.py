"""The choices of an answer that broke off elsewhere and goes on here: where each of them stands.

Their known tokens are computed like a prompt's, as after a recompute. What they say is found out by giving
them to the stop condition once more, which also leaves it where it would be: what it held back is held back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    Event,
    FinishReason,
    StopCondition,
    TokenEvent,
)
from pageturner.service.core.request import NewRequest, ResumedChoice
from pageturner.service.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class ChoiceStart:
    """Where a choice begins. text: that its client lacks of its known tokens. reason: why these ended it,
    UNSPECIFIED where it goes on; matched: as ChoiceFinishedEvent has it."""

    text: str = ""
    reason: FinishReason = FinishReason.UNSPECIFIED
    matched: str | int | None = None

    @property
    def is_over(self) -> bool:
        """Whether no token is to be sampled."""
        return self.reason is not FinishReason.UNSPECIFIED


AFRESH = ChoiceStart()
"""A choice of which nothing is known."""


def start_choice(
    new: NewRequest, index: int, seq_id: int, max_tokens: int, stop_condition: StopCondition
) -> ChoiceStart:
    """Begin the text of a choice, and of the tokens that are known of it.

    A beam search begins anew, and so does the text of its choices, whatever is known of them. Raises
    InvalidArgument where no stream of this request can have sent what is known; what the stop condition
    raises passes through. In either case the choice's text has to be finished by the caller.
    """
    stop_condition.start(seq_id, new)
    if new.resumed:
        return _gone_through(new, index, new.resumed[index], seq_id, max_tokens, stop_condition)
    if index < len(new.known):
        start = _gone_through(new, index, new.known[index], seq_id, max_tokens, stop_condition)
        if not start.is_over:
            stop_condition.finish(seq_id)
        stop_condition.start(seq_id, new)
    return AFRESH


def _gone_through(
    new: NewRequest,
    index: int,
    resumed: ResumedChoice,
    seq_id: int,
    max_tokens: int,
    stop_condition: StopCondition,
) -> ChoiceStart:
    """Give the choice's known tokens to the stop condition. Raises as `start_choice`."""
    path = f"resume.choices[{index}]"
    if len(resumed.token_ids) > max_tokens:
        reason = f"{len(resumed.token_ids)} tokens; max_tokens is {max_tokens}"
        raise InvalidArgument(f"{path}.token_ids", reason)
    texts: list[str] = []
    end, matched = FinishReason.UNSPECIFIED, None
    stop_ids, min_tokens = frozenset(new.stop_ids), new.params.min_tokens
    for number, token_id in enumerate(resumed.token_ids, 1):
        if end is not FinishReason.UNSPECIFIED:
            raise InvalidArgument(f"{path}.token_ids[{number - 1}]", "comes after the choice's end")
        end, matched, text = _append(
            stop_condition, seq_id, token_id, number >= min_tokens, token_id in stop_ids, new.has_timely_ends
        )
        texts.append(text)
        if end is FinishReason.UNSPECIFIED and number == max_tokens:
            end = FinishReason.LENGTH
    if end is not FinishReason.UNSPECIFIED:
        texts.append(stop_condition.finish(seq_id))
    elif resumed.is_finished:
        raise InvalidArgument(f"{path}.finished", "its tokens do not end it")
    whole = "".join(texts)
    num_received = len(whole) if resumed.num_characters is None else resumed.num_characters
    if num_received > len(whole):
        reason = f"{num_received} characters; these tokens show {len(whole)}"
        raise InvalidArgument(f"{path}.text_characters", reason)
    return ChoiceStart(whole[num_received:], end, matched)


def _append(
    stop_condition: StopCondition,
    seq_id: int,
    token_id: int,
    may_stop: bool,
    is_stop_token: bool,
    is_timely: bool,
) -> tuple[FinishReason, str | int | None, str]:
    """Why a token ends its choice if it does, what it matched, and its text. is_timely: an end token ends it
    in any case."""
    delta = stop_condition.append(seq_id, token_id, may_stop=may_stop, is_stop_token=is_stop_token)
    if delta.matched_stop is not None:
        return FinishReason.STOP, delta.matched_stop, delta.text
    if is_stop_token and (may_stop or is_timely):
        return FinishReason.STOP, token_id, delta.text
    return FinishReason.UNSPECIFIED, None, delta.text


def events_of(new: NewRequest, starts: list[ChoiceStart]) -> Iterator[Event]:
    """What the client of a resumed answer can be told before any step."""
    for index, (resumed, start) in enumerate(zip(new.resumed, starts, strict=False)):
        if resumed.is_finished:
            continue
        if start.text:
            yield TokenEvent(new.request_id, index, (), start.text)
        if start.is_over:
            yield ChoiceFinishedEvent(new.request_id, index, start.reason, start.matched)
