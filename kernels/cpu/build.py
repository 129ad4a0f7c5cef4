"""Compiles the C++ operations once for each machine, compiler and source, and loads them."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from pathlib import Path

# Not used here: it brings its OpenMP, which the library below then shares instead of a second one.
import torch  # noqa: F401

from pageturner.kernels import gxx
from pageturner.kernels.errors import CompilerUnavailable

SOURCES = Path(__file__).parent
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fopenmp",
    "-ffp-contract=off",  # a row's bits must not depend on what the optimizer fused where
    "-fno-math-errno",
    "-Wno-psabi",
    "-shared",
    "-fPIC",
)
NATIVE = ("-march=native",)
"""The compiler's flags for the machine at hand."""


def load_library(
    cache_dir: Path, compiler: str = "g++", sources: Path = SOURCES, machine: Sequence[str] = NATIVE
) -> ctypes.CDLL:
    """The operations in `sources/*.cpp`, from the cache or compiled into it.

    machine: flags that name another kind of machine, for tests and benchmarks of its code.
    Processes that start together compile once. Raises CompilerUnavailable, with the reason, if there is
    no such compiler, it fails, the folder cannot be written, or the result cannot be loaded.
    """
    executable = gxx.find_compiler(compiler)
    texts = [str(path) for path in sorted(sources.glob("*.cpp"))]
    try:
        cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = _key(executable, sources, machine)
        library = gxx.once(
            cache_dir / f"pageturner-cpu-{key}.so",
            cache_dir / f"lock-{key[-1]}",  # 16 of them: few wait that want another library
            lambda unfinished: gxx.run([executable, *FLAGS, *machine, *texts, "-o", str(unfinished)]),
        )
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise CompilerUnavailable(f"{cache_dir}: {error}") from error


def _key(executable: str, sources: Path, machine: Sequence[str]) -> str:
    """Changes with anything that changes the machine code."""
    digest = hashlib.sha256()
    for path in sorted([*sources.glob("*.cpp"), *sources.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update("\0".join((*FLAGS, *machine, gxx.described(executable))).encode())
    return digest.hexdigest()[:20]
