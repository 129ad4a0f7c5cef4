"""The Makefile works wherever the clone lies."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.fault("48")
@pytest.mark.parametrize("target", ["demo", "serve", "test", "soak", "lint", "format", "clean"])
def test_no_command_holds_the_path_of_a_clone_in_a_folder_with_a_space(target: str, tmp_path: Path) -> None:
    folder = tmp_path / "my repo"
    folder.mkdir()
    lock = "tests/interop/package-lock.json"
    (folder / lock).parent.mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", lock):
        shutil.copy(ROOT / name, folder / name)
    command = ["make", "--dry-run", "-C", str(folder), target]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    recipe = [line for line in printed.splitlines() if not line.startswith("make")]
    assert recipe
    assert not [line for line in recipe if str(tmp_path) in line]
