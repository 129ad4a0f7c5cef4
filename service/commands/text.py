"""Text that comes from outside: arguments and standard input, in whatever bytes and whatever locale."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError

from pageturner.service.errors import PageturnerError


def text_of(value: str, encoding: str) -> str:
    """The text of a value that was decoded by `encoding` with surrogateescape.

    Bytes that the locale could not decode are read as UTF-8. Raises ValueError where they are no UTF-8.
    """
    if not any("\ud800" <= character <= "\udfff" for character in value):
        return value
    try:
        return value.encode(encoding, "surrogateescape").decode("utf-8")
    except UnicodeError:
        shown = value.encode(encoding, "surrogateescape").decode("utf-8", "backslashreplace")
        raise ValueError(f"'{shown[:60]}' is not UTF-8 text") from None


def argument_text(value: str) -> str:
    """The `type` of an argument that is text. Raises ArgumentTypeError."""
    try:
        return text_of(value, sys.getfilesystemencoding())
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def input_text(value: str) -> str:
    """What was read from standard input, as text. Raises PageturnerError."""
    try:
        return text_of(value, sys.stdin.encoding)
    except ValueError as error:
        raise PageturnerError(f"standard input: {error}") from None
