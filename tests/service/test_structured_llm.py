"""Structured output of a real model, in a pool far too small and with memory to spare."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.model_folders import save_chat_model

from pageturner.service.client import (
    AcceptedEvent,
    ChoiceFinishedEvent,
    Completion,
    FinishReason,
    TokenEvent,
)
from pageturner.service.client.structured import to_structured_output
from pageturner.service.errors import InvalidArgument
from pageturner.service.identity import ANONYMOUS
from pageturner.service.llm import LLM
from pageturner.service.rpc import from_wire
from pageturner.v1 import generation_pb2 as pb

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", 1, None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS: tuple[dict[str, object], ...] = (
    {"json_schema": SCHEMA},
    {"regex": "[0-9]{3}-[a-f]{2}"},
    {"choice": ["yes", "no", "maybe not"]},
    {"grammar": 'start: "<" /[a-z]{1,4}/ ">"'},
)
PROMPTS = ["The quick brown fox", "Grüße aus", "def f(x):"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("tiny"))


def make(folder: Path, **sections: Any) -> LLM:
    model = {"source": str(folder), "device": "cpu", "num_threads": 1}
    # A model that was never trained would write white space to the end.
    defaults = {"cache": {"num_blocks": 512, "swap_space": 0}, "grammars": {"max_json_whitespace": 0}}
    return LLM(model, **(defaults | sections))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with make(folder) as llm:
        yield llm


def check(form: dict[str, object], text: str) -> None:
    """The text has the form, by other code than what obeyed it."""
    match form:
        case {"json_schema": _}:
            jsonschema.validate(json.loads(text), SCHEMA)
        case {"regex": pattern}:
            assert re.fullmatch(str(pattern), text)
        case {"choice": texts}:
            assert text in texts  # type: ignore[operator] # a list
        case _:
            assert re.fullmatch("<[a-z]{1,4}>", text)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_answers_have_their_form_whatever_is_drawn(llm: LLM, form: dict[str, object]) -> None:
    for options in ({"temperature": 0.0}, {"temperature": 2.0, "top_p": 0.9}, {"presence_penalty": 1.0}):
        for done in llm.generate(PROMPTS, n=2, max_tokens=100, seed=3, structured_output=form, **options):  # type: ignore[arg-type] # options by name
            for choice in done.choices:
                assert choice.reason is FinishReason.STOP
                check(form, choice.text)


def test_a_pool_too_small_gives_the_same_answers(folder: Path, llm: LLM) -> None:
    options: dict[str, Any] = {"n": 2, "max_tokens": 60, "seed": 5, "structured_output": FORMS[0]}
    prompts = PROMPTS * 3
    wanted = [[choice.text for choice in done.choices] for done in llm.generate(prompts, **options)]
    tight = {"num_blocks": 24, "block_size": 8, "swap_space": 0}
    for steps_ahead in (0, 1):
        with make(folder, cache=tight, engine={"steps_ahead": steps_ahead}) as small:
            found = [[choice.text for choice in done.choices] for done in small.generate(prompts, **options)]
            preempted = small.load().num_recompute_preemptions_total + small.load().num_tail_preemptions_total
            assert found == wanted
            assert preempted


def test_drafts_change_no_answer_of_a_form(folder: Path, llm: LLM) -> None:
    form = {"regex": "(ab|cd){6}"}
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "structured_output": form}
    prompt = "ababababababcdcdcdcd"
    (wanted,) = llm.generate([prompt], **options)
    with make(folder, speculation={"method": "ngram", "min_ngram": 1}) as guessing:
        (found,) = guessing.generate([prompt], **options)
        assert found.choices == wanted.choices
        assert guessing.load().num_drafted_tokens_total > 0


def test_max_tokens_and_stop_strings_cut_and_say_so(llm: LLM) -> None:
    form = {"regex": "a{20}b{20}"}
    (cut,) = llm.generate(["x"], structured_output=form, max_tokens=2)
    assert cut.choices[0].reason is FinishReason.LENGTH
    (stopped,) = llm.generate(["x"], structured_output=form, stop=["ab"])
    assert (stopped.choices[0].reason, stopped.choices[0].matched) == (FinishReason.STOP, "ab")
    assert stopped.text == "a" * 19


def test_min_tokens_waits_for_the_end_only_while_the_text_can_go_on(llm: LLM) -> None:
    (short,) = llm.generate(["x"], structured_output={"choice": ["yes"]}, min_tokens=30, max_tokens=40)
    assert short.text == "yes"
    (long,) = llm.generate(["x"], structured_output={"regex": "a*"}, min_tokens=9, max_tokens=60, seed=1)
    assert len(long.choices[0].tokens) >= 9


def test_a_form_that_cannot_be_had_is_refused_by_its_place(folder: Path, llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match="at #/properties/x") as caught:
        llm.generate(["x"], structured_output={"json_schema": {"properties": {"x": {"type": "foo"}}}})
    assert caught.value.field == "sampling.structured_output.json_schema"
    with make(folder, grammars={"enabled": False}) as without:
        assert without.info().structured_output == ""
        with pytest.raises(InvalidArgument, match=r"grammars\.enabled"):
            without.generate(["x"], structured_output=FORMS[1])


def test_figures_tell_of_grammars_and_nothing_of_what_they_say(llm: LLM) -> None:
    llm.generate(["x"], structured_output={"regex": "secret[0-9]"}, max_tokens=20)
    load = llm.load()
    assert load.num_cached_grammars >= 1
    assert load.num_grammar_compilations_total >= 1
    assert llm.info().structured_output.startswith("llguidance-")
    assert "secret" not in str(load)


def test_a_stream_shows_the_form_as_it_comes(llm: LLM) -> None:
    events = list(llm.stream("x", structured_output=FORMS[0], max_tokens=80, seed=2))
    assert isinstance(events[0], AcceptedEvent)
    assert events[0].fingerprint.rpartition(";")[2].startswith("grammar=llguidance-")
    text = "".join(event.text for event in events if isinstance(event, TokenEvent))
    (end,) = (event for event in events if isinstance(event, ChoiceFinishedEvent))
    assert end.reason is FinishReason.STOP
    check(FORMS[0], text)


def test_an_answer_that_broke_off_goes_on_within_its_form(llm: LLM) -> None:
    sampling = {"structured_output": to_structured_output(FORMS[0]), "seed": 8, "max_tokens": 60}
    request = pb.GenerateRequest(prompt=pb.Prompt(text="x"), sampling=pb.SamplingParams(**sampling))  # type: ignore[arg-type] # by name
    whole = llm.generate(["x"], structured_output=FORMS[0], seed=8, max_tokens=60)[0].choices[0]
    ids = [token.token_id for token in whole.tokens]
    (accepted, *_) = llm.stream("x", structured_output=FORMS[0], seed=8, max_tokens=60)
    assert isinstance(accepted, AcceptedEvent)
    for cut in (0, 1, len(ids) // 2, len(ids) - 1):
        received = [pb.ReceivedChoice(token_ids=ids[:cut], text_characters=0)]
        # A tiny model in float32 promises no equal bits, and has them alone.
        resume = pb.Resume(seed=8, fingerprint=accepted.fingerprint, choices=received, allow_inexact=True)
        request.resume.CopyFrom(resume)
        assert answer(llm, request).choices[0].text == whole.text
    request.resume.choices[0].token_ids[:] = ids[1:2]
    with pytest.raises(InvalidArgument, match="does not fit structured_output"):
        answer(llm, request)


def answer(llm: LLM, request: pb.GenerateRequest) -> Completion:
    """By the messages of the wire, of which `LLM` has no word for a resumed answer."""
    stated = from_wire.to_generation_request(request, "", None, llm._engine.limits.generation, ANONYMOUS)
    return llm._thread.answer(stated)
