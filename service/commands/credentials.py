"""The flags by which commands that call a server say who they are, and whom they trust."""

from __future__ import annotations

import argparse
from pathlib import Path

from pageturner.service.client.credentials import Credentials
from pageturner.service.config import TOKEN_FILE_VARIABLE, token_file


def add_credential_flags(parser: argparse._ActionsContainer) -> None:
    """--token-file, --tls-ca and the client's own certificate. A token is never an argument: every user of
    the machine sees those."""
    add = parser.add_argument
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"the file with this caller's token; else what {TOKEN_FILE_VARIABLE} names",
    )
    add("--tls", action="store_true", help="encrypt, and trust the authorities that gRPC brings")
    add("--tls-ca", type=Path, metavar="FILE", help="encrypt, and trust these authorities (PEM) alone")
    add("--client-certificate", type=Path, metavar="FILE", help="this caller's certificate (PEM)")
    add("--client-key", type=Path, metavar="FILE", help="its key")


def credentials_of(arguments: argparse.Namespace) -> Credentials:
    """What these flags say. Raises InvalidArgument, also for a token's file that can't be read."""
    credentials = Credentials(
        token_file=arguments.token_file or token_file(),
        tls=arguments.tls,
        tls_ca=arguments.tls_ca,
        client_certificate=arguments.client_certificate,
        client_key=arguments.client_key,
    )
    credentials.metadata()  # a file that is not there is known at once
    return credentials
