"""What a mark of pyproject.toml stands for, for every test that bears it."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A machine without a GPU is the one reason not to run a `gpu` test: where there is one, kernels that
    cannot be had fail it."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
