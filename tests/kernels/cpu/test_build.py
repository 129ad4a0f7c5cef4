"""Compiling, keeping and loading the C++ operations; and what they do at other widths and threads."""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.kernel_checks import layout_for
from support.ops import cpu_cache_dir, cpu_library
from support.paged import assert_same, make_case

from pageturner.kernels.cpu.build import SOURCES, load_library
from pageturner.kernels.cpu.ops import MAX_HEAD_DIM, STRUCTURES, CpuOps
from pageturner.kernels.errors import CompilerUnavailable, KernelArgumentError
from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.layout import KEY_TILE, KeyOrder
from pageturner.kernels.selection import select_ops

TINY = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Sources that compile in a moment."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(TINY)
    return folder


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


def test_it_compiles_once_and_again_when_the_source_changes(tiny: Path, tmp_path: Path) -> None:
    cache = tmp_path / "deep" / "cache"
    assert load_library(cache, sources=tiny).answer() == 42
    (first,) = libraries(cache)
    stamp = first.stat().st_mtime_ns
    assert load_library(cache, sources=tiny).answer() == 42
    assert first.stat().st_mtime_ns == stamp

    (tiny / "tiny.cpp").write_text(TINY.replace("42", "43"))
    assert load_library(cache, sources=tiny).answer() == 43
    assert len(libraries(cache)) == 2
    assert not list(cache.glob("*.tmp"))


@pytest.mark.fault("30", "P")
@pytest.mark.parametrize("damage", ["emptied", "cut", "one byte changed", "of another program"])
def test_a_damaged_library_is_compiled_anew(damage: str, tiny: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    load_library(cache, sources=tiny)
    (library,) = libraries(cache)
    whole = library.read_bytes()
    damaged = {
        "emptied": b"",
        "cut": whole[: len(whole) // 2],
        "one byte changed": whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:],
        "of another program": b"\x7fELF" + bytes(20_000),
    }[damage]
    # Beside it, since the one that this process has mapped must not change.
    library.unlink()
    library.write_bytes(damaged)
    assert load_library(cache, sources=tiny).answer() == 42
    assert library.read_bytes() != damaged
    assert len(library.read_bytes()) == len(whole)
    stamp = library.stat().st_mtime_ns
    assert load_library(cache, sources=tiny).answer() == 42
    assert library.stat().st_mtime_ns == stamp


@pytest.mark.fault("27", "30")
def test_a_damaged_library_in_a_folder_that_cannot_be_written_is_not_loaded(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    load_library(cache, sources=tiny)
    (library,) = libraries(cache)
    library.unlink()
    library.write_bytes(b"")

    def refuse(*options: object, **more: object) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(CompilerUnavailable, match="Permission denied"):
        load_library(cache, sources=tiny)


def test_a_header_counts_as_source(tiny: Path, tmp_path: Path) -> None:
    (tiny / "tiny.cpp").write_text('#include "answer.h"\n' + TINY.replace("42", "ANSWER"))
    for answer in (1, 2):
        (tiny / "answer.h").write_text(f"#define ANSWER {answer}\n")
        assert load_library(tmp_path / "cache", sources=tiny).answer() == answer


def test_a_missing_compiler_is_named(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(CompilerUnavailable, match="no such-compiler on the path"):
        load_library(tmp_path, "such-compiler", sources=tiny)


def test_a_compiler_that_fails_leaves_nothing_behind(tiny: Path, tmp_path: Path) -> None:
    (tiny / "tiny.cpp").write_text("int broken(")
    with pytest.raises(CompilerUnavailable, match=r"tiny\.cpp"):
        load_library(tmp_path / "cache", sources=tiny)
    (left,) = (tmp_path / "cache").iterdir()
    assert left.name.startswith("lock-")


def test_a_cache_folder_that_cannot_be_written_is_named(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CompilerUnavailable, match="file"):
        load_library(tmp_path / "file", sources=tiny)


def test_starters_that_race_compile_once(tiny: Path, tmp_path: Path) -> None:
    """Threads stand for processes: the lock belongs to the open file, of which each has its own."""
    compiler, log = tmp_path / "counting-compiler", tmp_path / "log"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) echo compiled >> {log};; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)

    def answer(_: int) -> int:
        found: int = load_library(tmp_path / "cache", str(compiler), tiny).answer()
        return found

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(answer, range(4))) == [42] * 4
    assert log.read_text().splitlines() == ["compiled"]


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_have_the_size_that_cpp_gives_them(name: str) -> None:
    size = getattr(cpu_library(), f"sizeof_{name}_args")
    size.restype = ctypes.c_int64
    assert size() == ctypes.sizeof(STRUCTURES[name])


def test_the_widest_head_is_the_same_on_both_sides() -> None:
    found = re.search(r"MAX_HEAD_DIM = (\d+)", (SOURCES / "rows.h").read_text())
    assert found is not None
    assert int(found[1]) == MAX_HEAD_DIM


def test_heads_that_sixteen_does_not_divide_are_refused() -> None:
    ops = CpuOps(cpu_library())
    for head_dim in (8, 40, MAX_HEAD_DIM + KEY_TILE):
        case = make_case([(1, 3)], layout=layout_for(ops, 1, head_dim, 16), num_heads=1)
        with pytest.raises(KernelArgumentError, match="head_dim a multiple of 16"):
            ops.attention(case.query, case.kv_layer, case.batch, AttentionSpec(scale=1.0))


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("sequences", [[(1, 1500)], [(1, 700), (30, 640)], [(1, 40)] * 20])
def test_threads_change_no_bit(sequences: list[tuple[int, int]]) -> None:
    ops = CpuOps(cpu_library())
    case = make_case(sequences, layout=layout_for(ops, 2, 64, 16, torch.bfloat16), num_heads=6)
    spec = AttentionSpec(scale=0.2)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(ops.attention(case.query, case.kv_layer, case.batch, spec))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


CPU = torch.device("cpu")
CACHE_DIR = cpu_cache_dir()


def test_select_ops_takes_cpp_where_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def name(head_dim: int = 64, block_size: int = 16, cache_dir: Path | None = CACHE_DIR) -> str:
        ops = select_ops(
            CPU,
            torch.float32,
            head_dim=head_dim,
            block_size=block_size,
            deterministic=True,
            cache_dir=cache_dir,
        )
        assert ops.key_order is (KeyOrder.TILED16 if ops.name == "cpu" else KeyOrder.PLAIN)
        return ops.name

    assert name() == "cpu"
    assert (
        name(head_dim=40)
        == name(head_dim=1040)
        == name(block_size=8)
        == name(cache_dir=None)
        == "torch-deterministic"
    )
    assert not caplog.records
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert name() == "torch-deterministic"
    assert "no g++ on the path" in caplog.text


def test_select_ops_refuses_other_dtypes() -> None:
    with pytest.raises(KernelArgumentError, match="dtype is"):
        select_ops(CPU, torch.float16, head_dim=64, block_size=16, deterministic=False, cache_dir=None)
