"""Compiles kernels for the CPU: one shared library a variant, kept in a cache folder.

A variant by itself, so that whoever asks for it, in whatever company, finds it compiled; and two at a time
may be compiled beside each other.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pageturner.kernels.cuda.variants import Variant
from pageturner.kernels.errors import KernelsUnavailable

KERNELS = Path(__file__).parents[1]
MACHINE = Path(__file__).parent
FLAGS = (
    "-std=c++17",
    "-O2",
    "-march=native",
    "-ffp-contract=off",  # a row's bits must not depend on what the optimizer fused where
    "-fno-math-errno",
    "-fvisibility=hidden",  # each library keeps its own machine and its own static shared memory
    "-fPIC",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",  # #pragma unroll
    "-Wno-sign-compare",  # threadIdx is unsigned, as it is in CUDA
)
# Undefined behaviour in a kernel is a fault of the thread, told by line: see undefined.cpp.
CHECKS = ("-fsanitize=alignment,null,bounds,signed-integer-overflow,shift,integer-divide-by-zero",)
SANITIZERS = ("-fsanitize=address", "-g")


@dataclass(frozen=True)
class Builder:
    """Compiles kernels of the folder `sources` into `cache_dir`.

    flags: beyond FLAGS, such as SANITIZERS or `-DSIMT_UCONTEXT`. Processes that ask for the same at once
    compile it once.
    """

    cache_dir: Path
    sources: Path = KERNELS
    flags: tuple[str, ...] = ()
    compiler: str = "g++"

    def build(self, variants: Sequence[Variant]) -> list[Path]:
        """The library of each variant, from the cache or compiled.

        Raises KernelsUnavailable, with the reason, if there is no such compiler, it fails, or the folder
        cannot be written.
        """
        return self.build_texts([self._exported(variant) for variant in variants])

    def _exported(self, variant: Variant) -> str:
        """The file itself, not an include of it: so its text is in the key, and no other kernel's."""
        try:
            kernel = (self.sources / variant.source).read_text(encoding="utf-8")
        except OSError as error:
            raise KernelsUnavailable(str(error)) from error
        begin = f'#include "simt.h"\n#line 1 "{variant.source}"\n'
        return f"{begin}{kernel}\nSIMT_EXPORT({variant.expression})\n"

    def build_texts(self, texts: Sequence[str]) -> list[Path]:
        """The library of each C++ text, which may include what `sources` holds."""
        key = self._key()
        try:
            self.cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                sources = sorted(MACHINE.glob("*.cpp"))
                machine = list(pool.map(lambda source: self._object(source, key), sources))
                return list(pool.map(lambda text: self._library(text, key, machine), texts))
        except OSError as error:
            raise KernelsUnavailable(f"{self.cache_dir}: {error}") from error

    def _object(self, source: Path, key: str) -> Path:
        target = self.cache_dir / f"{source.stem}-{key}.o"
        return self._once(target, lambda unfinished: self._run("-c", source, "-o", unfinished))

    def _library(self, text: str, key: str, machine: list[Path]) -> Path:
        def compile_and_link(unfinished: Path) -> None:
            with tempfile.TemporaryDirectory(dir=self.cache_dir) as folder:
                source, compiled = Path(folder, "kernel.cpp"), Path(folder, "kernel.o")
                source.write_text(text, encoding="utf-8")
                include = [f"-I{folder}" for folder in (self.sources, KERNELS, MACHINE)]
                self._run(*CHECKS, *include, "-c", source, "-o", compiled)
                self._run("-shared", compiled, *machine, "-o", unfinished)

        name = hashlib.sha256((key + text).encode()).hexdigest()[:20]
        return self._once(self.cache_dir / f"kernel-{name}.so", compile_and_link)

    def _once(self, target: Path, compile_to: Callable[[Path], None]) -> Path:
        """Compile beside `target` and rename, so that nobody ever loads half a file."""
        if target.exists():
            return target
        with target.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                handle, name = tempfile.mkstemp(dir=self.cache_dir, suffix=".unfinished")
                os.close(handle)
                unfinished = Path(name)
                try:
                    compile_to(unfinished)
                    unfinished.replace(target)
                finally:
                    unfinished.unlink(missing_ok=True)
        return target

    def _run(self, *arguments: str | Path) -> None:
        _run([_executable(self.compiler), *FLAGS, *self.flags, *map(str, arguments)])

    def _key(self) -> str:
        """Changes with anything that changes the machine code."""
        digest = hashlib.sha256()
        texts = [
            *self.sources.glob("*.cu"),
            *self.sources.glob("*.cuh"),
            *MACHINE.glob("*.h"),
            *MACHINE.glob("*.cpp"),
        ]
        for path in sorted(texts):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        digest.update(
            "\0".join((*FLAGS, *CHECKS, *self.flags, _described(_executable(self.compiler)))).encode()
        )
        return digest.hexdigest()[:20]


def _executable(compiler: str) -> str:
    executable = shutil.which(compiler)
    if executable is None:
        raise KernelsUnavailable(f"no {compiler} on the path")
    return executable


@functools.cache
def _described(executable: str) -> str:
    """-march=native stands for the features of this CPU."""
    target = _run([executable, "-march=native", "-Q", "--help=target"])
    return executable + _run([executable, "--version"]) + target


def _run(command: list[str]) -> str:
    try:
        # The command is the compiler found on the path, with our own flags and files.
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)  # noqa: S603
    except subprocess.SubprocessError as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip()
        raise KernelsUnavailable(f"{command[0]} failed: {detail[:2000]}") from error
    return done.stdout
