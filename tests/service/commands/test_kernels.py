"""`pageturner kernels`: its table, its JSON, its verdict, and what it says where a tool is missing."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest

from pageturner.kernels.cuda import report, variants
from pageturner.kernels.cuda.report import Row
from pageturner.service.cli import EXIT_USER_ERROR, main
from pageturner.service.commands.kernels import EXIT_OVER_BUDGET


@pytest.fixture(scope="module")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all: what the first test compiles is the others'."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _few_kernels(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one small file, for real."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
    few = (variants.copy_blocks(), variants.gather_blocks(), variants.scatter_blocks())
    monkeypatch.setattr(variants, "shipped", lambda: few)


def test_the_table(capsys: pytest.CaptureFixture[str], cache_home: Path) -> None:
    assert main(["kernels", "--arch", "sm_90,sm_80"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert [line.strip() for line in lines if line.startswith("sm_")] == ["sm_90", "sm_80"]
    rows = [line.split() for line in lines if line.split()[:1] == ["gather_blocks"]]
    assert len(rows) == 2
    for _, registers, spill, shared, blocks, instructions in rows:
        assert 16 <= int(registers) <= 64
        assert (spill, shared) == ("0", "0")
        assert int(blocks) >= 8
        assert int(instructions) > 20
    assert lines[-1].endswith("6 of 6 kernels are within their budgets.")
    assert list((cache_home / "pageturner").glob("copy_blocks-sm_90-*"))


def test_all_architectures_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert int(document["nvrtc"].partition(".")[0]) >= 13
    kernels = document["kernels"]
    assert [(row["expression"], row["arch"]) for row in kernels[:4]] == [
        ("copy_blocks", "sm_80"),
        ("copy_blocks", "sm_90"),
        ("copy_blocks", "sm_100"),
        ("gather_blocks", "sm_80"),
    ]
    assert len(kernels) == 9
    assert all(row["violations"] == [] and row["spill_bytes"] == 0 for row in kernels)


def test_over_budget(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    spilling = Row(
        "f bf16", "f<bfloat16>", "sm_90", 255, 12, 0, 2, None, None, True, ("bytes spilled: 12, at most 0",)
    )
    monkeypatch.setattr(report, "inspect_kernels", lambda *given: (spilling,))
    assert main(["kernels", "--arch", "sm_90"]) == EXIT_OVER_BUDGET
    lines = capsys.readouterr().out.splitlines()
    assert "sm_90 f<bfloat16>: bytes spilled: 12, at most 0" in lines
    assert lines[-1].endswith("0 of 1 kernels are within their budgets.")
    assert main(["kernels", "--json"]) == EXIT_OVER_BUDGET


@pytest.mark.parametrize(
    ("archs", "wrong"), [("sm_90,volta", "volta"), ("sm_10", "sm_10"), ("sm_90,", ""), ("", "")]
)
def test_an_unknown_architecture_is_refused(
    archs: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kernels", "--arch", archs]) == EXIT_USER_ERROR
    assert f"--arch: {wrong!r} is none of sm_80, sm_86, " in capsys.readouterr().err


def test_without_cupy_the_command_names_the_extra_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["kernels"]) == EXIT_USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert 'pip install "pageturner[cuda13]"' in line


def test_without_nvdisasm_the_command_names_the_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "files", lambda name: [])
    assert main(["kernels"]) == EXIT_USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert "nvidia-cuda-nvdisasm" in line
