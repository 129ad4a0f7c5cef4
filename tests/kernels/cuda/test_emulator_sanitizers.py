"""The emulated suite under AddressSanitizer: no kernel reads or writes beside its arrays.

Undefined behaviour and races need no run of their own: every emulated kernel is watched for them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.emulator_probe import line
from support.sanitized import REPORTED, sanitizer_environment

HERE = Path(__file__).parent
SUITE = (
    "test_primitives.py",
    "test_row_kernels.py",
    "test_block_kernels.py",
    "test_swap.py",
    "test_attention_kernels.py",
    "test_cuda_ops.py",
)
"""What launches emulated kernels, and no NVRTC: under a preload it does not find its own libraries."""

pytestmark = pytest.mark.slow


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = sanitizer_environment() | {"PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parents[2])


def run_in_child(ahead: int) -> subprocess.CompletedProcess[str]:
    """A kernel that reads so many floats beyond the end of its input."""
    script = f"""
import torch
from pageturner.kernels.cuda.emulation.build import ADDRESS
from support.emulator_probe import run
run("reads_ahead", torch.zeros(128), count={ahead}, races=False, flags=ADDRESS)
"""
    return _python("-c", script)


def test_a_planted_read_beyond_the_end_is_reported() -> None:
    assert run_in_child(ahead=0).returncode == 0
    found = run_in_child(ahead=1)
    assert found.returncode == REPORTED
    assert "heap-buffer-overflow" in found.stderr
    assert line("ahead") in found.stderr


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", SUITE)
def test_the_emulated_suite_is_clean(file: str) -> None:
    plugins = ("-p", "support.sanitized", "-p", "no:cacheprovider")
    found = _python("-m", "pytest", *plugins, "-q", "-x", "-m", "not slow and not gpu", str(HERE / file))
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    assert " passed" in found.stdout
