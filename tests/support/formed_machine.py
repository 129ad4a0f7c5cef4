"""The general machine with answers of a form among others: schemas made up, and the other kinds of form."""

from __future__ import annotations

import gc
import json
import random
import re
from typing import Any

import jsonschema
from hypothesis import strategies as st
from hypothesis.stateful import rule

from pageturner.service.core.drafting.ngram_index import Drafts
from pageturner.service.core.outputs import ChoiceFinishedEvent, Event, FinishReason
from pageturner.service.core.request import Sequence
from pageturner.service.core.structured_output import OutputForm, StructuredOutput
from support.core_harness import CoreHarness
from support.drafting_machine import SPECULATION
from support.formed_model import END, FormedHarness, FormedModel, text_of
from support.scheduler_machine import KNOWN, SchedulerMachine, beam_searches, requests

_LEAVES = (
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer", "minimum": 0, "maximum": 11},
    {"const": "a"},
    {"enum": [True, "ab", 10]},
    {"type": "string", "maxLength": 2},
    {"type": "string", "pattern": "^(ab)*$"},
)

_GRAMMARS = ('start: "a" start "b" | "c"', "start: pair+\npair: LETTER LETTER\nLETTER: /[abé]/")


def _grown(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of what holds others."""
    objects = st.dictionaries(st.sampled_from("ab"), inner, max_size=2).map(
        lambda fields: {
            "type": "object",
            "properties": fields,
            "required": sorted(fields),
            "additionalProperties": False,
        }
    )
    arrays = inner.map(lambda items: {"type": "array", "items": items, "maxItems": 2})
    return objects | arrays | st.lists(inner, min_size=1, max_size=2).map(lambda each: {"anyOf": each})


SCHEMAS: st.SearchStrategy[dict[str, Any]] = st.recursive(st.sampled_from(_LEAVES), _grown, max_leaves=4)


def forms() -> st.SearchStrategy[StructuredOutput]:
    schemas = SCHEMAS.map(lambda schema: StructuredOutput(OutputForm.JSON_SCHEMA, json.dumps(schema)))
    others = st.sampled_from(
        (
            StructuredOutput(OutputForm.JSON_OBJECT),
            StructuredOutput(OutputForm.REGEX, "(ab|é)+c?"),
            StructuredOutput(OutputForm.REGEX, "a*"),
            StructuredOutput.one_of(("a", "ab", "abc", "é")),
            *(StructuredOutput(OutputForm.GRAMMAR, source) for source in _GRAMMARS),
        )
    )
    return schemas | schemas | others


def check_whole(form: StructuredOutput, text: str) -> None:
    """Raise AssertionError unless the text has the form, by other code than what generated it."""
    match form.form:
        case OutputForm.JSON_SCHEMA:
            value = json.loads(text)
            errors = [
                error.message
                for error in jsonschema.Draft202012Validator(json.loads(form.source)).iter_errors(value)
            ]
            assert not errors, f"form: {text!r}: {errors}"
        case OutputForm.JSON_OBJECT:
            assert isinstance(json.loads(text), dict), f"form: {text!r} is no object"
        case OutputForm.REGEX:
            assert re.fullmatch(form.source, text), f"form: {text!r} does not match {form.source}"
        case OutputForm.CHOICE:
            assert text in form.choices, f"form: {text!r} is no choice"
        case OutputForm.GRAMMAR if form.source == _GRAMMARS[0]:
            head, _, tail = text.partition("c")
            assert set(head) <= {"a"}, f"form: {text!r}"
            assert tail == "b" * len(head), f"form: {text!r}"
        case OutputForm.GRAMMAR:
            assert re.fullmatch("([abé]{2})+", text), f"form: {text!r}"


class ParsingHarness(FormedHarness):
    """Each choice that ends by itself has its form."""

    def take(self, events: tuple[Event, ...]) -> None:
        super().take(events)
        for event in events:
            if isinstance(event, ChoiceFinishedEvent) and event.reason is FinishReason.STOP:
                record = self.records[event.request_id]
                if (form := record.new.params.structured_output) is not None:
                    outputs = record.outputs[event.index]
                    assert outputs[-1] == END, f"form: {outputs} ended by another token"
                    check_whole(form, text_of(outputs[:-1]))


class FormedMachine(SchedulerMachine):
    """Requests with a form beside those without, and answers of a form that began elsewhere."""

    harness_class: type[CoreHarness] = ParsingHarness

    @rule(wanted=requests(), form=forms())
    def submit_formed(self, wanted: dict[str, Any], form: StructuredOutput) -> None:
        self._submit_formed(wanted, form)

    @rule(wanted=requests(), form=forms(), known=KNOWN)
    def resume_formed(self, wanted: dict[str, Any], form: StructuredOutput, known: tuple[int, ...]) -> None:
        self._submit_formed(wanted | {"known": known}, form)

    def _submit_formed(self, wanted: dict[str, Any], form: StructuredOutput) -> None:
        self._submit(wanted | {"form": form, "stop_ids": (END,), "max_tokens": wanted["max_tokens"] + 6})

    def teardown(self) -> None:
        super().teardown()
        if self.harness is None:
            return
        model, is_broken, self.harness = self.harness.model, self.harness.is_broken, None
        assert isinstance(model, FormedModel)
        model.masks.close()
        if not is_broken:
            gc.collect()  # a request and its sequences hold one another
            assert len(model.masks) == 0, f"leak: the places of {len(model.masks)} sequences are kept"


class FormedSearchingMachine(FormedMachine):
    """The same, and searches among the texts of a form. A machine of its own, since the planted bugs were
    searched for with the moves of the other."""

    @rule(wanted=requests(), form=forms(), search=beam_searches())
    def search_formed(self, wanted: dict[str, Any], form: StructuredOutput, search: dict[str, Any]) -> None:
        self._submit_formed(wanted | search, form)


class FormedDrafter:
    """Drafts that come true, as far as one of them is spoilt; what comes behind an answer's end is drafted
    too."""

    def __init__(self, harness: CoreHarness) -> None:
        self._harness = harness

    def propose(self, sequence: Sequence, limit: int) -> Drafts:
        record, done = self._harness.records[sequence.request.request_id], sequence.num_output_tokens
        chance = random.Random(f"{sequence.seq_id}/{done}")
        due = self._harness.expected(record, sequence.index)[done:]
        drafts = [*due, *(chance.randrange(END + 1) for _ in range(limit))][:limit]
        if chance.random() < 0.5:
            drafts[chance.randrange(limit)] = chance.randrange(END + 1)
        return Drafts(tuple(drafts[: chance.randint(0, limit)]), chance.random() < 0.5)


class FormedDraftingMachine(FormedMachine):
    """The same, and sequences with drafts behind them."""

    speculation = SPECULATION
    drafter = FormedDrafter
