"""The parser of commands: flags and words in any order, defaults in the help, mistakes in one line."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pageturner.service.commands.output import write
from pageturner.service.commands.text import argument_text

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

BOOLEAN_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0"})
_METAVARS: dict[object, str] = {int: "N", float: "X", Path: "FILE"}


class UsageError(Exception):
    """The command line makes no sense; str() is one line that says why."""


class HelpFormatter(argparse.HelpFormatter):
    """Says the default of each flag, names its value by its type, and breaks no name at a hyphen."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.help or ""
        default = action.default  # 0 is one to be told, though it equals False
        has_default = default not in (None, "", argparse.SUPPRESS) and default is not False and default != []
        if not action.option_strings or not has_default:
            return action.help
        if "%(default)s" in shown:
            return shown.replace("(%(default)s)", "(default %(default)s)")
        return shown if "(default" in shown else f"{shown} (default %(default)s)"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return _METAVARS.get(action.type) or action.dest.upper()

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = textwrap.wrap(" ".join(text.split()), width - len(indent), break_on_hyphens=False)
        return "\n".join(indent + line for line in lines)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError, and takes positional words between flags.

    An argument without a type is text: one that is not is refused. Paths (and `type=str`) keep their bytes.
    """

    def __init__(self, **options: object) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, **options})  # type: ignore[arg-type] # argparse's own
        self.register("type", None, argument_text)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError, where argparse prints the usage and leaves."""
        raise UsageError(f"{message}; {self.prog} --help lists what there is")

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """The help and the version are results; argparse itself drops what cannot be written."""
        write(message, end="")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The arguments of these words. Raises UsageError, SystemExit after --help, or as `output.write`."""
        for action in self._actions:
            if action.nargs == argparse.PARSER:  # a command of commands
                return self.parse_args(_name_first(words, tuple(action.choices or ())))
        if "--" in words:  # argparse cannot mix beside it before Python 3.13
            return self.parse_args(words)
        return self.parse_intermixed_args(words)

    def parse_known_args(  # type: ignore[override] # argparse has overloads, of which this is the widest
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does, `--flag` of a boolean being `--flag=true`."""
        return super().parse_known_args(self._explicit_booleans(args or ()), namespace)

    def _explicit_booleans(self, words: Sequence[str]) -> list[str]:
        """`--flag` as `--flag=true` where its value may be left out and the next word is none.

        argparse would take the next word, such as a prompt, for the value.
        """
        optional = {
            name
            for action in self._actions
            if action.nargs == argparse.OPTIONAL
            for name in action.option_strings
        }
        explicit: list[str] = []
        for position, word in enumerate(words):
            if word == "--":
                return [*explicit, *words[position:]]
            following = words[position + 1] if position + 1 < len(words) else ""
            lacks_value = word in optional and following.lower() not in BOOLEAN_WORDS
            explicit.append(f"{word}=true" if lacks_value else word)
        return explicit


def _name_first(words: Sequence[str], names: Container[str]) -> list[str]:
    """The words with the first that is a name in front of the flags before it."""
    ordered = list(words)
    found = next((word for word in ordered if word in names), None)
    if found is not None:
        ordered.remove(found)
        ordered.insert(0, found)
    return ordered
