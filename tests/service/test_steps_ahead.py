"""One step ahead from end to end: the tokens are those of a service that plans after each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.model_folders import save_chat_model

from pageturner.service.client import Completion, PromptLike
from pageturner.service.llm import LLM
from pageturner.service.model.runner import Runner

PROMPTS: list[PromptLike] = [
    [(7 * number + i) % 90 for i in range(3 + 5 * number % 23)] for number in range(10)
]
WAYS_TO_ASK: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn, three choices": {"temperature": 1.0, "seed": 3, "n": 3},
    "with penalties": {"temperature": 0.8, "seed": 4, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "stopped by a text": {"temperature": 1.0, "seed": 5, "stop": ["e", "a"]},
    "with logprobs": {"temperature": 0.0, "logprobs": 2, "min_tokens": 5},
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLM]:
    folder = save_chat_model(tmp_path_factory.mktemp("tiny"))

    def make(steps_ahead: int, **cache: Any) -> LLM:
        return LLM(
            {"source": str(folder), "device": "cpu", "num_threads": 1, "deterministic": True},
            cache={"num_blocks": 512, "block_size": 4, "swap_space": 0} | cache,
            scheduler={"max_num_batched_tokens": 32, "max_num_seqs": 8},
            policies={"admission": "first-chunk"},
            engine={"steps_ahead": steps_ahead},
        )

    return make


def answers(llm: LLM, options: dict[str, Any]) -> list[object]:
    return [told(answer) for answer in llm.generate(PROMPTS, max_tokens=20, **options)]


def told(answer: Completion) -> object:
    return [(choice.tokens, choice.text, choice.reason) for choice in answer.choices]


@pytest.mark.parametrize("cache", [{}, {"num_blocks": 30, "swap_space": "1MiB"}], ids=["ample", "scarce"])
def test_one_step_ahead_gives_the_tokens_of_none(make: Callable[..., LLM], cache: dict[str, Any]) -> None:
    with make(0) as none, make(1, **cache) as one:
        for name, options in WAYS_TO_ASK.items():
            assert answers(one, options) == answers(none, options), name
        stats = one.load()
        is_preempted = stats.num_swap_preemptions_total + stats.num_recompute_preemptions_total > 0
        assert is_preempted == bool(cache)
        assert stats.num_blocks_used == 0


def test_tokens_that_are_not_passed_on_are_noticed(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = WAYS_TO_ASK["greedy"]
    with make(0) as none:
        expected = answers(none, options)
    monkeypatch.setattr(Runner, "note_sampled", lambda self, sampled: None)
    with make(1) as one:
        assert answers(one, options) != expected
