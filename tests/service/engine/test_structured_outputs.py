"""Grammars are compiled beside the loop, before a request is queued, and what is resumed has to fit."""

from __future__ import annotations

import pytest
from support.formed_model import END, TEXTS, grammars_of

from pageturner.service.core.request import ResumedChoice
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.structured_output import OutputForm, StructuredOutput
from pageturner.service.engine.structured_outputs import NO_GRAMMARS, StructuredOutputs
from pageturner.service.errors import InvalidArgument
from pageturner.service.grammars.grammars import Unavailable

A, B = TEXTS.index(b"a"), TEXTS.index(b"b")


def asking(pattern: str, **others: object) -> SamplingParams:
    return SamplingParams(structured_output=StructuredOutput(OutputForm.REGEX, pattern), **others)  # type: ignore[arg-type] # by name


async def test_a_grammar_is_compiled_once_and_kept_for_requests_like_it() -> None:
    grammars = grammars_of()
    forms = StructuredOutputs(grammars, (END,))
    assert await forms.prepare(SamplingParams(), (), "") is None
    first = await forms.prepare(asking("ab*"), (), "t")
    assert await forms.prepare(asking("ab*"), (), "u") is first
    assert grammars.figures().num_compilations == 1


async def test_what_cannot_be_compiled_is_refused_and_leaves_the_thread_free() -> None:
    forms = StructuredOutputs(grammars_of(), (END,))
    for _ in range(3):
        with pytest.raises(InvalidArgument, match="unclosed group"):
            await forms.prepare(asking("("), (), "t")
    assert await forms.prepare(asking("a"), (), "t") is not None


@pytest.mark.parametrize(
    ("tokens", "place"),
    [((A, B, B), None), ((A, B, END), None), ((A, A), 1), ((END, A), 0), ((B,), 0)],
)
async def test_tokens_that_are_resumed_have_to_fit(tokens: tuple[int, ...], place: int | None) -> None:
    forms = StructuredOutputs(grammars_of(), (END,))
    resumed = (ResumedChoice((A,)), ResumedChoice(tokens))
    if place is None:
        assert await forms.prepare(asking("ab*"), resumed, "") is not None
        return
    with pytest.raises(InvalidArgument, match=r"does not fit structured_output\.regex") as caught:
        await forms.prepare(asking("ab*"), resumed, "")
    assert caught.value.field == f"resume.choices[1].token_ids[{place}]"


def test_a_model_without_an_end_token_needs_one_of_the_request() -> None:
    forms = StructuredOutputs(grammars_of(), ())
    with pytest.raises(InvalidArgument, match="no end token"):
        forms.check(asking("a"))
    forms.check(asking("a", stop_token_ids=(3,)))
    forms.check(SamplingParams())


@pytest.mark.parametrize("unavailable", [NO_GRAMMARS, Unavailable("switched off")])
def test_where_there_are_no_grammars_a_form_is_refused_by_name(unavailable: Unavailable) -> None:
    forms = StructuredOutputs(unavailable, (END,))
    forms.check(SamplingParams())
    with pytest.raises(InvalidArgument, match=unavailable.reason) as caught:
        forms.check(asking("a"))
    assert caught.value.field == "structured_output"
    assert forms.identity == ""


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (StructuredOutput(OutputForm.REGEX), "structured_output.regex"),
        (StructuredOutput(OutputForm.JSON_SCHEMA, " "), "structured_output.json_schema"),
        (StructuredOutput.one_of(()), "structured_output.choice"),
        (StructuredOutput.one_of(["a", ""]), "structured_output.choice[1]"),
        (StructuredOutput.one_of(["a"] * 1025), "structured_output.choice"),
    ],
)
def test_what_no_compiler_need_look_at_is_refused_at_once(form: StructuredOutput, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(structured_output=form).check(8, 1)
    assert caught.value.field == field


def test_an_answer_of_a_form_must_be_able_to_end() -> None:
    with pytest.raises(InvalidArgument, match="ignore_eos leaves none"):
        asking("a", ignore_eos=True).check(8, 1)
    asking("a", ignore_eos=True, stop_token_ids=(3,)).check(8, 1)
