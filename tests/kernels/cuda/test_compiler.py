"""NVRTC for real, without a driver: what it makes, what is kept of it, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.kernel_sources import DOUBLED, HEADER, SOURCE, counting_nvrtc, write_sources

from pageturner.kernels.cuda.compiler import Compiled, Compiler, load_nvrtc
from pageturner.kernels.cuda.ptxas import read_resources
from pageturner.kernels.errors import KernelsUnavailable


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return write_sources(tmp_path / "sources")


def compile_doubled(
    cache: Path, sources: Path, *, version: tuple[int, int] | None = None
) -> tuple[Compiled, int]:
    """The result, and how often NVRTC ran for it."""
    nvrtc, counting = counting_nvrtc(version)
    compiled = Compiler(cache, sources=sources, nvrtc=nvrtc).compile("doubled.cu", DOUBLED, "sm_90")
    return compiled, counting.num_compiled


def test_each_expression_becomes_a_kernel_of_the_cubin(tmp_path: Path, sources: Path) -> None:
    compiled, _ = compile_doubled(tmp_path, sources)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.cubin.endswith(b"\0")
    assert set(compiled.lowered) == set(DOUBLED)
    assert len(set(compiled.lowered.values())) == 2
    for lowered in compiled.lowered.values():
        assert lowered.encode() in compiled.cubin
    resources = read_resources(compiled.log)
    assert set(resources) == set(compiled.lowered.values())
    assert all(0 < used.registers < 20 and not used.spill_bytes for used in resources.values())


def test_a_result_is_kept(tmp_path: Path, sources: Path) -> None:
    first, once = compile_doubled(tmp_path / "cache", sources)
    again, never = compile_doubled(tmp_path / "cache", sources)
    assert (once, never) == (1, 0)
    assert again == first


CHANGES: dict[str, Callable[[Path, Path], tuple[Compiled, int]]] = {
    "source": lambda cache, folder: compile_doubled(cache, write_sources(folder, source=SOURCE + "\n")),
    "header": lambda cache, folder: compile_doubled(cache, write_sources(folder, header=HEADER + "\n")),
    "another header": lambda cache, folder: compile_doubled(cache, _with_header(folder)),
    "version": lambda cache, folder: compile_doubled(cache, folder, version=(13, 99)),
}


def _with_header(folder: Path) -> Path:
    (folder / "other.cuh").write_text("// included by no file")
    return folder


@pytest.mark.parametrize("change", CHANGES)
def test_what_it_was_made_from_is_part_of_the_key(change: str, tmp_path: Path, sources: Path) -> None:
    compile_doubled(tmp_path / "cache", sources)
    _, count = CHANGES[change](tmp_path / "cache", sources)
    assert count == 1


def test_so_are_architecture_expressions_and_the_debug_build(tmp_path: Path, sources: Path) -> None:
    nvrtc, counting = counting_nvrtc()
    release = Compiler(tmp_path / "cache", sources=sources, nvrtc=nvrtc)
    debug = Compiler(tmp_path / "cache", sources=sources, nvrtc=nvrtc, bounds_check=True)
    cubins = [
        release.compile("doubled.cu", DOUBLED, "sm_90").cubin,
        release.compile("doubled.cu", DOUBLED, "sm_80").cubin,
        release.compile("doubled.cu", DOUBLED[:1], "sm_90").cubin,
        debug.compile("doubled.cu", DOUBLED, "sm_90").cubin,
    ]
    assert counting.num_compiled == 4
    assert len(set(cubins)) == 4


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:20],
        lambda data: data[:36],
        lambda data: data[:-1],
        lambda data: data[:-1000],
        lambda data: data + b"\0",
        lambda data: flip(data, 0),
        lambda data: flip(data, 33),
        lambda data: flip(data, 60),
        lambda data: flip(data, len(data) // 2),
        lambda data: bytes(len(data)),
    ],
)
def test_a_damaged_file_is_noticed_and_replaced(
    damage: Callable[[bytes], bytes], tmp_path: Path, sources: Path
) -> None:
    first, _ = compile_doubled(tmp_path / "cache", sources)
    (entry,) = (tmp_path / "cache").iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    again, count = compile_doubled(tmp_path / "cache", sources)
    assert (again, count) == (first, 1)
    assert entry.read_bytes() == whole


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path, sources: Path) -> None:
    (tmp_path / "file").write_text("")
    for _ in range(2):
        compiled, count = compile_doubled(tmp_path / "file" / "cache", sources)
        assert count == 1
        assert compiled.cubin


def test_an_entry_that_cannot_be_read_is_no_failure(tmp_path: Path, sources: Path) -> None:
    compile_doubled(tmp_path / "cache", sources)
    (entry,) = (tmp_path / "cache").iterdir()
    entry.unlink()
    entry.mkdir()
    assert compile_doubled(tmp_path / "cache", sources)[1] == 1
    assert list((tmp_path / "cache").iterdir()) == [entry]  # and nothing half written beside it


COMPILE = """
import hashlib, sys
from pathlib import Path
from pageturner.kernels.cuda.compiler import Compiler
compiler = Compiler(Path(sys.argv[1]), sources=Path(sys.argv[2]))
sys.stdin.read()  # until all are ready
compiled = compiler.compile("doubled.cu", sys.argv[3:], "sm_90")
print(hashlib.sha256(compiled.cubin).hexdigest())
"""


def test_processes_that_start_together(tmp_path: Path, sources: Path) -> None:
    command = [sys.executable, "-c", COMPILE, str(tmp_path / "cache"), str(sources), *DOUBLED]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    digests = set()
    for process in processes:
        assert process.stdout is not None
        digests.add(process.stdout.read())
        process.stdout.close()
        assert process.wait() == 0
    assert len(digests) == 1
    _, count = compile_doubled(tmp_path / "cache", sources)
    assert count == 0
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_threads_of_one_compiler(tmp_path: Path, sources: Path) -> None:
    compiler = Compiler(tmp_path / "cache", sources=sources)
    archs = ("sm_80", "sm_86", "sm_90", "sm_100") * 2
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda arch: compiler.compile("doubled.cu", DOUBLED, arch), archs))
    assert found[:4] == found[4:]
    assert len({compiled.cubin for compiled in found}) == 4


def test_an_error_shows_the_first_lines(tmp_path: Path, sources: Path) -> None:
    write_sources(sources, source=SOURCE.replace("twice(", "thrice("))
    with pytest.raises(KernelsUnavailable, match=r"(?s)refuses doubled\.cu.*thrice.*undefined") as caught:
        compile_doubled(tmp_path / "cache", sources)
    assert len(str(caught.value).splitlines()) <= 13
    assert not (tmp_path / "cache").exists()


def test_an_expression_that_is_not_there(tmp_path: Path, sources: Path) -> None:
    with pytest.raises(KernelsUnavailable, match=r"(?s)refuses doubled\.cu.*tripled"):
        Compiler(tmp_path, sources=sources).compile("doubled.cu", ("tripled<float>",), "sm_90")


def test_an_architecture_that_it_does_not_know(tmp_path: Path, sources: Path) -> None:
    compiler = Compiler(tmp_path, sources=sources)
    with pytest.raises(KernelsUnavailable, match=r"NVRTC [\d.]+ knows no sm_999, only sm_.*--upgrade nvidia"):
        compiler.compile("doubled.cu", DOUBLED, "sm_999")


def test_without_cupy_the_compiler_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(KernelsUnavailable, match=r"CuPy cannot be imported .*pageturner\[cuda13\]"):
        load_nvrtc()


def test_without_the_nvrtc_library_kernels_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> tuple[int, int]:
        raise RuntimeError('Failure finding "libnvrtc.so"')

    nvrtc = SimpleNamespace(getVersion=missing)
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nvrtc=nvrtc))
    with pytest.raises(KernelsUnavailable, match=r"library of NVRTC .*libnvrtc.*pageturner\[cuda13\]"):
        load_nvrtc()
