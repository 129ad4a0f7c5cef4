"""Forms become grammars over tokens, or are refused by name and place; hostile ones cost little."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from support.formed_machine import SCHEMAS, check_whole
from support.formed_model import END, TEXTS, VOCAB_SIZE, grammars_of, ids_in

from pageturner.service.core.structured_output import OutputForm, StructuredOutput
from pageturner.service.errors import InvalidArgument
from pageturner.service.grammars.compiler import GrammarTooComplex
from pageturner.service.grammars.grammars import Grammars

BYTES = (*(bytes([byte]) for byte in range(256)), b"")
GRAMMARS = grammars_of(BYTES)


def schema(value: object) -> StructuredOutput:
    return StructuredOutput(OutputForm.JSON_SCHEMA, value if isinstance(value, str) else json.dumps(value))


def regex(pattern: str) -> StructuredOutput:
    return StructuredOutput(OutputForm.REGEX, pattern)


def accepts(form: StructuredOutput, text: str, grammars: Grammars = GRAMMARS) -> bool:
    """Whether the whole text is one that the form admits."""
    place, ids = grammars.compile(form).start(), list(text.encode())
    if place.count_fitting(ids) < len(ids):
        return False
    place.take(ids)
    return place.allowed().may_end


@pytest.mark.parametrize(
    ("form", "inside", "outside"),
    [
        (schema({"type": "boolean"}), ["true", "false"], ["tru", "true ", " true", "null"]),
        (schema(True), ["null", '{"a": [1, "x"]}'], ["nul", "[1,]"]),
        (schema({"enum": ["é", 1]}), ['"é"', "1"], ['"e"', "é"]),
        (schema({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}), ["-12"], ["1.5", "-"]),
        (StructuredOutput(OutputForm.JSON_OBJECT), ["{}", '{"a":{"b":null}}'], ["[]", "1", "{"]),
        (regex("[ab]{2}|é+"), ["ab", "éé"], ["a", "aba", "\n"]),
        (StructuredOutput.one_of(["yes", "no", 'a"\\b\n{é}.*']), ["no", 'a"\\b\n{é}.*'], ["n", "aab"]),
        (StructuredOutput(OutputForm.GRAMMAR, 'start: "(" start ")" | "x"'), ["x", "((x))"], ["(x", ""]),
    ],
    ids=lambda value: value.form.value if isinstance(value, StructuredOutput) else "",
)
def test_a_form_admits_what_it_says(form: StructuredOutput, inside: list[str], outside: list[str]) -> None:
    assert [text for text in inside if not accepts(form, text)] == []
    assert [text for text in outside if accepts(form, text)] == []


@settings(max_examples=40, deadline=None)
@given(SCHEMAS)
def test_a_mask_allows_the_tokens_that_may_follow_and_no_others(wanted: dict[str, object]) -> None:
    """Along one text, of all tokens, by asking the grammar for each of them alone."""
    form = schema(wanted)
    place = GRAMMARS_OF_PIECES.compile(form).start()
    taken: list[int] = []
    for number in range(8):
        found = place.allowed()
        allowed = ids_in(found.words)
        assert allowed == [i for i in range(VOCAB_SIZE) if TEXTS[i] and place.copy().count_fitting([i]) == 1]
        if found.may_end:
            check_whole(form, b"".join(TEXTS[token_id] for token_id in taken).decode())
        if not allowed:
            break
        taken.append(allowed[number % len(allowed)])
        place.take(taken[-1:])


GRAMMARS_OF_PIECES = grammars_of()


@pytest.mark.parametrize(
    ("form", "field", "reason"),
    [
        (schema("{"), "json_schema", "is not JSON"),
        (schema("3"), "json_schema", "is not an object at #$"),
        (schema("[" * 5000), "json_schema", "is nested too deeply"),
        (schema('{"const": ' + "9" * 5000 + "}"), "json_schema", "more than 4300 digits"),
        (schema('{"a":' * 500 + "1" + "}" * 500), "json_schema", "recursion"),
        (schema(False), "json_schema", "at #$"),
        (schema({"type": "strin"}), "json_schema", "Invalid type: strin at #$"),
        (
            schema({"type": "object", "properties": {"x": {"items": {"not": {}}}}}),
            "json_schema",
            r"Unimplemented keys: \[.not.\] at #/properties/x/items$",
        ),
        (
            schema({"anyOf": [{"type": "null"}, {"properties": {"a/b~": {"pattern": "("}}}]}),
            "json_schema",
            "at #/anyOf/1/properties/a~1b~0$",
        ),
        (
            schema({"$ref": "#/$defs/n", "$defs": {"m": {"type": "null"}, "n": {"pattern": "(?=a)"}}}),
            "json_schema",
            r"look-around.* at #/\$defs/n$",
        ),
        (schema({"$ref": "https://example.com/x.json"}), "json_schema", "does not fetch"),
        (regex("a("), "regex", "unclosed group"),
        (regex("[^\\x00-\\x{10FFFF}]"), "regex", "no token"),
        (StructuredOutput(OutputForm.GRAMMAR, "start: missing"), "grammar", 'unknown name: "missing"'),
        (StructuredOutput(OutputForm.GRAMMAR, 'start: start "a"'), "grammar", "no token"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name_and_place(
    form: StructuredOutput, field: str, reason: str
) -> None:
    with pytest.raises(InvalidArgument, match=reason) as caught:
        GRAMMARS.compile(form)
    assert caught.value.field == f"structured_output.{field}"
    assert len(caught.value.reason) < 500


def test_a_grammar_that_the_models_tokens_cannot_write_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no token of the model's goes on"):
        GRAMMARS_OF_PIECES.compile(regex("x"))


def test_every_way_to_write_a_text_in_tokens_is_allowed() -> None:
    """Whatever the grammar says of that."""
    for source in ('start: "{" "\\""', '%llguidance {"no_forcing": false}\nstart: "{" "\\""'):
        found = GRAMMARS_OF_PIECES.compile(StructuredOutput(OutputForm.GRAMMAR, source)).start().allowed()
        assert [TEXTS[token_id] for token_id in ids_in(found.words)] == [b"{", b'{"']


@pytest.mark.parametrize(
    "form",
    [
        schema({"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(500)}}),
        StructuredOutput(
            OutputForm.GRAMMAR,
            f"start: {' | '.join(f'r{i}' for i in range(1200))}\n"
            + "\n".join(f'r{i}: "a{i}"' for i in range(1200)),
        ),
    ],
    ids=["optional properties", "alternatives"],
)
def test_what_is_too_wide_is_refused_at_once_and_by_its_width(form: StructuredOutput) -> None:
    with pytest.raises(InvalidArgument, match=r"has \d{4} ways to go on at one place; at most 1000"):
        GRAMMARS.compile(form)


def test_what_is_too_wide_further_on_is_told_by_its_width_there() -> None:
    wide = {"properties": {f"k{i}": {"type": "integer"} for i in range(500)}}
    place = GRAMMARS.compile(schema({"required": ["q"], "properties": {"q": wide}})).start()
    for byte in b'{"q":':
        assert BYTES.index(bytes([byte])) in ids_in(place.allowed().words)
        place.take([BYTES.index(bytes([byte]))])
    with pytest.raises(GrammarTooComplex, match=r"has \d{4} ways to go on"):
        place.take([BYTES.index(b"{")])


HOSTILE = [
    schema({"type": "string", "maxLength": 50_000}),
    schema({"type": "string", "pattern": "^(([a-z]{1,30}){1,30}){1,30}$"}),
    schema({"enum": [f"value {number}" for number in range(4000)]}),
    schema({"properties": {str(i): {"pattern": f"^[a-f]{{{i}}}$"} for i in range(500)}}),
    schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"items": {"$ref": "#"}}]}}}
    ),
    regex("((a{1,100}){1,100}){1,100}"),
    regex("(a|b|ab|ba|aab)*(a|b){200}(a|ab)*c"),
    StructuredOutput(OutputForm.GRAMMAR, 'start: start start | "a" | start start start |'),
]


@pytest.mark.parametrize("form", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_form_is_bounded_in_work(form: StructuredOutput) -> None:
    """Compiled or refused, and so is each of its tokens: by counts of work, so that no clock is asked."""
    try:
        place = GRAMMARS.compile(form).start()
        for _ in range(120):
            found = place.allowed()
            allowed = ids_in(found.words)
            if not allowed:
                return
            place.take([max(allowed, key=lambda i: (BYTES[i].isalnum(), i))])
    except (InvalidArgument, GrammarTooComplex):
        return


def test_more_characters_than_allowed_are_refused_unread() -> None:
    with pytest.raises(InvalidArgument, match="12 characters; at most 10"):
        grammars_of(BYTES, max_characters=10).compile(regex("a" * 12))


@pytest.mark.parametrize(("most", "inside", "outside"), [(2, "[1,\n 2]", "[1,   2]"), (0, "[1,2]", "[1, 2]")])
def test_white_space_in_json_is_bounded(most: int, inside: str, outside: str) -> None:
    grammars = grammars_of(BYTES, max_json_whitespace=most)
    form = schema({"type": "array", "items": {"type": "integer"}})
    assert accepts(form, inside, grammars)
    assert not accepts(form, outside, grammars)


def test_grammars_are_kept_while_in_use_and_the_last_few_beside() -> None:
    grammars = grammars_of(BYTES, max_cached=2)
    held = grammars.compile(regex("a"))
    for letter in "bcd":
        grammars.compile(regex(letter))
    assert grammars.find(regex("a")) is held
    assert grammars.find(regex("b")) is None
    assert grammars.find(regex("d")) is not None
    figures = grammars.figures()
    assert (figures.num_compilations, figures.num_hits) == (4, 2)
    del held
    for letter in "ef":
        grammars.compile(regex(letter))
    assert grammars.find(regex("a")) is None
    assert grammars.figures().num_cached == 2


def test_a_vocabulary_that_has_no_texts_refuses_every_form_and_is_asked_once() -> None:
    from pageturner.service.grammars.compiler import GrammarCompiler
    from pageturner.service.grammars.options import GrammarOptions

    asked = []

    def vocabulary() -> tuple[bytes, ...]:
        asked.append(True)
        raise InvalidArgument("structured_output", "no texts")

    compiler = GrammarCompiler(vocabulary, 4, GrammarOptions())
    for pattern in ("a", "b"):
        with pytest.raises(InvalidArgument, match="no texts"):
            compiler.compile(regex(pattern))
    assert len(asked) == 1
    assert END == VOCAB_SIZE - 1
