"""`--json-schema FILE` and its kin: the form that an answer must have."""

from __future__ import annotations

import argparse
from pathlib import Path

from pageturner.service.core.structured_output import OutputForm, StructuredOutput
from pageturner.service.errors import ConfigError


def add_form_flags(parser: argparse.ArgumentParser) -> None:
    """At most one of them, but for --choice, which may be repeated."""
    group = parser.add_argument_group("form of the answer").add_mutually_exclusive_group()
    group.add_argument("--json-schema", metavar="FILE", type=Path, help="JSON that this JSON schema admits")
    group.add_argument("--json-object", action="store_true", help="any JSON object")
    group.add_argument("--regex", metavar="PATTERN", help="a text that the whole regular expression matches")
    group.add_argument(
        "--choice", action="append", metavar="TEXT", help="one of the texts given so; may be repeated"
    )
    group.add_argument(
        "--grammar", metavar="FILE", type=Path, help="a text of this context-free grammar (Lark's syntax)"
    )


def form_of(arguments: argparse.Namespace) -> StructuredOutput | None:
    """What the flags ask for; None for any form. Raises ConfigError for a file that can't be read."""
    if getattr(arguments, "json_schema", None) is not None:
        return StructuredOutput(OutputForm.JSON_SCHEMA, _text_of("--json-schema", arguments.json_schema))
    if getattr(arguments, "json_object", False):
        return StructuredOutput(OutputForm.JSON_OBJECT)
    if getattr(arguments, "regex", None) is not None:
        return StructuredOutput(OutputForm.REGEX, arguments.regex)
    if getattr(arguments, "choice", None):
        return StructuredOutput.one_of(arguments.choice)
    if getattr(arguments, "grammar", None) is not None:
        return StructuredOutput(OutputForm.GRAMMAR, _text_of("--grammar", arguments.grammar))
    return None


def _text_of(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(flag, f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(flag, f"{path} is not UTF-8: {error.reason}") from error
