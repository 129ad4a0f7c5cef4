"""Compiles the kernels to machine code with NVRTC, once for each source, architecture and compiler.

NVRTC needs no driver and no GPU, so what a GPU will run is compiled, and its resources are checked, anywhere.
It comes with CuPy or beside it (`nvidia-cuda-nvrtc`) and is imported when the first `Compiler` is made:
serving on the CPU imports neither.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from pageturner.kernels.errors import KernelsUnavailable

SOURCES = Path(__file__).parent
OPTIONS = ("-std=c++17", "--ptxas-options=-v")
INSTALL = 'pip install "pageturner[cuda13]"'
UPGRADE = "pip install --upgrade nvidia-cuda-nvrtc"
_LOG_LINES = 12
_DURATION = re.compile(r"^.*Compile time = .*\n", re.MULTILINE)
"""The only words of a log that differ from one compilation to the next."""
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class Compiled:
    """cubin: machine code of one architecture. lowered: C++ expression -> its name in there. log: ptxas's
    remarks, with the registers and spills of each kernel."""

    cubin: bytes
    lowered: Mapping[str, str]
    log: str


class Nvrtc(Protocol):
    """What is used of `cupy.cuda.nvrtc`; calls that fail raise RuntimeError."""

    def getVersion(self) -> tuple[int, int]: ...  # noqa: N802  # NVRTC's own names, here and below

    def getSupportedArchs(self) -> Sequence[int]: ...  # noqa: N802

    def createProgram(  # noqa: N802
        self, src: str, name: str, headers: Sequence[bytes], include_names: Sequence[bytes]
    ) -> int: ...

    def destroyProgram(self, program: int) -> None: ...  # noqa: N802

    def addNameExpression(self, program: int, name: str) -> None: ...  # noqa: N802

    def compileProgram(self, program: int, options: Sequence[str]) -> None: ...  # noqa: N802

    def getProgramLog(self, program: int) -> str: ...  # noqa: N802

    def getCUBIN(self, program: int) -> bytes: ...  # noqa: N802

    def getLoweredName(self, program: int, name: str) -> str: ...  # noqa: N802


def load_nvrtc() -> Nvrtc:
    """CuPy's NVRTC. Raises KernelsUnavailable, naming what is not installed."""
    import_cupy()
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        reason = f"the library of NVRTC cannot be loaded ({reason_of(error)}); {INSTALL}"
        raise KernelsUnavailable(reason) from error
    return cast(Nvrtc, nvrtc)


def import_cupy() -> Any:
    """The package, imported when it is first asked for. Raises KernelsUnavailable with the reason."""
    try:
        import cupy
    except OSError as error:
        reason = f"CuPy needs a folder to write in ({reason_of(error)}); name one in CUPY_CACHE_DIR"
        raise KernelsUnavailable(reason) from error
    except Exception as error:  # beside another NumPy than its own, it may raise anything
        raise KernelsUnavailable(f"CuPy cannot be imported ({reason_of(error)}); {INSTALL}") from error
    return cupy


def reason_of(error: BaseException) -> str:
    """In one line. (CuPy gives what stopped its import a page of advice around it.)"""
    cause = error.__cause__ or error
    return str(cause).strip().partition("\n")[0] or type(cause).__name__


class Compiler:
    """Compiles files of `sources`, whose headers are all of its *.cuh.

    cache_dir: where results are kept; a folder that cannot be written only costs compiling again.
    bounds_check: the debug build, whose kernels stop before they leave their arrays. Safe to call from
    several threads; NVRTC compiles outside Python's lock.
    """

    def __init__(
        self,
        cache_dir: Path,
        *,
        bounds_check: bool = False,
        sources: Path = SOURCES,
        nvrtc: Nvrtc | None = None,
    ) -> None:
        self._nvrtc = nvrtc or load_nvrtc()
        self._cache_dir = cache_dir
        self._sources = sources
        self._options = (*OPTIONS, "-DPAGETURNER_BOUNDS_CHECK") if bounds_check else OPTIONS

    @property
    def version(self) -> str:
        """NVRTC's, such as "13.5"."""
        return ".".join(map(str, self._nvrtc.getVersion()))

    def compile(self, source: str, expressions: Sequence[str], arch: str) -> Compiled:
        """The kernels that `expressions` name in the file `source`, for `arch` such as "sm_90".

        Raises KernelsUnavailable if NVRTC does not know the architecture or refuses the source.
        """
        text = (self._sources / source).read_text(encoding="utf-8")
        headers = {path.name.encode(): path.read_bytes() for path in sorted(self._sources.glob("*.cuh"))}
        options = (*self._options, f"--gpu-architecture={arch}")
        key = self._key(text, headers, options, expressions)
        entry = self._cache_dir / f"{Path(source).stem}-{arch}-{key}.kernels"
        compiled = _read(entry)
        if compiled is None:
            self._check_known(arch)
            compiled = self._compile(source, text, headers, options, expressions)
            _write(entry, compiled)
        return compiled

    def _key(
        self, text: str, headers: Mapping[bytes, bytes], options: Sequence[str], expressions: Sequence[str]
    ) -> str:
        parts = [text.encode(), *(part for header in headers.items() for part in header)]
        parts += [word.encode() for word in (*options, self.version, *expressions)]
        digest = hashlib.sha256()
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()[:20]

    def _check_known(self, arch: str) -> None:
        known = tuple(f"sm_{number}" for number in self._nvrtc.getSupportedArchs())
        if arch not in known:
            version = ".".join(map(str, self._nvrtc.getVersion()))
            raise KernelsUnavailable(f"NVRTC {version} knows no {arch}, only {', '.join(known)}; {UPGRADE}")

    def _compile(
        self,
        source: str,
        text: str,
        headers: Mapping[bytes, bytes],
        options: Sequence[str],
        expressions: Sequence[str],
    ) -> Compiled:
        nvrtc = self._nvrtc
        program = nvrtc.createProgram(text, source, tuple(headers.values()), tuple(headers))
        try:
            for expression in expressions:
                nvrtc.addNameExpression(program, expression)
            try:
                nvrtc.compileProgram(program, options)
            except RuntimeError as error:
                log = nvrtc.getProgramLog(program).strip().splitlines() or [str(error)]
                raise KernelsUnavailable(
                    "\n".join((f"NVRTC refuses {source}:", *log[:_LOG_LINES]))
                ) from error
            # CuPy's getCUBIN drops the last byte, which is always zero.
            return Compiled(
                nvrtc.getCUBIN(program) + b"\0",
                {expression: nvrtc.getLoweredName(program, expression) for expression in expressions},
                _DURATION.sub("", nvrtc.getProgramLog(program)),
            )
        finally:
            nvrtc.destroyProgram(program)


# A cache file is the digest of all that follows, the length of the JSON, the JSON, the cubin: one file, so
# that renaming it into place is atomic. Processes that start together may both compile; the last one wins.


def _read(entry: Path) -> Compiled | None:
    """What was kept, or None where there is nothing whole."""
    try:
        data = entry.read_bytes()
    except OSError:
        return None
    digest, body = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        return None
    end = 8 + int.from_bytes(body[:8], "little")
    described = json.loads(body[8:end])
    return Compiled(body[end:], described["lowered"], described["log"])


def _write(entry: Path, compiled: Compiled) -> None:
    """Keep it if the folder can be written."""
    described = json.dumps({"lowered": dict(compiled.lowered), "log": compiled.log}).encode()
    body = len(described).to_bytes(8, "little") + described + compiled.cubin
    with suppress(OSError):  # a read-only home or a full disk: each process compiles for itself
        entry.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, unfinished = tempfile.mkstemp(dir=entry.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(body).digest() + body)
            os.replace(unfinished, entry)
        finally:
            Path(unfinished).unlink(missing_ok=True)
