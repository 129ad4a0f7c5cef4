"""Real models that guess ahead: the bits of answers without guesses, and what users are told of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.model_folders import save_chat_model

from pageturner.service.client.values import Completion
from pageturner.service.config import load_config
from pageturner.service.errors import ConfigError, InvalidArgument
from pageturner.service.llm import LLM

COPIED = "The grey heron stood in the shallow water by the old stone bridge and waited for the fish."
PROMPTS = [
    f"Each text is copied word for word.\n\nText: {COPIED}\nCopy: {COPIED}\n\nText: {COPIED}\nCopy:",
    "la la la la la la la la",
    "Once upon a time",
]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3, "n": 2, "logprobs": 1},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.8, "seed": 9, "min_tokens": 20, "stop": ["water", "fish"]},
]


@pytest.fixture(scope="module", params=["tiny", "embedded"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, LLM]]:
    """Without and with guesses; the other has a small pool and preempts."""
    model: dict[str, Any] = {"source": "embedded", "device": "cpu", "quantization": "file"}
    if request.param == "tiny":
        folder = save_chat_model(tmp_path_factory.mktemp("tiny"))
        model = {"source": str(folder), "device": "cpu", "dtype": "float32", "deterministic": True}
    speculation = {"method": "ngram", "row_cost": 0.01, "min_ngram": 1}
    with (
        LLM(model, cache={"num_blocks": 64, "swap_space": 0}) as plain,
        LLM(model, cache={"num_blocks": 24, "swap_space": 0}, speculation=speculation) as drafting,
    ):
        assert plain.model.deterministic
        yield plain, drafting


def told(completion: Completion) -> list[tuple[object, ...]]:
    """All that a client sees of an answer, save for what guesses cost."""
    return [(choice.tokens, choice.text, choice.reason, choice.matched) for choice in completion.choices]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_an_answer_has_the_bits_that_it_has_without_guesses(
    pair: tuple[LLM, LLM], params: dict[str, Any]
) -> None:
    plain, drafting = pair
    options = {"max_tokens": 40, "ignore_eos": True, **params}
    expected = plain.generate(PROMPTS, **options)
    answers = drafting.generate(PROMPTS, **options)
    for before, after in zip(expected, answers, strict=True):
        assert told(after) == told(before)
        assert before.usage.num_drafted_tokens == 0
        assert after.usage.num_accepted_drafts <= after.usage.num_drafted_tokens
    if plain.model.vocab_size > 10_000:  # the other one, of random weights, hardly says anything twice
        assert sum(answer.usage.num_drafted_tokens for answer in answers) > 0
    load = drafting.load()
    assert load.num_blocks_used == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_in_a_form_is_the_same_with_guesses(pair: tuple[LLM, LLM], temperature: float) -> None:
    plain, drafting = pair
    if plain.model.vocab_size < 10_000:
        pytest.skip("a form is written by the tokens of a real vocabulary")
    options: Any = {"max_tokens": 40, "temperature": temperature, "seed": 4}
    form: Any = {"regex": "(la ){3,9}end"}
    (expected,) = plain.generate([PROMPTS[1]], structured_output=form, **options)
    (answer,) = drafting.generate([PROMPTS[1]], structured_output=form, **options)
    assert told(answer) == told(expected)
    assert answer.text.endswith("la end")
    assert answer.usage.num_accepted_drafts > 0


def test_what_repeats_takes_fewer_steps_and_a_request_may_do_without(pair: tuple[LLM, LLM]) -> None:
    _, drafting = pair
    options: Any = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.0}
    counts = []
    for bound in (None, 0):
        before = drafting.load()
        more: Any = {} if bound is None else {"max_draft_tokens": bound}
        (answer,) = drafting.generate([PROMPTS[1]], **options, **more)
        after = drafting.load()
        assert answer.usage.num_drafted_tokens == (
            after.num_drafted_tokens_total - before.num_drafted_tokens_total
        )
        counts.append((after.num_steps_total - before.num_steps_total, answer.usage.num_accepted_drafts))
    (few, accepted), (all_steps, none) = counts
    assert (all_steps, none) == (40, 0)
    assert few == 40 - accepted


def test_the_server_says_how_it_guesses(pair: tuple[LLM, LLM]) -> None:
    plain, drafting = pair
    assert plain.info().speculation.method == "none"
    assert (drafting.info().speculation.method, drafting.info().speculation.row_cost) == ("ngram", 0.01)


def test_more_guesses_than_a_step_may_have_are_refused_by_name(pair: tuple[LLM, LLM]) -> None:
    with pytest.raises(InvalidArgument, match="max_draft_tokens"):
        pair[1].generate(["Hi"], max_tokens=2, max_draft_tokens=65)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"speculation.method": "ngram", "engine.steps_ahead": 1}, "speculation.method"),
        ({"speculation.num_tokens": 0}, "speculation.num_tokens"),
        ({"speculation.min_ngram": 5, "speculation.max_ngram": 4}, "speculation.min_ngram"),
        ({"speculation.row_cost": 2.0}, "speculation.row_cost"),
        ({"speculation.method": "eagle"}, "speculation.method"),
    ],
)
def test_bad_configurations_are_refused_by_name(given: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(None, environ={}, given=given)
