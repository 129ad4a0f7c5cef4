"""The kernels of adapters, emulated: against the definition, under every schedule, in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.cuda_cases import LAUNCHERS, RUNTIMES
from support.emulation import emulated_launcher
from support.low_rank_kernels import BF16, CASES, FP16, MIXED, check, check_company

from pageturner.kernels.cuda.emulation.schedule import SCHEDULES, Schedule
from pageturner.kernels.cuda.low_rank import CudaLowRankOps
from pageturner.kernels.cuda.ops import CudaOps
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.low_rank import AdapterRows, LowRankBackend, ProductSizes


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", CASES)
def test_is_what_the_definition_says(runtime: str, name: str) -> None:
    check(LAUNCHERS[runtime](), CASES[name])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_under_every_schedule(schedule: Schedule) -> None:
    check(emulated_launcher(schedule), MIXED)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_row_has_its_bits_whatever_is_beside_it(runtime: str) -> None:
    check_company(LAUNCHERS[runtime](), MIXED)


def test_it_is_what_the_decoder_takes_on_a_gpu() -> None:
    ops = CudaOps(emulated_launcher())
    assert isinstance(ops, LowRankBackend)
    assert isinstance(ops.low_rank_ops(BF16), CudaLowRankOps)


def test_what_does_not_fit_is_refused() -> None:
    ops, product = CudaLowRankOps(emulated_launcher(), BF16), ProductSizes((16,), 32, 32)
    one = AdapterRows(np.zeros(2, dtype=np.int32), 1)
    with pytest.raises(KernelArgumentError, match="dtype"):
        CudaLowRankOps(emulated_launcher(), torch.float32)
    with pytest.raises(KernelArgumentError, match="rows"):
        ops.add(torch.zeros(2, 16, dtype=FP16), torch.zeros(2, 32, dtype=FP16), one, [None])
    with pytest.raises(KernelArgumentError, match="dense rows"):
        ops.add(torch.zeros(16, 2, dtype=BF16).T, torch.zeros(2, 32, dtype=BF16), one, [None])
    assert ops.prepare([None], product) is None
