"""g++ and the folder that keeps what it made: compiled once for each machine, compiler and source."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from pageturner.kernels.errors import CompilerUnavailable

_DIGEST_BYTES = hashlib.sha256().digest_size


def find_compiler(name: str) -> str:
    """Its path. Raises CompilerUnavailable."""
    executable = shutil.which(name)
    if executable is None:
        raise CompilerUnavailable(f"no {name} on the path")
    return executable


@functools.cache
def described(executable: str) -> str:
    """Changes with the compiler, and with what -march=native stands for: the features of this CPU."""
    target = run([executable, "-march=native", "-Q", "--help=target"])
    return "\0".join((executable, run([executable, "--version"]), target))


def run(command: Sequence[str]) -> str:
    """What it printed. Raises CompilerUnavailable with its complaint if it fails."""
    try:
        # The command is the compiler found on the path, with our own flags and files.
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)  # noqa: S603
    except subprocess.SubprocessError as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip()
        raise CompilerUnavailable(f"{command[0]} failed: {detail[:2000]}") from error
    return done.stdout


def once(target: Path, lock: Path, compile_to: Callable[[Path], object]) -> Path:
    """`target`, compiled beside itself and renamed if it is not there whole: half a file is never loaded.

    A file in the cache ends in the digest of what stands before (which loaders and linkers do not read): one
    that was cut, emptied or changed since would be a crash when it is loaded, and is compiled anew. Processes
    that start together compile once. Raises OSError for a folder that cannot be written.
    """
    if _is_whole(target):
        return target
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not _is_whole(target):
            handle, name = tempfile.mkstemp(dir=target.parent, suffix=".unfinished")
            os.close(handle)
            unfinished = Path(name)
            try:
                compile_to(unfinished)
                _seal(unfinished)
                unfinished.replace(target)
            finally:
                unfinished.unlink(missing_ok=True)
    return target


def _seal(path: Path) -> None:
    """Append the digest, and see it on the disk before the name."""
    with path.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        file.seek(0, os.SEEK_END)
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def _is_whole(path: Path) -> bool:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return False
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    return hashlib.sha256(body).digest() == digest
