"""`--template-variable NAME=VALUE`: what a model's chat template reads beside the messages."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from pageturner.service.engine.api import ChatMessage, ChatPrompt, Prompt


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


def chat_prompt(messages: Sequence[ChatMessage], arguments: argparse.Namespace) -> Prompt:
    """The conversation with the variables that the flags give."""
    turns = tuple(messages)
    variables = dict(arguments.template_variables)
    return ChatPrompt(turns, variables) if variables else turns


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
