"""What a model's chat template reads beside the messages: `--template-variable`, `--tools`; and which one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from pageturner.service.engine.api import ChatMessage, ChatPrompt, Prompt
from pageturner.service.errors import ConfigError


def add_template_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--template-variable",
        dest="template_variables",
        action="append",
        default=[],
        type=_name_and_value,
        metavar="NAME=VALUE",
        help="for the chat template, such as enable_thinking=false; JSON, or else text; may be repeated",
    )
    parser.add_argument(
        "--tools",
        type=Path,
        metavar="FILE",
        help="what the model may call: a JSON list of tools",
    )
    parser.add_argument("--template", default="", metavar="NAME", help="one of the model's templates by name")


def chat_prompt(messages: Sequence[ChatMessage], arguments: argparse.Namespace) -> Prompt:
    """The conversation with the variables that the flags give."""
    turns = tuple(messages)
    variables = dict(arguments.template_variables)
    tools = () if arguments.tools is None else _read_tools(arguments.tools)
    if not (variables or tools or arguments.template):
        return turns
    return ChatPrompt(turns, variables, tools=tools, template=arguments.template)


def _read_tools(path: Path) -> tuple[object, ...]:
    """Raises ConfigError for what is no JSON list."""
    try:
        tools = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("--tools", f"cannot read {path}: {error}") from error
    if not isinstance(tools, list):
        raise ConfigError("--tools", f"{path} holds no JSON list")
    return tuple(tools)


def _name_and_value(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except RecursionError:
        raise argparse.ArgumentTypeError(f"{name} is nested too deeply") from None
    except ValueError:
        return name, value
