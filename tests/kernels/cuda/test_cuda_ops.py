"""The CUDA operations against the definition: the very same cases on the emulator and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from pageturner.kernels.cuda.runtime import Launcher
from support.cuda_cases import (
    LAUNCHERS,
    PAIRWISE,
    RUNTIMES,
    attention_case,
    check_cuda_attention,
    describe,
)


@pytest.fixture(params=RUNTIMES)
def launcher(request: pytest.FixtureRequest) -> Launcher:
    return LAUNCHERS[request.param]()


@pytest.mark.parametrize("case", PAIRWISE, ids=describe)
def test_attention_pairwise(launcher: Launcher, case: dict[str, Any]) -> None:
    check_cuda_attention(launcher, attention_case(**case))
