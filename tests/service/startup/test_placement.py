"""What is chosen for a configuration, and what is said of it: the device, its kernels, and why not others."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import pytest
import torch
from support.fake_meter import FakeMeter
from support.ops import cpu_cache_dir
from support.scripted import recording_logger

from pageturner.kernels.errors import KernelsUnavailable
from pageturner.kernels.layout import KvLayout
from pageturner.kernels.torch_ops import TorchOps
from pageturner.service.config import load_config
from pageturner.service.errors import ConfigError
from pageturner.service.model import backend, kv_cache
from pageturner.service.model.backend import HeadShape
from pageturner.service.model.streams import streams_of
from pageturner.service.startup import placement
from pageturner.service.startup.sizing import HostMemory

HEADS = HeadShape(num_heads=8, num_kv_heads=2, head_dim=64)


def choose(**model: str) -> tuple[backend.Backend, list[MutableMapping[str, Any]]]:
    """With the libraries that other tests compiled: a new folder would cost each call a compilation."""
    logger, entries = recording_logger()
    config = load_config(None, {}, {f"model.{key}": value for key, value in model.items()}).config
    return placement.choose_backend(config, cpu_cache_dir(), logger), entries


def test_without_a_gpu_the_cpu_serves_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend, "gpu_trouble", lambda index: "the driver is too old")
    for options, level in (({}, "info"), ({"device": "cuda", "allow_fallback": "true"}, "warning")):
        chosen, entries = choose(**options)
        assert (chosen.device, chosen.meter) == (torch.device("cpu"), None)
        assert [(e["event"], e["log_level"], e["reason"]) for e in entries] == [
            ("no_gpu", level, "the driver is too old")
        ]
    assert choose(device="cpu")[1] == []


def test_operations_are_asked_for_as_the_configuration_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def select(*args: Any, **options: Any) -> TorchOps:
        asked.append((args, options))
        return TorchOps()

    monkeypatch.setattr(placement, "select_ops", select)
    chosen, _ = choose(device="cpu", allow_fallback="true", debug_kernels="true")
    chosen.choose_ops(HEADS, torch.bfloat16)
    ((args, options),) = asked
    assert args == (torch.device("cpu"), torch.bfloat16)
    assert options == {
        "head_dim": 64,
        "group": 4,
        "block_size": 16,
        "deterministic": False,
        "cache_dir": cpu_cache_dir(),
        "allow_fallback": True,
        "debug": True,
    }


def test_kernels_that_cannot_be_had_are_named_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any, **options: Any) -> TorchOps:
        raise KernelsUnavailable("CuPy is not installed")

    monkeypatch.setattr(placement, "select_ops", refuse)
    chosen, _ = choose(device="cpu")
    with pytest.raises(ConfigError, match=r"cpu: CuPy is not installed; model\.allow_fallback = true"):
        chosen.choose_ops(HEADS, torch.bfloat16)


def test_kernels_that_cannot_be_had_when_they_are_first_met_are_named() -> None:
    """A window's are compiled in the steps that measure memory."""

    def largest_steps() -> None:
        raise KernelsUnavailable("no room for the machine code")

    device = torch.device("cpu")
    meter = FakeMeter(1024, size=100, weights=10, others=0, activations=0)
    on_gpu = backend.Backend(device, lambda heads, dtype: TorchOps(), streams_of(device), meter=meter)
    layout = KvLayout(1, 1, 16, 16, torch.float32)
    config = load_config(None, {}, {}).config.cache
    with pytest.raises(ConfigError, match=r"^model\.device: cpu: no room for the machine code$"):
        placement.make_cache(config, layout, TorchOps(), on_gpu, largest_steps, HostMemory(1 << 30))


@pytest.mark.parametrize(
    ("given", "refused", "key"),
    [
        ({"kv_cache_memory": "1MiB"}, 0, "cache.kv_cache_memory"),
        ({"num_blocks": "8"}, 0, "cache.num_blocks"),
        ({"num_blocks": "8", "swap_space": "1MiB"}, 1, "cache.swap_space"),
    ],
)
def test_a_pool_that_the_system_refuses_is_told_by_the_key_that_sizes_it(
    given: dict[str, str], refused: int, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a system does that promises no more memory than it has (vm.overcommit_memory = 2)."""
    pools = iter(range(2))

    def own_pages(shape: Sequence[int], dtype: torch.dtype, *, huge: bool = False) -> torch.Tensor:
        if next(pools) == refused:
            raise MemoryError("cannot allocate memory")
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(kv_cache, "own_pages", own_pages)
    device = torch.device("cpu")
    on_cpu = backend.Backend(device, lambda heads, dtype: TorchOps(), streams_of(device))
    layout = KvLayout(1, 1, 16, 16, torch.float32)
    config = load_config(None, {}, {f"cache.{name}": value for name, value in given.items()}).config.cache
    with pytest.raises(ConfigError, match=rf"^{key}: cannot allocate memory$"):
        placement.make_cache(config, layout, TorchOps(), on_cpu, lambda: None, HostMemory(1 << 30))
