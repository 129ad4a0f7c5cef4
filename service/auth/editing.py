"""Tokens put into an identities file and taken out of it, with all else as it was, its comments too."""

from __future__ import annotations

import datetime as dt
import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import AoT

from pageturner.service.auth.identities import Identities, check_tenant_name, parse_identities, read_text
from pageturner.service.auth.tokens import BearerToken
from pageturner.service.errors import ConfigError

NEW_FILE = "# Who may call: tenants with tokens (as hashes), certificates and limits.\n"


def add_token(text: str, tenant: str, token: BearerToken, expires: dt.datetime | None) -> str:
    """The file with a token more, of a tenant that may be new. Raises ConfigError for a file with a fault."""
    check_tenant_name("tenant", tenant)
    document: Any = tomlkit.parse(text)
    before = parse_identities(text)
    if "tenants" not in document:
        document.append("tenants", tomlkit.table(is_super_table=True))
    if tenant not in document["tenants"]:
        document["tenants"].append(tenant, tomlkit.table())
    table = document["tenants"][tenant]
    if "tokens" not in table:
        table.append("tokens", tomlkit.array().multiline(True))
    entry = tomlkit.table() if isinstance(table["tokens"], AoT) else tomlkit.inline_table()
    entry.append("id", token.id)
    entry.append("sha256", token.digest.hex())
    if expires is not None:
        entry.append("expires", expires)
    table["tokens"].append(entry)
    return _checked(document, before, {*before.tokens, token.id})


def remove_token(text: str, token_id: str) -> str:
    """The file without a token. Raises ConfigError where there is none of this id."""
    before = parse_identities(text)
    if token_id not in before.tokens:
        raise ConfigError("tokens revoke", f"there is no token {token_id!r}; `tokens list` shows them")
    document: Any = tomlkit.parse(text)
    entries = document["tenants"][before.tokens[token_id].identity.tenant]["tokens"]
    position = next(at for at, entry in enumerate(entries) if entry["id"] == token_id)
    del entries[position]
    return _checked(document, before, set(before.tokens) - {token_id})


def _checked(document: Any, before: Identities, token_ids: set[str]) -> str:
    """The document's text, which means what was meant, and nothing else has changed."""
    text: str = tomlkit.dumps(document)
    after = parse_identities(text)
    kept = token_ids & set(before.tokens)
    assert set(after.tokens) == token_ids, "the edit is the one that was meant"
    assert all(after.tokens[each] == before.tokens[each] for each in kept), "and touches no other token"
    assert after.certificates == before.certificates, "nor a certificate"
    return text


def edit_file(path: Path, edit: Callable[[str], str]) -> None:
    """Replace the file's text by what `edit` makes of it, whole or not at all; one that is not there begins
    empty.

    A new file has mode 0600; one that exists keeps owner and mode, less what all others may do with it. Edits
    at once come one after the other. Raises ConfigError.
    """
    path = path.resolve()  # a link stays one
    try:
        with _only_editor(path.parent):
            text = read_text(path) if path.exists() else NEW_FILE
            _replace(path, edit(text))
    except OSError as error:
        raise ConfigError("auth.identities", f"{path} cannot be written: {error.strerror}") from error


@contextmanager
def _only_editor(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, text: str) -> None:
    status = path.stat() if path.exists() else None
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if status is not None:
                # The server may be another user than who edits: what it could read before, it can read now.
                if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(descriptor, status.st_uid, status.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & 0o770)
            os.fsync(descriptor)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
