"""Conversions of GGUF files, kept under the user's cache folder and made once.

A conversion becomes visible by one rename, so that a reader meets all of it or none. Writers of the same
one exclude each other by a file lock, which the kernel drops if its holder is killed; the next holder
clears away what that one left. A folder that lost a file, or part of one, since then (a full disk, a
cleaner of caches) is converted anew: it can be had again, so nobody needs to be told to delete it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pageturner.service.errors import ModelError

FORMAT_VERSION = 3  # raised whenever the same GGUF file would be written out differently
MANIFEST = "manifest.json"
"""The size of every file that the conversion wrote, by name."""


def converted_folder(
    source: Path, variant: str, cache_dir: Path, convert: Callable[[Path, Path], None]
) -> Path:
    """The folder that `convert(source, folder)` fills, from the cache if it is there.

    A source is known by its name, size and time of change; `variant` tells apart conversions of one
    source. Raises ModelError if the cache folder cannot be written, and whatever `convert` raises.
    """
    folder = cache_dir / "converted" / f"{source.stem}-{_key(source, variant)}"
    if _is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f"{folder.name}.lock"):
            if not _is_whole(folder):
                # Whoever has its files mapped keeps them.
                shutil.rmtree(folder, ignore_errors=True)
                partial = folder.parent / f"{folder.name}.partial"
                shutil.rmtree(partial, ignore_errors=True)  # of a writer that was killed
                partial.mkdir()
                try:
                    convert(source, partial)
                    (partial / MANIFEST).write_text(json.dumps(_sizes(partial)))
                    _sync(partial)
                    partial.rename(folder)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"cannot convert {source.name} into {folder.parent}: {error}") from error
    return folder


def _key(source: Path, variant: str) -> str:
    stat = source.stat()
    identity = f"{FORMAT_VERSION}|{source.name}|{stat.st_size}|{stat.st_mtime_ns}|{variant}"
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_whole(folder: Path) -> bool:
    try:
        written: object = json.loads((folder / MANIFEST).read_bytes())
        return written == _sizes(folder)
    except (OSError, ValueError):
        return False


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.name != MANIFEST}


def _sync(folder: Path) -> None:
    """To the disk before the rename, lest a power cut leave a complete name over incomplete files."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
