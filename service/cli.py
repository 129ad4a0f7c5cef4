"""The `pageturner` program. Each command is a file of `service.commands`, imported when it is asked for.

Neither `--help` nor a client command may pay for torch, so no command imports it at its top.

A PageturnerError is the user's to read: one line on stderr and exit code 2. So is a library that is
not installed, as the bare client brings none of a server's. Anything else is a bug of ours, and shows
its traceback.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn, Protocol, cast

from pageturner import __version__
from pageturner.service.commands.output import discard_output
from pageturner.service.errors import PageturnerError

COMMANDS: dict[str, str] = {
    "serve": "pageturner.service.commands.serve",
    "generate": "pageturner.service.commands.generate",
    "chat": "pageturner.service.commands.chat",
    "demo": "pageturner.service.commands.demo",
    "config": "pageturner.service.commands.config",
    "policies": "pageturner.service.commands.policies",
    "plan": "pageturner.service.commands.plan",
    "bench": "pageturner.service.commands.bench",
    "kernels": "pageturner.service.commands.kernels",
    "simulate": "pageturner.service.commands.simulate",
    "calibrate": "pageturner.service.commands.calibrate",
    "study": "pageturner.service.commands.study",
    "flight": "pageturner.service.commands.flight",
    "replay": "pageturner.service.commands.replay",
    "explain": "pageturner.service.commands.explain",
    "loadtest": "pageturner.loadtest.cli",
}
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT


class Command(Protocol):
    """What a module in COMMANDS offers."""

    HELP: str
    EXAMPLE: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="pageturner",
        description="A gRPC text-generation service: paged KV cache, interchangeable scheduling policies.",
    )
    parser.add_argument("--version", action="version", version=f"pageturner {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = next((word for word in words if not word.startswith("-")), None)
    # The command that was asked for is imported whole; the list of all of them needs their HELP only.
    wanted = {asked: COMMANDS[asked]} if asked in COMMANDS else COMMANDS
    for name, module in wanted.items():
        command = cast(Command, importlib.import_module(module))
        subparser = subparsers.add_parser(
            name,
            help=command.HELP,
            description=f"{command.HELP[0].upper()}{command.HELP[1:]}.",
            epilog=f"example: {command.EXAMPLE}",
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    arguments = parser.parse_args(words)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        return cast(int, arguments.run(arguments))
    except PageturnerError as error:
        sys.stderr.write(f"pageturner {arguments.command}: {error}\n")
        return EXIT_USER_ERROR
    except ModuleNotFoundError as error:
        library = (error.name or "pageturner").partition(".")[0]
        if library == "pageturner":
            raise
        hint = f"{library} is not installed; the extras of pageturner, such as pageturner[serve], bring it"
        sys.stderr.write(f"pageturner {arguments.command}: {hint}\n")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        discard_output()  # its reader went away
        return 1


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    """Unwind as for Ctrl-C, so that a server that a command started is stopped with it."""
    sys.exit(128 + number)
