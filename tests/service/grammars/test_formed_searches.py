"""Searches among the texts of a form, where there are fewer of these than beams, or none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.formed_model import END, TEXTS, FormedHarness, FormedModel, text_of

from pageturner.policies import registry
from pageturner.service.core.sampling_params import BeamSearch, EarlyStopping
from pageturner.service.core.scheduling import beams
from pageturner.service.core.structured_output import FIELD, OutputForm, StructuredOutput
from pageturner.service.errors import InvalidArgument

B, C = TEXTS.index(b"b"), TEXTS.index(b"c")
TWO_TEXTS = StructuredOutput.one_of(("cc{", "cc}"))
"""Each is written in one way, and both begin with the same two tokens."""


@pytest.fixture
def harness() -> Iterator[FormedHarness]:
    made = FormedHarness(registry.default_policies(), num_blocks=40, block_size=2)
    yield made
    assert isinstance(made.model, FormedModel)
    made.model.masks.close()


def test_a_form_has_as_many_answers_as_it_has_texts(harness: FormedHarness) -> None:
    for stopping in EarlyStopping:
        search = BeamSearch(4, 1.0, stopping)
        name = harness.submit((0, 1), max_tokens=9, n=4, stop_ids=(END,), form=TWO_TEXTS, beam_search=search)
        harness.run_to_end()
        record = harness.records[name]
        assert {text_of(tokens[:-1]) for tokens in record.outputs.values()} == {"cc{", "cc}"}
        assert record.finished_choices == {0, 1}
        assert record.end is not None
        assert record.end.error is None
        assert record.end.usage.num_output_tokens == 8, "of two answers of four tokens"
    harness.check_finished()


def test_the_best_alone_is_told_what_all_begin_with_before_the_end(harness: FormedHarness) -> None:
    name = harness.submit(
        (0, 1), max_tokens=9, n=4, stop_ids=(END,), form=TWO_TEXTS, beam_search=BeamSearch(4)
    )
    record = harness.records[name]
    while not record.outputs:
        harness.step()
    assert list(record.outputs) == [0]
    harness.run_to_end()
    assert list(record.outputs) == [0, 1]


def test_a_choice_that_would_have_no_answer_is_found_out(
    harness: FormedHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first test can fail: what all answers begin with is told to choices that never end."""
    monkeypatch.setattr(beams, "_num_told_early", lambda request: request.new.params.n)
    with pytest.raises(IndexError):
        test_a_form_has_as_many_answers_as_it_has_texts(harness)


def test_a_cut_answer_of_a_form_is_one_too(harness: FormedHarness) -> None:
    name = harness.submit(
        (0, 1), max_tokens=2, n=3, stop_ids=(END,), form=TWO_TEXTS, beam_search=BeamSearch(3)
    )
    harness.run_to_end()
    assert harness.records[name].outputs == {0: [2, 2]}


def test_a_beam_that_no_token_continues_leaves_the_others(harness: FormedHarness) -> None:
    """`b` ends answers, so that behind `a` nothing may follow; `ab` is one token, and whole."""
    form = StructuredOutput(OutputForm.REGEX, "ab")
    name = harness.submit((0,), max_tokens=9, n=2, stop_ids=(B,), form=form, beam_search=BeamSearch(2))
    harness.run_to_end()
    end = harness.records[name].end
    assert end is not None
    assert end.error is None
    assert list(map(text_of, harness.records[name].outputs.values())) == ["abb"]


def test_a_search_of_which_no_beam_goes_on_ends_by_name(harness: FormedHarness) -> None:
    form = StructuredOutput(OutputForm.REGEX, "cb")
    name = harness.submit((0,), max_tokens=9, n=2, stop_ids=(B,), form=form, beam_search=BeamSearch(2))
    assert harness.records[name].answers == []
    harness.records[name].answers = [([C], 0.0)]  # the beginning that is told, and has no end
    while harness.records[name].end is None:
        harness.step()
    end = harness.records[name].end
    assert end is not None
    assert isinstance(end.error, InvalidArgument)
    assert end.error.field == FIELD
