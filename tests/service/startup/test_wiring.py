"""How a configuration becomes an engine, where the machine refuses a part."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from support.scripted import recording_logger

from pageturner.service.engine.step_computation import DirectSteps, ThreadedSteps
from pageturner.service.startup import wiring
from pageturner.service.startup.loading import LoadedModel


def model_on(device: str) -> LoadedModel:
    backend = SimpleNamespace(device=torch.device(device))
    return cast(
        LoadedModel,
        SimpleNamespace(backend=backend, kv_cache=None, runner=None, sampler=None, masks=None, ranks=None),
    )


def test_steps_have_a_thread_where_a_cpu_plans_one_ahead() -> None:
    logger, lines = recording_logger()
    for device, depth in (("cpu", 0), ("meta", 1)):
        assert isinstance(wiring._steps(model_on(device), depth, logger), DirectSteps)
    steps = wiring._steps(model_on("cpu"), 1, logger)
    assert isinstance(steps, ThreadedSteps)
    steps.close()
    assert not lines


def test_without_a_thread_for_steps_the_engine_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found out at the start: a refusal in the first step would end the engine."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    logger, lines = recording_logger()
    assert isinstance(wiring._steps(model_on("cpu"), 1, logger), DirectSteps)
    (line,) = lines
    assert (line["event"], line["log_level"]) == ("no_thread_for_steps", "warning")
    assert line["reason"] == "can't start new thread; the engine computes them in its own"
