"""The form of an answer, from the client's value to the engine's and what is refused between."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.fake_engine import FakeEngine
from support.serving import serving

from pageturner.service.client import OutputForm, StructuredOutput
from pageturner.service.client.structured import to_structured_output
from pageturner.service.errors import InvalidArgument
from pageturner.service.rpc import from_wire
from pageturner.v1 import generation_pb2 as pb

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}


class Model:
    """As pydantic's classes are."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return SCHEMA


def schema_of(text: str) -> StructuredOutput:
    return StructuredOutput(OutputForm.JSON_SCHEMA, text)


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({"json_schema": SCHEMA}, schema_of(json.dumps(SCHEMA))),
        ({"json_schema": Model}, schema_of(json.dumps(SCHEMA))),
        ({"json_schema": '{"type": 1}'}, schema_of('{"type": 1}')),
        ({"json_schema": True}, schema_of("true")),
        ({"json_object": True}, StructuredOutput(OutputForm.JSON_OBJECT)),
        ({"regex": "a+"}, StructuredOutput(OutputForm.REGEX, "a+")),
        ({"choice": ["a", "b"]}, StructuredOutput.one_of("ab")),
        ({"choice": "ab"}, StructuredOutput.one_of(["ab"])),
        ({"grammar": 'start: "a"'}, StructuredOutput(OutputForm.GRAMMAR, 'start: "a"')),
    ],
)
async def test_the_engine_is_given_the_form_that_the_client_stated(
    given: dict[str, object], form: StructuredOutput
) -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        await served.client.generate("x", structured_output=given)
        await served.client.generate("x", structured_output=form)
        await served.client.generate("x")
    assert [request.params.structured_output for request in engine.requests] == [form, form, None]


@pytest.mark.parametrize(
    "given",
    [{}, {"json": "{}"}, {"regex": "a", "choice": ["a"]}, "json_object", 3, {"json_schema": {"x": object()}}],
)
def test_what_is_no_form_is_a_type_error(given: Any) -> None:
    with pytest.raises(TypeError, match="structured_output"):
        to_structured_output(given)


def test_a_schema_without_end_is_refused_by_its_path() -> None:
    endless: dict[str, Any] = {}
    endless["items"] = endless
    with pytest.raises(InvalidArgument, match="contains itself") as caught:
        to_structured_output({"json_schema": endless})
    assert caught.value.field == "sampling.structured_output.json_schema"


def test_a_number_that_is_too_long_is_told_as_such() -> None:
    with pytest.raises(InvalidArgument, match=r"is no JSON: Exceeds the limit \(4300 digits\)[^;]*$"):
        to_structured_output({"json_schema": {"maximum": 10**5000}})


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"regex": 3}, "sampling.structured_output.regex"),
        ({"choice": ["a", "\ud800"]}, "sampling.structured_output.choice.texts[1]"),
        ({"choice": 3}, "sampling.structured_output.choice.texts"),
        ({"grammar": "\ud800"}, "sampling.structured_output.grammar"),
    ],
)
def test_what_the_wire_cannot_carry_is_refused_by_its_path(given: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        to_structured_output(given)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.StructuredOutput(), "sampling.structured_output"),
        (pb.StructuredOutput(json_object=False), "sampling.structured_output"),
        (
            pb.StructuredOutput(choice=pb.TextChoices(texts=["a"] * 1025)),
            "sampling.structured_output.choice.texts",
        ),
    ],
)
def test_a_message_that_asks_for_no_form_or_for_too_much_is_refused(
    message: pb.StructuredOutput, field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        from_wire.to_sampling_params(pb.SamplingParams(structured_output=message))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("named", "path"),
    [
        ("structured_output", "sampling.structured_output"),
        ("structured_output.json_schema", "sampling.structured_output.json_schema"),
        ("structured_output.choice[2]", "sampling.structured_output.choice.texts[2]"),
    ],
)
def test_the_engines_names_become_paths_of_the_message(named: str, path: str) -> None:
    assert from_wire.to_wire_path(InvalidArgument(named, "no"), "x").field == path
