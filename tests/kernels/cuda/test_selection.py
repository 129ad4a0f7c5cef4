"""Which operations a GPU gets, and what is said about it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.emulation import emulated_launcher

from pageturner.kernels.cuda import selection
from pageturner.kernels.errors import KernelArgumentError, KernelsUnavailable
from pageturner.kernels.interface import PagedOps
from pageturner.kernels.layout import KeyOrder
from pageturner.kernels.selection import select_ops

GPU = torch.device("cuda", 0)


class Machine:
    """Stands for CuPy and its GPU: either it is missing, or its kernels run on the emulator."""

    def __init__(self, missing: str | None) -> None:
        self.missing = missing
        self.bounds_check: bool | None = None

    def compiler(self, cache_dir: Path, *, bounds_check: bool) -> None:
        self.bounds_check = bounds_check

    def runtime(self, device: torch.device, compiler: None) -> object:
        assert device == GPU
        if self.missing is not None:
            raise KernelsUnavailable(self.missing)
        return emulated_launcher().runtime


def machine(monkeypatch: pytest.MonkeyPatch, missing: str | None = None) -> Machine:
    made = Machine(missing)
    monkeypatch.setattr(selection, "Compiler", made.compiler)
    monkeypatch.setattr(selection, "CupyRuntime", made.runtime)
    return made


def select(**changes: Any) -> PagedOps:
    arguments: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "head_dim": 64,
        "block_size": 16,
        "deterministic": False,
        "cache_dir": Path("unused"),
        "group": 3,
    }
    return select_ops(GPU, **(arguments | changes))


def test_kernels_where_they_cover_the_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = machine(monkeypatch)
    ops = select()
    assert ops.name == "cuda-emulated"
    assert ops.key_order is KeyOrder.PLAIN
    assert gpu.bounds_check is False
    select(group=None, debug=True)
    assert gpu.bounds_check is True
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        ({"dtype": torch.float32}, "torch", "the kernels take bfloat16 or float16, not float32"),
        ({"head_dim": 80}, "torch", "the kernels take head_dim 64, 96, 128, 256, not 80"),
        ({"block_size": 8}, "torch", "the kernels take block_size 16 and its doubles, not 8"),
        ({"block_size": 48}, "torch", "the kernels take block_size 16 and its doubles, not 48"),
        ({"group": 17}, "torch", "the kernels take at most 16 query heads a kv head, not 17"),
        ({"deterministic": True}, "torch-deterministic", "deterministic results were asked for"),
        ({"cache_dir": None}, "torch", "there is no folder for compiled kernels"),
    ],
)
def test_torch_for_what_they_do_not_cover(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    name: str,
    reason: str,
) -> None:
    machine(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert select(**changes).name == name
    assert f"attention runs in torch on cuda:0, several times slower: {reason}" in caplog.text


def test_a_machine_that_lacks_something_is_refused_unless_torch_is_allowed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine(monkeypatch, missing="no CUDA driver is loaded")
    with pytest.raises(KernelsUnavailable, match="no CUDA driver is loaded"):
        select()
    with caplog.at_level(logging.WARNING):
        assert select(allow_fallback=True).name == "torch"
    assert "several times slower: no CUDA driver is loaded" in caplog.text


def test_torch_on_a_gpu_takes_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the CPU's backends refuse."""
    machine(monkeypatch, missing="no CUDA driver is loaded")
    ops = select(dtype=torch.float16, allow_fallback=True)
    gate_up = torch.ones(2, 8, dtype=torch.float16)
    assert ops.silu_and_mul(gate_up).dtype is torch.float16


def test_dtypes_that_nothing_takes() -> None:
    with pytest.raises(KernelArgumentError, match="needed: float32 or bfloat16 or float16 on cuda:0"):
        select(dtype=torch.float64)
