"""Answers and scores of beam searches are those of `generate(num_beams=...)` in `transformers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.random_models import VOCAB_SIZE, save, tiny_model
from transformers import PreTrainedModel

from pageturner.service.client.values import Choice
from pageturner.service.core.sampling_params import BeamSearch, EarlyStopping
from pageturner.service.llm import LLM

EARLY_STOPPING = {EarlyStopping.HEURISTIC: False, EarlyStopping.FIRST: True, EarlyStopping.NEVER: "never"}
PROMPTS = ((5, 17, 3, 99), (44,), tuple(range(20, 59)), (7, 7, 7, 120, 1, 64, 33))
SOME_STOPS = tuple(range(60, 70))
"""A random model takes one of ten tokens every now and then, so that answers of all lengths compete."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=3)[1]


def started(model: PreTrainedModel, folder: Path, **cache: Any) -> LLM:
    save(model, folder)
    section = {"source": str(folder), "dtype": "float32", "quantization": "none", "device": "cpu"}
    return LLM(
        {**section, "kv_dtype": "float32", "num_threads": 1},
        cache={"swap_space": 0, "block_size": 4} | cache,
    )


@pytest.fixture(scope="module")
def llm(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with started(model, tmp_path_factory.mktemp("ample"), num_blocks=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def crowded(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The same in a pool that holds hardly more than one of the searches."""
    with started(model, tmp_path_factory.mktemp("crowded"), num_blocks=40) as llm:
        yield llm


def expected(
    model: PreTrainedModel,
    prompt: Sequence[int],
    search: BeamSearch,
    n: int,
    stop_ids: Sequence[int],
    **options: Any,
) -> list[tuple[list[int], float]]:
    """Tokens and score of each answer."""
    ids = torch.tensor([prompt])
    found = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=search.width,
        num_return_sequences=n,
        length_penalty=search.length_penalty,
        early_stopping=EARLY_STOPPING[search.early_stopping],
        eos_token_id=list(stop_ids) or None,
        pad_token_id=VOCAB_SIZE - 1,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    answers = []
    for row, score in zip(
        found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True
    ):
        ends = [place for place, token in enumerate(row) if token in stop_ids]
        answers.append((row[: ends[0] + 1] if ends else row, score))
    return answers


def assert_equal(choices: Sequence[Choice], answers: Sequence[tuple[list[int], float]]) -> None:
    assert [[token.token_id for token in choice.tokens] for choice in choices] == [row for row, _ in answers]
    assert [choice.score for choice in choices] == pytest.approx([score for _, score in answers], abs=2e-5)


@pytest.mark.parametrize(
    ("width", "n", "length_penalty", "early_stopping"),
    [
        (2, 1, 1.0, EarlyStopping.HEURISTIC),
        (3, 3, 1.0, EarlyStopping.FIRST),
        (5, 2, 1.0, EarlyStopping.NEVER),
        (3, 3, 0.0, EarlyStopping.HEURISTIC),
        (2, 2, 2.0, EarlyStopping.NEVER),
        (5, 5, 2.0, EarlyStopping.FIRST),
        (4, 4, -0.5, EarlyStopping.NEVER),
    ],
)
def test_answers_of_a_random_model(
    llm: LLM,
    model: PreTrainedModel,
    width: int,
    n: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
) -> None:
    search = BeamSearch(width, length_penalty, early_stopping)
    completions = llm.generate(
        PROMPTS, n=n, max_tokens=16, beam_search=search, stop_token_ids=SOME_STOPS, ignore_eos=True
    )
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        answers = expected(model, prompt, search, n, SOME_STOPS, max_new_tokens=16)
        assert_equal(completion.choices, answers)


def test_answers_in_a_pool_that_holds_one_search_at_a_time(crowded: LLM, model: PreTrainedModel) -> None:
    search = BeamSearch(4)
    prompts = PROMPTS * 2
    completions = crowded.generate(prompts, n=4, max_tokens=24, beam_search=search, ignore_eos=True)
    assert sum(each.timings.num_recomputes + each.timings.num_tail_reclaims for each in completions)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert_equal(completion.choices, expected(model, prompt, search, 4, (), max_new_tokens=24))


def test_no_stop_is_taken_before_min_tokens(llm: LLM, model: PreTrainedModel) -> None:
    search, stops = BeamSearch(4, 0.0), tuple(range(40, 80))
    options: dict[str, Any] = {"n": 4, "max_tokens": 12, "stop_token_ids": stops, "ignore_eos": True}
    (early,) = llm.generate([PROMPTS[0]], beam_search=search, **options)
    (late,) = llm.generate([PROMPTS[0]], beam_search=search, min_tokens=5, **options)
    assert min(len(choice.tokens) for choice in early.choices) <= 5
    assert min(len(choice.tokens) for choice in late.choices) > 5
    assert_equal(
        late.choices, expected(model, PROMPTS[0], search, 4, stops, max_new_tokens=12, min_new_tokens=5)
    )


def test_the_models_own_end_tokens_end_answers(llm: LLM, model: PreTrainedModel) -> None:
    search = BeamSearch(3)
    for prompt in PROMPTS:
        (completion,) = llm.generate([prompt], n=3, max_tokens=8, beam_search=search)
        assert_equal(completion.choices, expected(model, prompt, search, 3, (2,), max_new_tokens=8))


def test_log_probabilities_of_an_answer_sum_to_its_score(llm: LLM) -> None:
    options: dict[str, Any] = {"n": 3, "max_tokens": 10, "ignore_eos": True}
    search = BeamSearch(3, length_penalty=0.0)
    (plain,) = llm.generate([PROMPTS[0]], beam_search=search, **options)
    (told,) = llm.generate([PROMPTS[0]], beam_search=search, logprobs=6, **options)
    assert [[t.token_id for t in choice.tokens] for choice in told.choices] == [
        [t.token_id for t in choice.tokens] for choice in plain.choices
    ]
    for choice in told.choices:
        assert sum(token.logprob or 0.0 for token in choice.tokens) == pytest.approx(choice.score)
        for token in choice.tokens:
            assert len(token.top_logprobs) == 6
            assert token.top_logprobs[0].logprob >= (token.logprob or 0.0)
