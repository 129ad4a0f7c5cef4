"""Compiles kernels for the CPU: one shared library a variant, kept in a cache folder.

A variant by itself, so that it is found compiled whichever others it is asked for with; and two at a time may
be compiled beside each other.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pageturner.kernels import gxx
from pageturner.kernels.cuda.variants import Variant
from pageturner.kernels.errors import CompilerUnavailable, KernelsUnavailable

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
# Of the compiler's sanitizers only the instrumentation: what it calls is ours, in undefined.cpp and
# instrumentation.cpp, and makes a fault of what is wrong, told by line.
UNDEFINED = ("-fsanitize=alignment,null,bounds,signed-integer-overflow,shift,integer-divide-by-zero",)
RACES = ("-fsanitize=thread", "-g1")
NOTHING_MISSING = ("-Wl,-z,defs",)  # told when it is linked, not when a kernel comes to call it
# With this one all of it, library included. It does not go together with RACES.
ADDRESS = ("-fsanitize=address", "-g")


@dataclass(frozen=True)
class Builder:
    """Compiles kernels of the folder `sources` into `cache_dir`.

    races: whether kernels are watched for races on shared memory, at nearly twice the time. flags: beyond
    FLAGS, such as ADDRESS or `-DSIMT_UCONTEXT`. Processes that ask for the same at once compile it once.
    """

    cache_dir: Path
    sources: Path = KERNELS
    races: bool = True
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
        try:
            self.cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                machine = list(pool.map(self._object, sorted(MACHINE.glob("*.cpp"))))
                return list(pool.map(lambda text: self._library(text, machine), texts))
        except OSError as error:
            raise KernelsUnavailable(f"{self.cache_dir}: {error}") from error
        except CompilerUnavailable as error:
            raise KernelsUnavailable(str(error)) from error

    def _object(self, source: Path) -> Path:
        """The same for all kernels."""
        key = self._key(source.read_text(encoding="utf-8"), MACHINE.glob("*.h"), ())
        target = self.cache_dir / f"{source.stem}-{key}.o"
        return self._once(target, lambda unfinished: self._run("-c", source, "-o", unfinished))

    def _library(self, text: str, machine: list[Path]) -> Path:
        def compile_and_link(unfinished: Path) -> None:
            with tempfile.TemporaryDirectory(dir=self.cache_dir) as folder:
                source, compiled = Path(folder, "kernel.cpp"), Path(folder, "kernel.o")
                source.write_text(text, encoding="utf-8")
                include = [f"-I{folder}" for folder in (self.sources, KERNELS, MACHINE)]
                self._run(*self._checks, *include, "-c", source, "-o", compiled)
                self._run("-shared", *NOTHING_MISSING, compiled, *machine, "-o", unfinished)

        headers = {*self.sources.glob("*.cuh"), *KERNELS.glob("*.cuh"), *MACHINE.glob("*.h")}
        key = self._key(text, headers, (*self._checks, *NOTHING_MISSING, *(path.name for path in machine)))
        return self._once(self.cache_dir / f"kernel-{key}.so", compile_and_link)

    def _once(self, target: Path, compile_to: Callable[[Path], object]) -> Path:
        lock = self.cache_dir / f"lock-{target.stem[-1]}"  # 16 of them: few that want one must wait
        return gxx.once(target, lock, compile_to)

    def _run(self, *arguments: str | Path) -> None:
        gxx.run([gxx.find_compiler(self.compiler), *FLAGS, *self.flags, *map(str, arguments)])

    @property
    def _checks(self) -> tuple[str, ...]:
        return (*UNDEFINED, *RACES) if self.races else UNDEFINED

    def _key(self, text: str, headers: Iterable[Path], words: Iterable[str]) -> str:
        """Changes with anything that changes the machine code."""
        digest = hashlib.sha256(text.encode())
        for path in sorted(headers):
            digest.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
        for word in (*FLAGS, *self.flags, *words, gxx.described(gxx.find_compiler(self.compiler))):
            digest.update(b"\0" + word.encode())
        return digest.hexdigest()[:20]
