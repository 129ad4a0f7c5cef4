"""`pageturner drain`: end a running server's work in order, as before it is taken away."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from pageturner.service.client import Client
from pageturner.service.commands import signals
from pageturner.service.commands.credentials import add_credential_flags, credentials_of
from pageturner.service.commands.flight import add_target
from pageturner.service.commands.output import write
from pageturner.service.engine.api import DrainOutcome

HELP = "end a running server's work in order: clients leave, what runs finishes, the rest is ended"
EXAMPLE = "pageturner drain --target localhost:50051 --grace-seconds 60"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_credential_flags(parser)
    parser.add_argument(
        "--grace-seconds",
        type=float,
        metavar="X",
        help="how long running requests may go on (default: server.drain_seconds of that server)",
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    async def ask() -> DrainOutcome:
        async with Client(arguments.target, credentials=credentials_of(arguments)) as client:
            return await client.drain(arguments.grace_seconds)

    outcome = signals.run(ask())
    if arguments.json:
        write(json.dumps(asdict(outcome)))
    else:
        write(
            f"drained: requests that finished: {outcome.num_finished}, that were ended: {outcome.num_aborted}"
        )
    return 0
