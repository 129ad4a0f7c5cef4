"""The CPU bodies of the primitives, against their definitions. On a GPU the same checks run by mark."""

from __future__ import annotations

import pytest
from support.ops import cpu_cache_dir
from support.primitive_cases import CHECKS, probe_sources

from pageturner.kernels.cuda.emulation.build import Builder
from pageturner.kernels.cuda.emulation.runtime import EmulatedRuntime
from pageturner.kernels.cuda.emulation.schedule import SCHEDULES
from pageturner.kernels.cuda.runtime import Launcher


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(cpu_cache_dir(), probe_sources(tmp_path_factory.mktemp("probes")))


@pytest.mark.parametrize("name", CHECKS)
def test_a_primitive_is_what_its_definition_says(builder: Builder, name: str) -> None:
    for schedule in SCHEDULES if "cp_async" in name or "ldmatrix" in name else SCHEDULES[:1]:
        CHECKS[name](Launcher(EmulatedRuntime(builder, schedule=schedule)))
