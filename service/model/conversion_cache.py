"""Conversions of a model's files, kept under the user's cache folder and made once.

A conversion becomes visible by one rename, so that a reader meets all of it or none. Writers of the same
one exclude each other by a file lock, which the kernel drops if its holder is killed; the next holder
clears away what that one left. A manifest holds the checksum of every file. A folder that does not agree
with it (a full disk, a cleaner of caches, a damaged page) is converted anew: it can be had again, so no
operator needs to delete it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pageturner.service.errors import ModelError
from pageturner.service.model.checksums import checksum, fingerprint

FORMAT_VERSION = 5  # raised whenever the same GGUF file would be written out differently
MANIFEST = "manifest.json"
"""The checksum of every file that the conversion wrote, by name."""


def converted_folder(
    source: Path,
    variant: str,
    cache_dir: Path,
    convert: Callable[[Path, Path], None],
    *,
    beside: Sequence[Path] = (),
    name: str | None = None,
) -> Path:
    """The folder that `convert(source, folder)` fills, from the cache if it is there.

    A source is known by its content, and by that of the files `beside` it; `variant` tells apart conversions
    of one source. name: what the folder is named for, by default the source. Raises ModelError if
    the source cannot be read or the cache folder not be written, and whatever else `convert` raises.
    """
    try:
        folder = cache_dir / "converted" / f"{name or source.stem}-{content_key((source, *beside), variant)}"
    except OSError as error:
        raise ModelError(f"cannot read {source}: {error}") from error
    if _is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f"{folder.name}.lock"):
            if not _is_whole(folder):
                # A process that has its files mapped keeps them.
                _clear(folder)
                partial = folder.parent / f"{folder.name}.partial"
                _clear(partial)  # left by a writer that was killed
                partial.mkdir()
                try:
                    convert(source, partial)
                    (partial / MANIFEST).write_text(json.dumps(_checksums(partial)))
                    _sync(partial)
                    partial.rename(folder)
                finally:
                    _clear(partial)
    except OSError as error:
        raise ModelError(
            f"cannot convert {source.name} into {folder.parent}: {error}; XDG_CACHE_HOME names another folder"
        ) from error
    return folder


def content_key(sources: Sequence[Path], variant: str) -> str:
    """Changes with the content of any of the files, and with what is made of them. Raises OSError."""
    identity = f"{FORMAT_VERSION}|{'|'.join(map(fingerprint, sources))}|{variant}"
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _clear(path: Path) -> None:
    """Remove what is there: a damaged cache may hold a file or a link in the place of a folder."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    try:
        written: object = json.loads((folder / MANIFEST).read_bytes())
        return written == _checksums(folder)
    except (OSError, ValueError, RecursionError):  # a damaged manifest may be nested without end
        return False


def _checksums(folder: Path) -> dict[str, str]:
    return {path.name: checksum(path) for path in folder.iterdir() if path.name != MANIFEST}


def _sync(folder: Path) -> None:
    """To the disk before the rename, lest a power cut leave a complete name over incomplete files."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
