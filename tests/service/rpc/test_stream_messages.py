"""The messages of a stream are those that the generated code makes of its events one by one."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from support.scripted import TIMINGS

from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    FinishedEvent,
    FinishReason,
    SampledToken,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from pageturner.service.engine.api import AcceptedEvent, StreamEvent
from pageturner.service.rpc import convert
from pageturner.service.rpc.stream_messages import StreamMessages
from pageturner.v1 import generation_pb2 as pb

token_ids = st.integers(0, (1 << 32) - 1)
plain_tokens = st.builds(SampledToken, token_ids)
told_tokens = st.builds(
    SampledToken,
    token_ids,
    st.floats(-50, 0, width=32),
    st.lists(st.builds(TokenLogprob, token_ids, st.floats(-50, 0, width=32)), max_size=3).map(tuple),
)
deltas = st.builds(
    TokenEvent,
    st.just("r"),
    st.integers(0, 15),
    st.lists(plain_tokens, max_size=5).map(tuple) | st.lists(told_tokens, max_size=5).map(tuple),
    st.text(max_size=8),
)
others = st.sampled_from(
    [
        AcceptedEvent("r", (1 << 64) - 1, 3, 4),
        ChoiceFinishedEvent("r", 2, FinishReason.STOP, "end"),
        ChoiceFinishedEvent("r", 0, FinishReason.STOP, 7),
        FinishedEvent("r", Usage(1, 2, 3), TIMINGS, policies={"queue": "fcfs"}, policies_changed=True),
    ]
)
streams = st.lists(deltas | others, max_size=12)


def check(messages: StreamMessages, events: list[StreamEvent]) -> None:
    for number, event in enumerate(events):
        expected = convert.from_event(event)
        expected.sequence_number = number
        found = messages.message(event).SerializeToString()
        assert pb.GenerateStreamResponse.FromString(found) == expected
        assert found == expected.SerializeToString(deterministic=True)


@given(streams)
def test_each_message_says_what_its_event_says(events: list[StreamEvent]) -> None:
    check(StreamMessages("r"), events)


class KeepsTheTokensBefore(StreamMessages):
    def message(self, event: StreamEvent) -> pb.GenerateStreamResponse:
        before = list(self._token_ids)
        message = super().message(event)
        if message is self._ordinary:
            self._token_ids.extend(before)
        return message


class ForgetsTheChoice(StreamMessages):
    def message(self, event: StreamEvent) -> pb.GenerateStreamResponse:
        index = self._delta.index
        message = super().message(event)
        if message is self._ordinary:
            self._delta.index = index
        return message


class ForgetsLogprobs(StreamMessages):
    def message(self, event: StreamEvent) -> pb.GenerateStreamResponse:
        if isinstance(event, TokenEvent):
            tokens = tuple(SampledToken(token.token_id) for token in event.tokens)
            event = TokenEvent(event.request_id, event.index, tokens, event.text)
        return super().message(event)


@pytest.mark.parametrize("planted", [KeepsTheTokensBefore, ForgetsTheChoice, ForgetsLogprobs])
def test_planted_bugs_are_found(planted: type[StreamMessages]) -> None:
    def is_wrong(events: list[StreamEvent]) -> bool:
        try:
            check(planted("r"), events)
        except AssertionError:
            return True
        return False

    search = settings(max_examples=2000, database=None, phases=[Phase.generate])
    find(streams, is_wrong, settings=search, random=Random(0))
