"""The flags for the form of an answer."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from pageturner.service.commands.answer import add_sampling_flags, sampling_options
from pageturner.service.commands.structured import form_of
from pageturner.service.core.structured_output import OutputForm, StructuredOutput
from pageturner.service.errors import ConfigError


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_sampling_flags(parser)
    return parser.parse_args(words)


def test_each_flag_asks_for_its_form(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text('{"const": "é"}', encoding="utf-8")
    for words, form in (
        (["--json-schema", str(file)], StructuredOutput(OutputForm.JSON_SCHEMA, '{"const": "é"}')),
        (["--json-object"], StructuredOutput(OutputForm.JSON_OBJECT)),
        (["--regex", "a+"], StructuredOutput(OutputForm.REGEX, "a+")),
        (["--choice", "yes", "--choice", "no"], StructuredOutput.one_of(["yes", "no"])),
        (["--grammar", str(file)], StructuredOutput(OutputForm.GRAMMAR, '{"const": "é"}')),
    ):
        assert sampling_options(parsed(*words)) == {"structured_output": form}
    assert sampling_options(parsed()) == {}


def test_two_forms_at_once_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--regex", "a", "--choice", "b")
    assert "not allowed with" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_named_with_its_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--json-schema: .* cannot be read"):
        form_of(parsed("--json-schema", str(tmp_path / "missing")))
    file = tmp_path / "latin"
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"--grammar: .* is not UTF-8"):
        form_of(parsed("--grammar", str(file)))
