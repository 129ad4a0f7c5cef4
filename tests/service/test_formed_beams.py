"""Searches among the texts of a form, on a real model: answers and scores are those of `transformers` with a
`prefix_allowed_tokens_fn`, which masks log-probabilities in the same place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.model_folders import save_chat_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from pageturner.service.core.sampling_params import BeamSearch, EarlyStopping
from pageturner.service.core.structured_output import OutputForm, StructuredOutput
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.grammars.compiler import CompiledGrammar
from pageturner.service.grammars.grammars import Grammars
from pageturner.service.grammars.options import GrammarOptions
from pageturner.service.llm import LLM
from pageturner.service.model.loader import load_artifacts
from pageturner.service.model.options import ModelOptions
from pageturner.service.startup.grammars import make_grammars

FLOAT32 = {"dtype": "float32", "kv_dtype": "float32", "quantization": "none", "device": "cpu"}
FORMS = (
    StructuredOutput(OutputForm.REGEX, "[a-f]{2,6}( [a-f]{2,6})*"),
    StructuredOutput(
        OutputForm.JSON_SCHEMA,
        '{"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}',
    ),
    StructuredOutput.one_of(("yes", "yet", "no", "not at all", "maybe")),
)
MAX_TOKENS, EOS = 14, 2
EARLY_STOPPING = {EarlyStopping.HEURISTIC: False, EarlyStopping.FIRST: True, EarlyStopping.NEVER: "never"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with started(folder, num_blocks=512) as llm:
        yield llm


def started(folder: Path, steps_ahead: int = 0, **cache: int) -> LLM:
    return LLM(
        {**FLOAT32, "source": str(folder), "num_threads": 1},
        cache={"swap_space": 0, "block_size": 4} | cache,
        grammars={"max_json_whitespace": 0},
        engine={"steps_ahead": steps_ahead},
    )


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


@pytest.fixture(scope="module")
def grammar_of(folder: Path, model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The grammar of a form, over the model's tokens."""
    artifacts = load_artifacts(ModelOptions(source=str(folder)), tmp_path_factory.mktemp("cache"))
    assert artifacts.tokenizer is not None
    vocab_size: int = model.config.vocab_size
    options = GrammarOptions(max_json_whitespace=0)
    grammars = make_grammars(options, Tokenizer(artifacts.tokenizer), vocab_size)
    assert isinstance(grammars, Grammars)
    return grammars.compile


def allowed_after(grammar: CompiledGrammar, num_prompt: int) -> Callable[[int, torch.Tensor], list[int]]:
    """What may follow, from the grammar's beginning each time."""

    def allowed(_: int, tokens: torch.Tensor) -> list[int]:
        outputs = tokens[num_prompt:].tolist()
        if EOS in outputs:
            return [EOS]
        place = grammar.start()
        if place.count_fitting(outputs) < len(outputs):
            return [EOS]  # of a beam that is impossible already
        place.take(outputs)
        found = place.allowed()
        ids = np.flatnonzero(np.unpackbits(found.words.view(np.uint8), bitorder="little")).tolist()
        return [i for i in ids if i != EOS] + [EOS] * found.may_end

    return allowed


@pytest.mark.parametrize(
    ("form", "stopping"),
    [*((form, EarlyStopping.HEURISTIC) for form in FORMS), (FORMS[0], EarlyStopping.NEVER)],
    ids=lambda each: each.value if isinstance(each, EarlyStopping) else each.form.value,
)
def test_answers_are_those_of_transformers(
    llm: LLM, model: PreTrainedModel, grammar_of: Any, form: StructuredOutput, stopping: EarlyStopping
) -> None:
    search = BeamSearch(3, 1.0, stopping)
    prompts = [llm.tokenize(text) for text in ("The quick brown fox", "Grüße aus")]
    completions = llm.generate(
        prompts, n=3, max_tokens=MAX_TOKENS, beam_search=search, structured_output=form
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt])
        found = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=3,
            num_return_sequences=3,
            early_stopping=EARLY_STOPPING[stopping],
            eos_token_id=EOS,
            pad_token_id=0,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            prefix_allowed_tokens_fn=allowed_after(grammar_of(form), len(prompt)),
            return_dict_in_generate=True,
            output_scores=True,
        )
        rows = [
            row[: row.index(EOS) + 1] if EOS in row else row
            for row in found.sequences[:, len(prompt) :].tolist()
        ]
        assert [[token.token_id for token in choice.tokens] for choice in completion.choices] == rows
        scores = [choice.score for choice in completion.choices]
        assert scores == pytest.approx(found.sequences_scores.tolist(), abs=2e-5)


def test_a_pool_that_holds_one_search_gives_the_same_answers(folder: Path, llm: LLM) -> None:
    options: dict[str, Any] = {"n": 4, "max_tokens": 24, "beam_search": BeamSearch(4)}
    options["structured_output"] = FORMS[0]
    prompts = ["The quick brown fox", "Grüße aus", "def f(x):"] * 2
    wanted = [[choice.text for choice in done.choices] for done in llm.generate(prompts, **options)]
    for steps_ahead in (0, 1):
        with started(folder, steps_ahead, num_blocks=44) as small:
            found = [[choice.text for choice in done.choices] for done in small.generate(prompts, **options)]
            assert found == wanted
            load = small.load()
            assert load.num_recompute_preemptions_total + load.num_tail_preemptions_total


def test_a_form_of_fewer_texts_than_choices_gives_each_once(llm: LLM) -> None:
    form = StructuredOutput.one_of(("yes", "no"))
    (done,) = llm.generate(["x"], n=4, max_tokens=30, beam_search=BeamSearch(6), structured_output=form)
    assert {choice.text for choice in done.choices} == {"yes", "no"}
    written = [tuple(token.token_id for token in choice.tokens) for choice in done.choices]
    assert len(set(written)) == len(written), (
        "a text may be written in several ways, each of which comes once"
    )
    assert [choice.index for choice in done.choices] == list(range(len(written)))
    only = StructuredOutput(OutputForm.REGEX, "y")
    (one,) = llm.generate(["x"], n=4, max_tokens=30, beam_search=BeamSearch(6), structured_output=only)
    assert [choice.text for choice in one.choices] == ["y"]
