"""Beam search on the embedded model: answers and scores are those of `transformers`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pageturner.service.client.values import Completion
from pageturner.service.config import cache_directory
from pageturner.service.core.sampling_params import BeamSearch
from pageturner.service.llm import LLM
from pageturner.service.model.loader import load_artifacts
from pageturner.service.model.options import ModelOptions

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "What is 17 + 25?",
    "Write a haiku about the sea.",
    "Translate 'good morning' into Spanish.",
    "Name three primary colors.",
    "Explain gravity to a child.",
    "Write a Python function that reverses a string.",
    "Who wrote Romeo and Juliet?",
    "What does HTTP stand for?",
    "Give me a recipe for pancakes.",
    "How many days are in a leap year?",
    "What is photosynthesis?",
    "List the planets of the solar system.",
    "Tell me a joke.",
    "What is the opposite of hot?",
    "Summarize the plot of Cinderella.",
    "How do I boil an egg?",
    "日本の首都はどこですか。",
    "What is a prime number?",
)
FLOAT32 = {"dtype": "float32", "kv_dtype": "float32", "quantization": "none", "device": "cpu"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM({**FLOAT32, "num_threads": 1}, cache={"num_blocks": 1024, "swap_space": 0}) as llm:
        yield llm


@pytest.fixture(scope="module")
def model(llm: LLM) -> PreTrainedModel:
    """Of the weights that the other one has converted by now."""
    artifacts = load_artifacts(ModelOptions(dtype="float32"), cache_directory())
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(artifacts.folder, dtype=torch.float32)
    return model


def compare(
    llm: LLM, model: PreTrainedModel, questions: tuple[str, ...], max_tokens: int
) -> list[Completion]:
    """Four beams each, all questions at once here, one after the other there."""
    prompts = [
        llm.tokenize(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        for question in questions
    ]
    completions = llm.generate(prompts, n=4, max_tokens=max_tokens, beam_search=BeamSearch(4))
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt])
        found = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=2,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        rows = found.sequences[:, len(prompt) :].tolist()
        expected = [row[: row.index(2) + 1] if 2 in row else row for row in rows]
        assert [[token.token_id for token in choice.tokens] for choice in completion.choices] == expected
        scores = [choice.score for choice in completion.choices]
        assert scores == pytest.approx(found.sequences_scores.tolist(), abs=1e-4)
    return completions


def test_answers_of_two_questions(llm: LLM, model: PreTrainedModel) -> None:
    completions = compare(llm, model, QUESTIONS[:2], max_tokens=6)
    assert "Paris" in completions[0].text


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_answers_of_twenty_questions(llm: LLM, model: PreTrainedModel) -> None:
    compare(llm, model, QUESTIONS, max_tokens=32)
