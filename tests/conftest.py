"""What holds for every test: bytecode is kept, and what a mark of pyproject.toml stands for."""

from __future__ import annotations

import os
import sys

import pytest


def pytest_configure() -> None:
    """Write bytecode, whatever the environment says: a hundred tests start a Python of their own, and each
    would compile torch's modules anew, for half of its processor time."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A machine without a GPU is the one reason not to run a `gpu` test: where there is one, kernels that
    cannot be had fail it."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
