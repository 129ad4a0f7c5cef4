"""Which device a model runs on, and what is said where it is not the one that was looked for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from pageturner.service.core.outputs import SampleRow, ScheduledSequence, SchedulerOutput
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.errors import ConfigError
from pageturner.service.model.backend import choose_device, gpu_trouble
from pageturner.service.model.fences import Fences
from pageturner.service.model.memory import CudaMemoryMeter
from pageturner.service.model.options import ModelOptions
from pageturner.service.model.sampler import Sampler
from pageturner.service.model.streams import streams_of

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


@pytest.mark.parametrize(
    "device", ["cuda:", "cuda:00", "cuda:128", "cuda:256", "cuda:\u0663", "cuda:-1", "gpu"]
)
def test_numbers_that_torch_would_misread_are_refused(device: str) -> None:
    """It takes 256 for 0, and 128 for a number below 0."""
    with pytest.raises(ConfigError, match="is none of auto, cpu, cuda, cuda:1"):
        ModelOptions(device=device)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("The NVIDIA driver is too old. Please update it"), "The NVIDIA driver is too old"),
        (AssertionError(), "AssertionError"),
        (
            torch.cuda.DeferredCudaCallError(
                "CUDA call failed lazily\n\nCUDA call was originally invoked at:"
            ),
            "CUDA call failed lazily",
        ),
    ],
)
def test_what_torch_finds_wrong_is_a_reason(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "init", fail)
    assert gpu_trouble(0) == reason


def test_float16_is_for_gpus() -> None:
    assert choose(None, dtype="float16")[0].type == "cuda"
    with pytest.raises(
        ConfigError, match=r"model\.dtype: float16 is for GPUs, and the model runs on the CPU$"
    ):
        choose(None, dtype="float16", device="cpu")
    with pytest.raises(ConfigError, match="no GPU can be used: no driver"):
        choose("no driver", dtype="float16", device="cuda", allow_fallback=True)


def test_any_machine_says_why_it_lacks_the_hundredth_gpu() -> None:
    trouble = gpu_trouble(99)
    assert trouble is not None
    assert "\n" not in trouble
    assert "CUDA" in trouble or "NVIDIA" in trouble or "the machine has" in trouble


@pytest.mark.gpu
def test_a_gpu_is_found_and_its_memory_measured() -> None:
    device, trouble = choose_device(ModelOptions(device="cuda"))
    assert (device, trouble) == (torch.device("cuda", 0), None)
    assert gpu_trouble(torch.cuda.device_count()) is not None
    meter = CudaMemoryMeter(device)
    kept = torch.zeros(1 << 20, device=device)
    assert kept.nbytes <= meter.tensors() < meter.in_use() < meter.total()
    most = meter.peak_of(lambda: torch.zeros(64 << 20, dtype=torch.uint8, device=device))
    assert 64 << 20 <= most < 128 << 20
    with pytest.raises(MemoryError):
        meter.peak_of(lambda: torch.empty(meter.total() * 2, dtype=torch.uint8, device=device))


@pytest.mark.gpu
def test_copies_wait_for_the_computation_and_the_computation_for_copies() -> None:
    device = torch.device("cuda", 0)
    streams = streams_of(device)
    source = torch.zeros(1 << 24, device=device)
    host = torch.empty(source.shape, pin_memory=True)
    fences = Fences(streams, num_blocks=1)
    for value in range(1, 20):
        fences.compute([0], partial(source.fill_, value))
        fences.copy([0], lambda: host.copy_(source, non_blocking=True))
        fences.compute([0], lambda: source.fill_(-1))
        torch.cuda.synchronize(device)
        assert bool((host == value).all())
    fences.touch([])
    assert (fences.num_events, fences.fenced) == (0, [])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, logprobs=5),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=50, logprobs=5),
        SamplingParams(temperature=1.0, min_p=0.05, repetition_penalty=1.3),
    ],
)
def test_the_sampler_chooses_alike_on_both_devices(params: SamplingParams) -> None:
    """The devices round a sum differently, so that a number drawn at a border may fall on either side."""
    num_rows, vocab_size = 128, 49_152
    logits = (3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))).bfloat16()
    row = SampleRow(0, 0, 0, 3, params, prompt_token_ids=(1, 2), output_token_ids=(3,))
    output = SchedulerOutput(
        0,
        tuple(
            ScheduledSequence(i, str(i), 0, (0,), 0, 0, (0,), (replace(row, seq_id=i, seed=i),))
            for i in range(num_rows)
        ),
    )
    sampler = Sampler(vocab_size)
    on_cpu, on_gpu = sampler.sample(logits, output), sampler.sample(logits.cuda(), output)
    same = [
        (one.tokens[0], other.tokens[0])
        for one, other in zip(on_cpu, on_gpu, strict=True)
        if one.tokens[0].token_id == other.tokens[0].token_id
    ]
    assert len(same) >= (num_rows if params.is_greedy else 0.97 * num_rows)
    for one, other in same:
        assert [top.token_id for top in one.top_logprobs] == [top.token_id for top in other.top_logprobs]
        assert (one.logprob or 0.0) == pytest.approx(other.logprob or 0.0, abs=1e-3)
