"""`pageturner tokens`: bearer tokens made, listed, revoked and hashed, in the file of auth.identities."""

from __future__ import annotations

import argparse
import datetime as dt
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pageturner.service.commands.output import note, show, write, write_json
from pageturner.service.config import load_config
from pageturner.service.errors import ConfigError

if TYPE_CHECKING:
    from pageturner.service.auth.identities import Identities

HELP = "make, list and revoke the tokens by which tenants call a server"
EXAMPLE = "pageturner tokens new search --expires 90 --file identities.toml"

MAX_DAYS = 36_500.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser(
        "new",
        help="print a new token of a tenant, once, and put its hash into the file",
        epilog=f"example: {EXAMPLE}",
    )
    new.add_argument("tenant", metavar="TENANT", help="a tenant of the file, or a new one")
    new.add_argument("--out", type=Path, metavar="FILE", help="where to write the token, for this user alone")
    new.add_argument("--expires", type=float, metavar="DAYS", help="days from now; without it, never")
    listed = actions.add_parser(
        "list",
        help="the tokens of the file, without secrets",
        epilog="example: pageturner tokens list --json --file identities.toml",
    )
    revoke = actions.add_parser(
        "revoke",
        help="take a token out of the file; a server that runs refuses it within seconds",
        epilog="example: pageturner tokens revoke 0f3a9c21b7d4 --file identities.toml",
    )
    revoke.add_argument("id", metavar="ID", help="as `list` shows it")
    hashed = actions.add_parser(
        "hash",
        help="read a token from standard input; print the line that lets it in",
        epilog="example: pageturner tokens hash < token",
    )
    for action in (new, listed, revoke):
        action.add_argument(
            "--file",
            type=Path,
            help="the identities file; else the one that auth.identities of the configuration names",
        )
        action.add_argument("--config", type=Path, metavar="FILE", help="the configuration that names it")
    for action in (new, listed, revoke, hashed):
        action.add_argument("--json", action="store_true", help="the same as JSON")


def run(arguments: argparse.Namespace) -> int:
    match arguments.action:
        case "new":
            _new(arguments)
        case "list":
            _list(arguments)
        case "revoke":
            _revoke(arguments)
        case "hash":
            _hash(as_json=arguments.json)
    return 0


def _file(arguments: argparse.Namespace) -> Path:
    file: Path | None = arguments.file or load_config(arguments.config).config.auth.identities
    if file is None:
        raise ConfigError("auth.identities", "is not set; --file FILE says where tokens are kept")
    return file


def _new(arguments: argparse.Namespace) -> None:
    from pageturner.service.auth.editing import add_token, edit_file
    from pageturner.service.auth.tokens import new_token

    file, token, expires = _file(arguments), new_token(), _expiry(arguments.expires)
    with _kept(token.text, arguments.out):
        edit_file(file, partial(add_token, tenant=arguments.tenant, token=token, expires=expires))
    if arguments.json:
        document = {
            "id": token.id,
            "tenant": arguments.tenant,
            "token": None if arguments.out else token.text,
            "sha256": token.digest.hex(),
            "expires": None if expires is None else expires.isoformat(),
            "file": str(file),
        }
        write_json(document)
        return
    until = "never expires" if expires is None else f"expires {expires.isoformat()}"
    where = f"{arguments.out} has it" if arguments.out else "this is its only copy:"
    note(f"token {token.id} of {arguments.tenant} {until}; {file} has its hash, {where}")
    if not arguments.out:
        write(token.text)


@contextmanager
def _kept(text: str, path: Path | None) -> Iterator[None]:
    """The token in a new file, if one is wanted, of mode 0600; not there if what follows fails."""
    if path is None:
        yield
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{text}\n")
    except OSError as error:
        raise ConfigError("--out", f"{path}: {error.strerror}") from error
    try:
        yield
    except BaseException:
        path.unlink()
        raise


def _expiry(days: float | None) -> dt.datetime | None:
    if days is None:
        return None
    if not 0 < days <= MAX_DAYS:
        raise ConfigError("--expires", f"{days:g} days are not in (0, {MAX_DAYS:g}]")
    return (dt.datetime.now(dt.UTC) + dt.timedelta(days=days)).replace(microsecond=0)


def _list(arguments: argparse.Namespace) -> None:
    from pageturner.service.auth.identities import read_identities

    rows = _rows(read_identities(_file(arguments)), dt.datetime.now(dt.UTC))
    if arguments.json:
        write_json(rows)
        return
    from rich.table import Table

    table = Table("id", "tenant", "admin", "expires", "state", box=None)
    for row in rows:
        is_admin, expires = "yes" if row["admin"] else "", str(row["expires"] or "never")
        table.add_row(str(row["id"]), str(row["tenant"]), is_admin, expires, str(row["state"]))
    show(table)


def _rows(identities: Identities, now: dt.datetime) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for token_id, entry in identities.tokens.items():
        expires = None if entry.expires is None else dt.datetime.fromtimestamp(entry.expires, dt.UTC)
        rows.append(
            {
                "id": token_id,
                "tenant": entry.identity.tenant,
                "admin": entry.identity.is_admin,
                "expires": None if expires is None else expires.isoformat(),
                "state": "expired" if expires is not None and expires <= now else "valid",
            }
        )
    return rows


def _revoke(arguments: argparse.Namespace) -> None:
    from pageturner.service.auth.editing import edit_file, remove_token

    file = _file(arguments)
    edit_file(file, partial(remove_token, token_id=arguments.id))
    if arguments.json:
        write_json({"id": arguments.id, "file": str(file)})
    else:
        note(f"token {arguments.id} is revoked; calls that run go on to their end")


def _hash(*, as_json: bool) -> None:
    from pageturner.service.auth.tokens import MalformedToken, parse_token

    if sys.stdin.isatty():
        note("type the token, then Enter and Ctrl-D")
    try:
        token = parse_token(sys.stdin.read().strip())
    except MalformedToken as error:
        raise ConfigError("the token", str(error)) from None
    if as_json:
        write_json({"id": token.id, "sha256": token.digest.hex()})
    else:
        write(f'{{ id = "{token.id}", sha256 = "{token.digest.hex()}" }}')
