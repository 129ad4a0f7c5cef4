"""Torch's libraries are loaded in a thread of its own, or left to the import."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pageturner.service.startup.preload import preload_torch


def test_the_library_that_the_import_loads_is_loaded_in_another_thread() -> None:
    told: list[tuple[str, threading.Thread]] = []
    thread = preload_torch(lambda path: told.append((path, threading.current_thread())))
    assert thread is not None
    thread.join()
    ((path, loader),) = told
    assert Path(path).is_file()
    assert loader is thread


def test_a_library_that_cannot_be_loaded_is_left_to_the_import() -> None:
    def refuse(path: str) -> None:
        raise OSError(f"{path}: cannot open shared object file")

    thread = preload_torch(refuse)
    assert thread is not None
    thread.join()  # and no unhandled exception, which would fail this test


def test_without_torch_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert preload_torch() is None


def test_torch_works_on_libraries_loaded_before() -> None:
    program = """
from pageturner.service.startup.preload import preload_torch
preload_torch().join()
import sys
assert "torch" not in sys.modules
import torch
assert torch.ones(300, 300).matmul(torch.ones(300, 300)).sum() == 300**3
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
