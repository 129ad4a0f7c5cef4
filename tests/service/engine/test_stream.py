"""The buffer of one reader: order, joining, and when it asks for a pause."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace
from random import Random
from typing import Any

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
    Usage,
)
from pageturner.service.engine.api import AcceptedEvent, StreamEvent
from pageturner.service.engine.stream import BufferedStream
from pageturner.service.errors import PageturnerError, RequestAborted, SlowConsumer

SEARCH = settings(max_examples=2000, database=None, phases=[Phase.generate])
ACCEPTED = AcceptedEvent("r", 1, 2, 3)


def make(
    max_tokens: int = 4, stream_class: type[BufferedStream] = BufferedStream
) -> tuple[BufferedStream, list[str]]:
    calls: list[str] = []
    stream = stream_class(
        "r",
        max_tokens,
        on_full=lambda: calls.append("full"),
        on_drained=lambda: calls.append("drained"),
        on_leave=lambda: calls.append("leave"),
        on_close=lambda: calls.append("close"),
    )
    return stream, calls


def token(token_id: int, index: int = 0) -> TokenEvent:
    return TokenEvent("r", index, (SampledToken(token_id, -token_id / 8),), f"{token_id},")


def finished(error: PageturnerError | None = None) -> FinishedEvent:
    return FinishedEvent("r", Usage(2, 0, 3), TIMINGS, error)


async def read_all(stream: BufferedStream) -> list[StreamEvent]:
    return [event async for event in stream]


async def test_what_waits_is_read_as_one() -> None:
    stream, _ = make()
    for event in (ACCEPTED, token(1), token(2), token(3), finished()):
        stream.push(event)
    joined = TokenEvent("r", 0, token(1).tokens + token(2).tokens + token(3).tokens, "1,2,3,")
    assert await read_all(stream) == [ACCEPTED, joined, finished()]


async def test_choices_are_joined_apart() -> None:
    stream, _ = make(100)
    end = ChoiceFinishedEvent("r", 0, FinishReason.STOP)
    for event in (token(1, 0), token(5, 1), token(2, 0), end, token(6, 1), finished()):
        stream.push(event)
    read = await read_all(stream)
    assert [event.text for event in read if isinstance(event, TokenEvent)] == ["1,2,", "5,6,"]
    assert read.index(end) > 0
    assert read[-1] == finished()


async def test_a_waiting_reader_gets_the_first_token_at_once() -> None:
    stream, _ = make()
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stream.push(token(1))
    stream.push(token(2))
    # Joined with what came before the reader's turn, not held for more.
    assert await reading == TokenEvent("r", 0, token(1).tokens + token(2).tokens, "1,2,")
    stream.push(token(3))
    assert await anext(stream) == token(3)


async def test_full_once_and_drained_once() -> None:
    stream, calls = make(max_tokens=4)
    for token_id in range(4):
        stream.push(token(token_id, index=token_id % 2))
    assert calls == ["full"]
    stream.push(token(9, index=2))
    stream.push(token(9, index=2))
    assert calls == ["full"]
    await anext(stream)
    assert calls == ["full"]
    assert stream.num_buffered_tokens == 4
    await anext(stream)
    assert calls == ["full", "drained"]
    assert stream.num_buffered_tokens == 2


async def test_an_error_comes_after_what_waits_and_once() -> None:
    stream, _ = make()
    stream.push(token(1))
    stream.push(finished(SlowConsumer("asleep")))
    assert await anext(stream) == token(1)
    with pytest.raises(SlowConsumer):
        await anext(stream)
    assert await read_all(stream) == []


async def test_nothing_comes_after_the_end() -> None:
    stream, calls = make(max_tokens=1)
    stream.push(finished())
    stream.push(token(1))
    stream.fail(RequestAborted("late"))
    assert await read_all(stream) == [finished()]
    assert calls == ["close"]


async def test_leaving_twice_is_leaving_once() -> None:
    stream, calls = make(max_tokens=1)
    stream.push(token(1))
    await stream.aclose()
    await stream.aclose()
    stream.push(token(2))
    stream.push(finished(RequestAborted("left")))
    assert calls == ["full", "leave", "close"]
    assert await read_all(stream) == []


async def test_leaving_after_the_end_asks_nothing() -> None:
    stream, calls = make()
    stream.push(finished())
    await stream.aclose()
    assert calls == ["close"]


async def test_leaving_wakes_a_reader() -> None:
    stream, _ = make()
    reading = asyncio.ensure_future(read_all(stream))
    await asyncio.sleep(0)
    await stream.aclose()
    assert await reading == []


scripts = st.lists(st.integers(0, 2) | st.just("read"), max_size=40)


def play(script: list[int | str], stream: BufferedStream, calls: list[str], max_tokens: int) -> None:
    """Write and read as the script says; check order, counts and when a pause was asked for."""

    async def scenario() -> None:
        written: dict[int, str] = defaultdict(str)
        read: dict[int, str] = defaultdict(str)
        written_tokens: dict[int, list[SampledToken]] = defaultdict(list)
        read_tokens: dict[int, list[SampledToken]] = defaultdict(list)
        num_tokens = 0
        for count, operation in enumerate(script):
            if isinstance(operation, int):
                event = token(count, operation)
                written[operation] += event.text
                written_tokens[operation] += event.tokens
                stream.push(event)
                num_tokens += 1
            elif stream.num_buffered_tokens:
                delta = await anext(stream)
                assert isinstance(delta, TokenEvent)
                assert len(delta.tokens) == delta.text.count(",")
                read[delta.index] += delta.text
                read_tokens[delta.index] += delta.tokens
                num_tokens -= len(delta.tokens)
            assert stream.num_buffered_tokens == num_tokens
            is_full = calls.count("full") - calls.count("drained")
            assert is_full in (0, 1)
            assert is_full or num_tokens < max_tokens
            assert not is_full or num_tokens > max_tokens // 2
        stream.push(finished())
        async for rest in stream:
            if isinstance(rest, TokenEvent):
                read[rest.index] += rest.text
                read_tokens[rest.index] += rest.tokens
        assert read == written
        assert read_tokens == written_tokens

    asyncio.run(scenario())


@given(scripts, st.integers(1, 6))
def test_each_choice_reads_as_it_was_written(script: list[int | str], max_tokens: int) -> None:
    play(script, *make(max_tokens), max_tokens)


class JoinsAcrossChoices(BufferedStream):
    def _push_tokens(self, event: TokenEvent) -> None:
        super()._push_tokens(replace(event, index=0))


class PausesTwice(BufferedStream):
    def _push_tokens(self, event: TokenEvent) -> None:
        self._is_full = False
        super()._push_tokens(event)


class ResumesTooEarly(BufferedStream):
    def _take(self, tokens: Any) -> TokenEvent:
        event = super()._take(tokens)
        if self._is_full:
            self._is_full = False
            self._on_drained()
        return event


class NeverResumes(BufferedStream):
    def _take(self, tokens: Any) -> TokenEvent:
        is_full, self._is_full = self._is_full, False
        event = super()._take(tokens)
        self._is_full = is_full
        return event


class JoinsInReverse(BufferedStream):
    def _take(self, tokens: Any) -> TokenEvent:
        event = super()._take(tokens)
        return replace(event, tokens=event.tokens[::-1])


@pytest.mark.parametrize(
    "planted", [JoinsInReverse, JoinsAcrossChoices, PausesTwice, ResumesTooEarly, NeverResumes]
)
def test_planted_bugs_are_found(planted: type[BufferedStream]) -> None:
    def is_wrong(script: list[int | str]) -> bool:
        try:
            play(script, *make(4, planted), 4)
        except AssertionError:
            return True
        return False

    find(scripts, is_wrong, settings=SEARCH, random=Random(0))
