"""Decoding and stop strings together, as the scheduler drives them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_tokenizers import byte_level_bpe

from pageturner.service.core.outputs import StopCondition, TextDelta
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.structured_output import StructuredOutput
from pageturner.service.engine.text_output import TextOutput
from pageturner.service.engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer(byte_level_bpe())


def new_request(params: SamplingParams, prompt: Sequence[int] = (0,)) -> NewRequest:
    return NewRequest("r", tuple(prompt), params, seed=0, arrival_time=0.0)


def run(token_ids: Sequence[int], params: SamplingParams, *, min_tokens: int = 0) -> tuple[str, str | None]:
    output: StopCondition = TextOutput(TOKENIZER)
    output.start(7, new_request(params))
    text, matched = "", None
    for position, token_id in enumerate(token_ids):
        delta = output.append(7, token_id, may_stop=position >= min_tokens, is_stop_token=False)
        text, matched = text + delta.text, delta.matched_stop
        if matched is not None:
            break
    return text + output.finish(7), matched


(END,) = TOKENIZER.encode("<|end|>")
FOX = TOKENIZER.encode("fox")


@pytest.mark.fault("7")
@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize(
    ("stop", "token_ids", "before"),
    [
        ("<|end|>", (*FOX, END, *FOX), "fox"),
        ("<|end|>fox", (*FOX, END, END, *FOX, *FOX), "fox"),
        ("x<|end|><|end|>f", (*FOX, END, END, *FOX), "fo"),
        ("<|end|>", TOKENIZER.encode("fox<|end|>fox", parse_special=False), "fox"),
    ],
)
def test_a_stop_that_spells_a_special_token_is_met_by_the_token_and_by_its_text(
    stop: str, token_ids: tuple[int, ...], before: str, include_stop: bool
) -> None:
    shown, matched = run(token_ids, SamplingParams(stop=(stop,), include_stop=include_stop))
    assert matched == stop
    assert shown == before + (stop if include_stop else "")


@pytest.mark.fault("7")
def test_special_tokens_that_complete_no_stop_show_no_text() -> None:
    params = SamplingParams(stop=("<|end|>dog", "<|start|>"))
    assert run((*FOX, END, *FOX, END), params) == ("foxfox", None)
    assert run((*FOX, END, *FOX), params, min_tokens=99) == ("foxfox", None)


@given(st.text("ab é日👩", max_size=24), st.lists(st.text("ab é日👩", min_size=1, max_size=3), max_size=3))
def test_text_up_to_the_first_stop(text: str, stops: list[str]) -> None:
    shown, matched = run(TOKENIZER.encode(text), SamplingParams(stop=tuple(stops)))
    assert not any(stop in shown for stop in stops)
    if matched is None:
        assert shown == text
    else:
        assert text.startswith(shown + matched)
    with_stop, _ = run(TOKENIZER.encode(text), SamplingParams(stop=tuple(stops), include_stop=True))
    assert with_stop == shown + (matched or "")


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=24), st.text(max_size=2))
def test_any_ids_and_a_stop(token_ids: list[int], stop: str) -> None:
    shown, matched = run(token_ids, SamplingParams(stop=(stop,) if stop else ()))
    whole = TOKENIZER.decode(token_ids)
    if matched is None:
        assert shown == whole
    else:
        assert whole.startswith(shown + stop)


def test_the_stop_is_found_in_the_step_that_completes_it() -> None:
    output = TextOutput(TOKENIZER)
    output.start(1, new_request(SamplingParams(stop=("fox jumps",))))
    token_ids = TOKENIZER.encode("The quick fox jumps over")
    deltas = [output.append(1, t, may_stop=True, is_stop_token=False) for t in token_ids]
    matched = [i for i, delta in enumerate(deltas) if delta.matched_stop]
    needed = next(i for i in range(len(token_ids)) if "fox jumps" in TOKENIZER.decode(token_ids[: i + 1]))
    assert matched == [needed]
    assert "".join(delta.text for delta in deltas) == "The quick "


def test_a_stop_token_is_shown_only_if_asked_for() -> None:
    (token_id,) = TOKENIZER.encode("!")
    for include_stop, text in ((False, ""), (True, "!")):
        output = TextOutput(TOKENIZER)
        output.start(1, new_request(SamplingParams(include_stop=include_stop, stop_token_ids=(token_id,))))
        assert output.append(1, token_id, may_stop=True, is_stop_token=True) == TextDelta(text)
        assert output.finish(1) == ""


def test_stops_are_sought_in_the_answer_only() -> None:
    output = TextOutput(TOKENIZER)
    prompt = TOKENIZER.encode("st")
    output.start(1, new_request(SamplingParams(stop=("stop",)), prompt))
    deltas = [
        output.append(1, t, may_stop=True, is_stop_token=False) for t in TOKENIZER.encode("op and stop")
    ]
    assert "".join(delta.text for delta in deltas) == "op and "


@pytest.mark.parametrize(("form", "text"), [(None, "\ufffdno"), (StructuredOutput.one_of(["no"]), "no")])
def test_a_form_begins_with_its_own_first_character(form: StructuredOutput | None, text: str) -> None:
    """The prompt ends within a character, which an answer of any text may complete, or show as none."""
    half = next(i for i in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(i) == b"\xc3")
    output = TextOutput(TOKENIZER)
    output.start(1, new_request(SamplingParams(structured_output=form), (0, half)))
    deltas = [output.append(1, t, may_stop=True, is_stop_token=False) for t in TOKENIZER.encode("no")]
    assert "".join(delta.text for delta in deltas) + output.finish(1) == text


def test_no_stop_below_min_tokens() -> None:
    token_ids = TOKENIZER.encode("a.b.c.")
    text, matched = run(token_ids, SamplingParams(stop=(".",)), min_tokens=3)
    assert (text, matched) == ("a.b", ".")


def test_sequences_are_forgotten() -> None:
    output = TextOutput(TOKENIZER)
    for seq_id in range(3):
        output.start(seq_id, new_request(SamplingParams()))
    for seq_id in range(3):
        output.finish(seq_id)
    assert len(output) == 0


def test_without_a_tokenizer_there_is_no_text() -> None:
    output = TextOutput(None)
    output.start(1, new_request(SamplingParams()))
    assert output.append(1, 5, may_stop=True, is_stop_token=False) == TextDelta("")
    assert output.finish(1) == ""
