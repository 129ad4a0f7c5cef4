"""A policy in words: one reader for the command line, the configuration and the simulator."""

from __future__ import annotations

import pytest

from pageturner.policies.errors import PolicyError, PolicySpecError, UnknownAxisError
from pageturner.policies.spec import PolicySpec, parse_choice, parse_spec, split_outside
from pageturner.service.schema import from_text, from_toml
from pageturner.service.simulator.contenders import parse_policies


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("least-computed", PolicySpec("least-computed")),
        ("cost-model:bias=2", PolicySpec("cost-model", {"bias": 2})),
        (" cost-model : bias = 2 ", PolicySpec("cost-model", {"bias": 2})),
        ("x:a=true,b=1.5,c=text,d=null", PolicySpec("x", {"a": True, "b": 1.5, "c": "text", "d": None})),
        ('x:a="1",b=[1, 2],c={d=1, e=2}', PolicySpec("x", {"a": "1", "b": [1, 2], "c": {"d": 1, "e": 2}})),
        ("x:a=2026-01-01", PolicySpec("x", {"a": "2026-01-01"})),
        ("my.module:MyPolicy", PolicySpec("my.module:MyPolicy")),
        ("my.module:MyPolicy:a=1", PolicySpec("my.module:MyPolicy", {"a": 1})),
        ("my.module:MyPolicy:a=b:c=d", PolicySpec("my.module:MyPolicy", {"a": "b:c=d"})),
        ('vtc:w="gold=4, free=0.5",x=1', PolicySpec("vtc", {"w": "gold=4, free=0.5", "x": 1})),
        ('{ name = "cost-model", bias = 2 }', PolicySpec("cost-model", {"bias": 2})),
    ],
)
def test_every_reader_makes_the_same_spec_of_the_same_text(text: str, spec: PolicySpec) -> None:
    assert parse_spec(text) == spec
    assert parse_choice(f"queue={text}") == ("queue", spec)
    assert from_text(PolicySpec, text) == from_toml(PolicySpec, text) == spec
    assert parse_policies(f"victim=lru;queue={text}").policies["queue"] == spec


@pytest.mark.parametrize("value", ["[" * 5000, "9" * 5000])
def test_a_value_beyond_what_toml_can_hold_is_text(value: str) -> None:
    assert parse_spec(f"vtc:x={value}") == PolicySpec("vtc", {"x": value})


@pytest.mark.parametrize("text", ["", "a=1", ":a=1", "x:a=1,b", "x:=1", "{ bias = 2 }", "{ name = 1 }", "{"])
def test_what_is_no_spec_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(PolicySpecError):
        parse_spec(text)


@pytest.mark.parametrize(
    ("text", "error"),
    [("victim", PolicySpecError), ("victim=", PolicySpecError), ("vic=x", UnknownAxisError)],
)
def test_what_is_no_choice_is_refused(text: str, error: type[PolicyError]) -> None:
    with pytest.raises(error):
        parse_choice(text)


def test_separators_in_quotes_and_brackets_separate_nothing() -> None:
    assert split_outside('a,"b,c",[d,{e,f}],g', ",") == ["a", '"b,c"', "[d,{e,f}]", "g"]
