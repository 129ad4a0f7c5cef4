"""Template variables as flags: JSON where it is, text otherwise."""

from __future__ import annotations

import argparse

import pytest

from pageturner.service.commands import generate
from pageturner.service.commands.template_variables import add_template_flags, chat_prompt
from pageturner.service.engine.api import ChatMessage, ChatPrompt
from pageturner.service.errors import ConfigError

TURN = ChatMessage("user", "hi")


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_template_flags(parser)
    return parser.parse_args(flags)


@pytest.mark.fault("43")
def test_template_variables_are_json_or_text() -> None:
    given = parsed(
        "--template-variable=enable_thinking=false",
        "--template-variable=style=dry = short",
        '--template-variable=more={"a": [1]}',
    )
    expected = {"enable_thinking": False, "style": "dry = short", "more": {"a": [1]}}
    assert chat_prompt([TURN], given) == ChatPrompt((TURN,), expected)
    assert chat_prompt([TURN], parsed()) == (TURN,)


@pytest.mark.parametrize("text", ["enable_thinking", "=false"])
def test_a_template_variable_without_name_or_value_is_refused(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(f"--template-variable={text}")
    assert "is not NAME=VALUE" in capsys.readouterr().err


def test_a_template_variable_nested_too_deeply_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(f"--template-variable=a={'[' * 50_000}")
    assert "a is nested too deeply" in capsys.readouterr().err


def test_template_variables_do_not_go_with_raw_text() -> None:
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    arguments = parser.parse_args(["hi", "--raw", "--template-variable", "a=1"])
    with pytest.raises(ConfigError, match="--raw leaves out"):
        generate._prompt("hi", arguments)
