"""`pageturner flight dump`: the flight record of a running server, as a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from pageturner.service.client import DEFAULT_TARGET, Client, Credentials
from pageturner.service.client.targets import TARGET_FORMS
from pageturner.service.commands import signals
from pageturner.service.commands.credentials import add_credential_flags, credentials_of
from pageturner.service.commands.output import note, write
from pageturner.service.errors import PageturnerError
from pageturner.service.flight import flight_file
from pageturner.service.flight.records import FlightRecord

HELP = "fetch what the scheduler of a server was told and decided of late"
EXAMPLE = "pageturner flight dump --target localhost:50051 --out flight.jsonl.gz"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["dump"], help="write it to a file")
    add_target(parser)
    add_credential_flags(parser)
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path("flight.jsonl.gz"), help="where")


def add_target(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--target",
        metavar=TARGET_FORMS,
        default=DEFAULT_TARGET,
        help=f"the server (default {DEFAULT_TARGET})",
    )


def run(arguments: argparse.Namespace) -> int:
    content = fetch(arguments.target, credentials_of(arguments))
    record = flight_file.load(content)
    try:
        arguments.out.write_bytes(content)
    except OSError as error:
        raise PageturnerError(f"cannot write {arguments.out}: {error.strerror}") from error
    write(f"{arguments.out}: {len(record.entries)} entries, {len(content)} bytes")
    return 0


def fetch(target: str, credentials: Credentials) -> bytes:
    """The file that the server makes of its record now."""

    async def ask() -> bytes:
        async with Client(target, credentials=credentials) as client:
            return await client.flight_record()

    return signals.run(ask())


def read(path: Path) -> FlightRecord:
    """Raises PageturnerError for a file that is not there or no flight record; says so if it was cut."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PageturnerError(f"cannot read {path}: {error.strerror}") from error
    try:
        record = flight_file.load(content)
    except flight_file.NotAFlightRecord as error:
        raise PageturnerError(f"{path}: {error}") from error
    if record.lost:
        note(f"{path}: {record.lost}")
    return record
