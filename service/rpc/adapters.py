"""Adapters over the wire: which folders a caller may load, and what is told of those that are loaded."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from pageturner.service.engine.api import MAX_NAME_CHARACTERS, AdapterInfo
from pageturner.service.errors import InvalidArgument
from pageturner.service.identity import Identity
from pageturner.service.rpc.callers import LOCAL_ADMIN
from pageturner.v1 import admin_pb2 as pb

MAX_PATH_CHARACTERS = 4096
MAX_WAIT_SECONDS = 86400.0


def folder_of(path: str, allowed: Path | None, caller: Identity) -> Path:
    """The folder that a caller names, which it may name: below `allowed`, links followed, or of a local
    operator any.

    Raises InvalidArgument, which tells of nothing outside whether it is there.
    """
    if not path:
        raise InvalidArgument("path", "is empty")
    if len(path) > MAX_PATH_CHARACTERS or "\0" in path:
        raise InvalidArgument("path", f"is no path of at most {MAX_PATH_CHARACTERS} characters")
    if caller is LOCAL_ADMIN:
        return Path(path) if allowed is None else allowed / path
    if allowed is None:
        reason = "this server loads no adapter that a caller names: adapters.folder is not set"
        raise InvalidArgument("path", reason)
    try:
        root = allowed.resolve()
        found = (root / path).resolve()
    except (OSError, RuntimeError) as error:  # links that lead in a circle
        raise InvalidArgument("path", "cannot be followed") from error
    if found == root or not found.is_relative_to(root):
        raise InvalidArgument(
            "path", "is not below the folder that adapters are loaded from (adapters.folder)"
        )
    return found


def wait_of(request: pb.UnloadAdapterRequest) -> float:
    """Raises InvalidArgument."""
    if not 0 <= request.wait_seconds < MAX_WAIT_SECONDS:  # also refuses NaN
        raise InvalidArgument("wait_seconds", f"{request.wait_seconds} is not in [0, {MAX_WAIT_SECONDS:g})")
    return request.wait_seconds


def check_name(name: str) -> None:
    """Bound what errors and logs may repeat. Raises InvalidArgument."""
    if len(name) > MAX_NAME_CHARACTERS:
        raise InvalidArgument("name", f"longer than {MAX_NAME_CHARACTERS} characters")


def from_adapter(adapter: AdapterInfo) -> pb.Adapter:
    return pb.Adapter(**asdict(adapter))
