"""The `pageturner` program. Each command is a file of `service.commands`, imported when it is asked for.

Neither `--help` nor a client command may pay for torch, so no command imports it at its top.

A PageturnerError is the user's to read: one line on stderr and exit code 2. So is a library that is
not installed, as the bare client brings none of a server's. Anything else is a bug of ours, and shows
its traceback.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import shlex
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn, Protocol, cast

from pageturner import __version__
from pageturner.service.commands import signals
from pageturner.service.commands.output import discard_output, last_word, prepare_streams
from pageturner.service.commands.parser import Parser, UsageError
from pageturner.service.errors import PageturnerError, Unauthenticated

COMMANDS: dict[str, str] = {
    "serve": "pageturner.service.commands.serve",
    "generate": "pageturner.service.commands.generate",
    "chat": "pageturner.service.commands.chat",
    "score": "pageturner.service.commands.score",
    "demo": "pageturner.service.commands.demo",
    "config": "pageturner.service.commands.config",
    "policies": "pageturner.service.commands.policies",
    "adapters": "pageturner.service.commands.adapters",
    "drain": "pageturner.service.commands.drain",
    "tokens": "pageturner.service.commands.tokens",
    "plan": "pageturner.service.commands.plan",
    "bench": "pageturner.service.commands.bench",
    "kernels": "pageturner.service.commands.kernels",
    "simulate": "pageturner.service.commands.simulate",
    "calibrate": "pageturner.service.commands.calibrate",
    "study": "pageturner.service.commands.study",
    "flight": "pageturner.service.commands.flight",
    "replay": "pageturner.service.commands.replay",
    "explain": "pageturner.service.commands.explain",
    "top": "pageturner.service.commands.top",
    "probe": "pageturner.service.commands.probe",
    "loadtest": "pageturner.loadtest.cli",
    "peers": "pageturner.loadtest.peers.cli",
}
EXTRAS = {"textual": "top", "matplotlib": "lab", "cupy": "cuda13"}
"""Of pyproject.toml, by the library that is wanted; `serve` brings all others."""
CALLS = frozenset(
    {
        "generate",
        "chat",
        "score",
        "demo",
        "policies",
        "adapters",
        "flight",
        "explain",
        "drain",
        "probe",
        "top",
        "loadtest",
        "bench",
    }
)
"""Commands that call a server. gRPC's own lines on standard error are kept from them, for which its variable
has to be set before it is imported."""

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT


class Command(Protocol):
    """What a module in COMMANDS offers."""

    HELP: str
    EXAMPLE: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's words and flags."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Do the work; the exit code. Raises PageturnerError for what is the user's to mend."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. argv: of a program that calls this, whose handlers of signals are its
    own again then; else those of this process, which ends behind it."""
    prepare_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words and words[0] in COMMANDS else ""
    try:
        if words and not name and not words[0].startswith("-"):
            raise UsageError(_unknown_command(words[0]))
        if name in CALLS:
            from pageturner.service.config import quiet_grpc  # which the others need not wait for

            quiet_grpc()
        arguments = _command_parser(name).parse(words[1:]) if name else _overview().parse(words)
        arguments.command_line = shlex.join(["pageturner", *words])
        before = {number: signal.signal(number, _leave) for number in signals.ending_signals()}
        try:
            return cast(int, arguments.run(arguments))
        finally:
            for number, handler in before.items() if argv is not None else ():
                signal.signal(number, handler)
    except (UsageError, PageturnerError) as error:
        last_word(" ".join(filter(None, ("pageturner", name))) + f": {error}{_hint(error)}")
        return EXIT_USER_ERROR
    except ModuleNotFoundError as error:
        library = (error.name or "pageturner").partition(".")[0]
        if library == "pageturner":
            raise
        extra = EXTRAS.get(library, "serve")
        hint = f"{library} is not installed; pip install 'pageturner[{extra}]' brings it"
        last_word(f"pageturner {name}: {hint}")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        discard_output()  # the reader of standard output went away
        return 1


def _hint(error: Exception) -> str:
    """What a command's user can do where the server's own words are for callers of any kind."""
    if not isinstance(error, Unauthenticated):
        return ""
    from pageturner.service.config import TOKEN_FILE_VARIABLE

    return f"; --token-file FILE or {TOKEN_FILE_VARIABLE} names the file with yours"


def _unknown_command(word: str) -> str:
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
    return f"no command {word!r}; {hint}"


def _overview() -> Parser:
    """The parser of a command line that names no command: --help, --version, or a mistake."""
    parser = Parser(
        prog="pageturner",
        description="A gRPC text-generation service: paged KV cache, interchangeable scheduling policies.",
    )
    parser.add_argument("--version", action="version", version=f"pageturner {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS:
        subparsers.add_parser(name, help=_command(name).HELP)
    return parser


def _command_parser(name: str) -> Parser:
    command = _command(name)
    parser = Parser(
        prog=f"pageturner {name}",
        description=f"{command.HELP[0].upper()}{command.HELP[1:]}.",
        epilog=f"example: {command.EXAMPLE}",
    )
    command.add_arguments(parser)
    parser.set_defaults(run=command.run)
    return parser


def _command(name: str) -> Command:
    return cast(Command, importlib.import_module(COMMANDS[name]))


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    """Unwind as for Ctrl-C, so that a server that a command started is stopped with it."""
    sys.exit(128 + number)
