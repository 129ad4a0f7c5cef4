"""g++ and the folder that keeps what it made: compiled once for each machine, compiler and source."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from pageturner.kernels.errors import CompilerUnavailable


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
    """`target`, compiled beside itself and renamed if it is not there, so that nobody ever loads half a file.

    Processes that start together compile once. Raises OSError for a folder that cannot be written.
    """
    if target.exists():
        return target
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not target.exists():
            handle, name = tempfile.mkstemp(dir=target.parent, suffix=".unfinished")
            os.close(handle)
            unfinished = Path(name)
            try:
                compile_to(unfinished)
                unfinished.replace(target)
            finally:
                unfinished.unlink(missing_ok=True)
    return target
