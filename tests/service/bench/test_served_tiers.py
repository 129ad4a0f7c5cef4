"""`bench cache --only tiers`: conversations of ten times the pool, each turn behind all that was said."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from pageturner.service.bench.served_tiers import (
    ANSWER_TOKENS,
    BLOCK_SIZE,
    NEW_TOKENS,
    POOL_SHARE,
    Conversations,
    TierLoad,
)
from pageturner.service.client import FinishedEvent, TokenEvent
from pageturner.service.core.outputs import RequestTimings, SampledToken, Usage


def test_the_conversations_take_ten_times_the_pool() -> None:
    load = TierLoad()
    assert load.num_blocks * BLOCK_SIZE * POOL_SHARE <= load.num_tokens
    one = load.history_tokens + load.num_turns * (ANSWER_TOKENS + NEW_TOKENS)
    assert load.num_blocks * BLOCK_SIZE > one, "a turn fits"


class Client:
    """Answers 7, and tells of half of each prompt that it was cached."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    def stream(self, prompt: list[int], **options: Any) -> AbstractContextManager[list[object]]:
        self.prompts.append(prompt)
        tokens = tuple(SampledToken(7) for _ in range(options["max_tokens"]))
        usage = Usage(len(prompt), len(prompt) // 2, len(tokens))
        return nullcontext(
            [
                SimpleNamespace(),
                TokenEvent("r", 0, tokens, ""),
                FinishedEvent("r", usage, RequestTimings(0.0, 0.0, 0.0, 0, 0, 0)),
            ]
        )


def test_a_turn_holds_all_that_came_before_and_something_new() -> None:
    client = Client()
    talk = Conversations(TierLoad(num_conversations=2, history_tokens=64))
    seconds, share = talk.turn(client, 0)  # type: ignore[arg-type] # what it asks of one
    talk.turn(client, 0)  # type: ignore[arg-type]
    first, second = client.prompts
    assert seconds > 0
    assert share == pytest.approx(0.5)
    assert len(first) == 64 + NEW_TOKENS
    assert second[: len(first) + ANSWER_TOKENS] == first + [7] * ANSWER_TOKENS
    assert len(second) == len(first) + ANSWER_TOKENS + NEW_TOKENS
    assert Conversations(TierLoad(num_conversations=2, history_tokens=64)).said[0] == first[:64]
