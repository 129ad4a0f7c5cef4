"""The threads behind the C++ operations: every piece once, nothing raced, nothing left awake."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pageturner.kernels.cpu.build import SOURCES

STRESS = Path(__file__).parent / "team_stress.cpp"
HEADERS = ("team.h", "thread_team.h")


def build(folder: Path, *flags: str, planted: tuple[str, str] | None = None) -> Path:
    """team_stress.cpp with the team's headers, `planted[0]` in them replaced by `planted[1]`."""
    sources = [SOURCES / name for name in HEADERS]
    if planted is not None:
        assert sum(path.read_text().count(planted[0]) for path in sources) == 1
    for path in sources:
        text = path.read_text()
        (folder / path.name).write_text(text if planted is None else text.replace(*planted))
    program = folder / "stress"
    options = ("-std=c++17", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fopenmp", "-pthread", *flags)
    subprocess.run(["g++", *options, f"-I{folder}", str(STRESS), "-o", str(program)], check=True)
    return program


def run(program: Path, *, timeout: float = 120) -> str:
    """What went wrong, as the program tells it; empty if nothing did."""
    try:
        done = subprocess.run([program], capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return "hangs"
    return done.stderr + ("" if done.returncode == 0 else f"exit status {done.returncode}")


@pytest.fixture(autouse=True)
def _needs_a_compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")


def test_no_piece_is_lost_or_repeated_whatever_the_size_callers_and_forks(tmp_path: Path) -> None:
    assert run(build(tmp_path)) == ""


def test_thread_sanitizer_finds_no_race(tmp_path: Path) -> None:
    try:
        program = build(tmp_path, "-fsanitize=thread")
    except subprocess.CalledProcessError:
        pytest.skip("this g++ has no ThreadSanitizer")
    found = run(program)
    if "unexpected memory mapping" in found:
        pytest.skip("ThreadSanitizer cannot run on this kernel")
    assert found == ""


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(("    await_claimed();\n", ""), id="the caller does not wait for claimed pieces"),
        pytest.param(
            ("compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)", "exchange(seen - 1)"),
            id="two threads claim one piece",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("if (sleepers) bell.wake_all();", ""),
            id="threads that sleep are not woken at the end",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("if (spin_until(is_over)) return;", "while (!is_over()) pause();"),
            id="idle threads spin",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_stress_sees_a_planted_bug(planted: tuple[str, str], tmp_path: Path) -> None:
    program = build(tmp_path, "-Wno-unused", planted=planted)
    assert run(program, timeout=6) != ""
