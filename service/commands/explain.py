"""`pageturner explain`: which policy delayed, skipped or preempted a request, when and for whom."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pageturner.service.commands.credentials import add_credential_flags, credentials_of
from pageturner.service.commands.flight import add_target, fetch, read
from pageturner.service.commands.output import write
from pageturner.service.flight import flight_file
from pageturner.service.flight.explain import explain

HELP = "say in words what happened to a request and which policy decided it"
EXAMPLE = "pageturner explain my-request-7 --target localhost:50051"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", help="as the client chose it, or as the server answered it")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--file", metavar="FILE", type=Path, help="a flight record, instead of asking a server"
    )
    add_target(source)
    add_credential_flags(parser)
    parser.add_argument("--json", action="store_true", help="the same as JSON")


def run(arguments: argparse.Namespace) -> int:
    record = (
        read(arguments.file)
        if arguments.file
        else flight_file.load(fetch(arguments.target, credentials_of(arguments)))
    )
    lines = explain(record, arguments.request_id)
    if arguments.json:
        told = [{"seconds": line.seconds, "text": line.text, "count": line.count} for line in lines]
        write(json.dumps({"request_id": arguments.request_id, "lines": told}, indent=2))
        return 0
    for line in lines:
        write(str(line))
    return 0
