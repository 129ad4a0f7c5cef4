"""Which device a model runs on, and what is said where it is not the one that was looked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pageturner.service.errors import ConfigError
from pageturner.service.model.backend import choose_device, gpu_trouble
from pageturner.service.model.options import ModelOptions

CPU = torch.device("cpu")


def choose(trouble: str | None, **options: Any) -> tuple[torch.device, str | None]:
    return choose_device(ModelOptions(**options), lambda index: trouble)


def test_auto_takes_the_gpu_that_can_be_used_and_says_why_not_else() -> None:
    assert choose(None) == (torch.device("cuda", 0), None)
    assert choose("no driver") == (CPU, "no driver")
    assert choose(None, device="cpu") == (CPU, None)


def test_a_gpu_that_was_asked_for_is_named_and_left_only_where_that_is_allowed() -> None:
    asked: list[int] = []

    def trouble(index: int) -> str | None:
        asked.append(index)
        return "the machine has 2 of them" if index > 1 else None

    assert choose_device(ModelOptions(device="cuda:1"), trouble) == (torch.device("cuda", 1), None)
    with pytest.raises(ConfigError, match=r"cuda:2 cannot be used: the machine has 2.*allow_fallback"):
        choose_device(ModelOptions(device="cuda:2"), trouble)
    allowed = ModelOptions(device="cuda:2", allow_fallback=True)
    assert choose_device(allowed, trouble) == (CPU, "the machine has 2 of them")
    assert asked == [1, 2, 2]


def test_float16_is_for_gpus() -> None:
    assert choose(None, dtype="float16")[0].type == "cuda"
    with pytest.raises(
        ConfigError, match=r"model\.dtype: float16 is for GPUs, and the model runs on the CPU$"
    ):
        choose(None, dtype="float16", device="cpu")
    with pytest.raises(ConfigError, match="no GPU can be used: no driver"):
        choose("no driver", dtype="float16", device="cuda", allow_fallback=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_torch_says_what_is_missing() -> None:
    trouble = gpu_trouble(0)
    assert trouble is not None
    assert "CUDA" in trouble or "NVIDIA" in trouble
    assert "\n" not in trouble
