"""Compiles the C++ operations once for each machine, compiler and source, and loads them."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

# Not used here: it brings its OpenMP, which the library below then shares instead of a second one.
import torch  # noqa: F401
from pageturner.kernels.errors import CompilerUnavailable

SOURCES = Path(__file__).parent
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-ffp-contract=off",  # a row's bits must not depend on what the optimizer fused where
    "-fno-math-errno",
    "-Wno-psabi",
    "-shared",
    "-fPIC",
)


def load_library(cache_dir: Path, compiler: str = "g++", sources: Path = SOURCES) -> ctypes.CDLL:
    """The operations in `sources/*.cpp`, from the cache or compiled into it.

    Processes that start together compile once. Raises CompilerUnavailable, with the reason, if there is
    no such compiler, it fails, the folder cannot be written, or the result cannot be loaded.
    """
    executable = shutil.which(compiler)
    if executable is None:
        raise CompilerUnavailable(f"no {compiler} on the path")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        library = cache_dir / f"pageturner-cpu-{_key(executable, sources)}.so"
        if not library.exists():
            with (cache_dir / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not library.exists():
                    _compile(executable, sources, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise CompilerUnavailable(f"{cache_dir}: {error}") from error


def _key(executable: str, sources: Path) -> str:
    """Changes with anything that changes the machine code: -march=native stands for the CPU's features."""
    digest = hashlib.sha256()
    for path in sorted([*sources.glob("*.cpp"), *sources.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    described = _run([executable, "-march=native", "-Q", "--help=target"])
    version = _run([executable, "--version"])
    digest.update("\0".join((*FLAGS, executable, version, described)).encode())
    return digest.hexdigest()[:20]


def _compile(executable: str, sources: Path, library: Path) -> None:
    """Compile beside `library` and rename, so that nobody ever loads half a file."""
    handle, unfinished = tempfile.mkstemp(dir=library.parent, suffix=".so.tmp")
    os.close(handle)
    try:
        _run([executable, *FLAGS, *map(str, sorted(sources.glob("*.cpp"))), "-o", unfinished])
        os.replace(unfinished, library)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    try:
        # The command is the compiler found on the path, with our own flags and files.
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)  # noqa: S603
    except subprocess.SubprocessError as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip()
        raise CompilerUnavailable(f"{command[0]} failed: {detail[-2000:]}") from error
    return done.stdout
