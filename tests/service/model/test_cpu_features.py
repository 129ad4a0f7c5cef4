"""The dtype that `auto` comes to on processors with and without bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pageturner.service.model.cpu_features import fit_dtype, has_bfloat16, read_cpuinfo
from pageturner.service.model.options import ModelOptions

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SAPPHIRE = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16\n"
SKYLAKE = "processor\t: 0\nflags\t\t: fpu avx2 avx512f\n\nprocessor\t: 1\nflags\t\t: fpu avx2\n"
GRAVITON_3 = "processor\t: 0\nFeatures\t: fp asimd sve i8mm bf16\n"
GRAVITON_2 = "processor\t: 0\nFeatures\t: fp asimd\n"


@pytest.mark.parametrize(
    ("cpuinfo", "found"),
    [(SAPPHIRE, True), (SKYLAKE, False), (GRAVITON_3, True), (GRAVITON_2, False), ("", True)],
)
def test_bfloat16_is_read_from_the_flags_of_the_processors(cpuinfo: str, found: bool) -> None:
    assert has_bfloat16(cpuinfo) is found


@pytest.mark.fault("H")
def test_auto_on_a_cpu_without_bfloat16_is_float32_and_says_what_to_set() -> None:
    options, note = fit_dtype(ModelOptions(), CPU, SKYLAKE)
    assert options == ModelOptions(dtype="float32")
    assert note is not None
    assert "model.dtype = bfloat16" in note


@pytest.mark.fault("H")
def test_a_named_bfloat16_is_kept_and_said_to_be_slow_there() -> None:
    options, note = fit_dtype(ModelOptions(dtype="bfloat16"), CPU, SKYLAKE)
    assert options.dtype == "bfloat16"
    assert note is not None
    assert "model.dtype = float32 is several times faster" in note


@pytest.mark.fault("H")
@pytest.mark.parametrize(
    ("options", "device", "cpuinfo"),
    [
        (ModelOptions(), CPU, SAPPHIRE),
        (ModelOptions(), GPU, SKYLAKE),
        (ModelOptions(dtype="float32"), CPU, SKYLAKE),
        (ModelOptions(), CPU, ""),
    ],
)
def test_elsewhere_nothing_is_changed_or_said(
    options: ModelOptions, device: torch.device, cpuinfo: str
) -> None:
    assert fit_dtype(options, device, cpuinfo) == (options, None)


def test_a_machine_that_says_nothing_of_its_processors(tmp_path: Path) -> None:
    assert read_cpuinfo(tmp_path / "none") == ""
