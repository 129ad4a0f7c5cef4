"""`pageturner probe`: whether a server serves, as an exit code: for containers, units and scripts."""

from __future__ import annotations

import argparse

from pageturner.service.client import SyncClient
from pageturner.service.client.calls import GENERATION_SERVICE
from pageturner.service.commands.credentials import add_credential_flags, credentials_of
from pageturner.service.commands.flight import add_target
from pageturner.service.commands.output import write

HELP = "ask a server whether it serves: exit code 0 if so, 1 if not, 2 if there is no answer"
EXAMPLE = "pageturner probe --target localhost:50051 --timeout 3"

NOT_SERVING = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_credential_flags(parser)
    parser.add_argument(
        "--service",
        default=GENERATION_SERVICE,
        help="whose health is asked for, by grpc.health.v1 (default %(default)s)",
    )
    parser.add_argument("--timeout", type=float, metavar="SECONDS", default=5.0, help="for the answer")


def run(arguments: argparse.Namespace) -> int:
    with SyncClient(arguments.target, credentials=credentials_of(arguments)) as client:
        is_serving = client.is_serving(arguments.service, timeout_seconds=arguments.timeout)
    write("serving" if is_serving else "not serving")
    return 0 if is_serving else NOT_SERVING
