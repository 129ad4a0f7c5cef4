"""What is refused before ranks load anything, and how sizes are agreed upon."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.model_folders import save_chat_model
from support.scripted import recording_logger
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch leaves it out of its exports

from pageturner.service.config import CacheConfig, cache_directory, load_config
from pageturner.service.core.options import CacheOptions
from pageturner.service.errors import ConfigError, ModelError
from pageturner.service.llm import LLM
from pageturner.service.model.loader import load_artifacts
from pageturner.service.model.tensor_parallel import meeting
from pageturner.service.ranks.meeting import HOST, open_store
from pageturner.service.ranks.messages import Sizes
from pageturner.service.sizes import Bytes
from pageturner.service.startup import ranks
from pageturner.service.startup.placement import choose_backend
from pageturner.service.startup.ranks import (
    RANK_PROGRAM,
    capacity_of,
    check_gpus,
    meets_by,
    sized,
    started_ranks,
)
from pageturner.service.startup.sizing import share_of

PLAIN = {"device": "cpu", "quantization": "none", "dtype": "float32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tensor_parallel_size": 0}, r"model\.tensor_parallel_size: 0 is not in \[1, 64\]"),
        ({"tensor_parallel_port": 65536}, r"model\.tensor_parallel_port: 65536 is no port"),
        (
            {"tensor_parallel_size": 2, "device": "cuda:1"},
            r"model\.device: cuda:1 names one GPU; 2 ranks take",
        ),
    ],
)
def test_options_that_suit_no_model(options: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config(environ={}, given={f"model.{key}": value for key, value in options.items()})


def test_a_disk_holds_no_part_of_a_block() -> None:
    given = {
        "model.tensor_parallel_size": 2,
        "cache.disk_cache_folder": "/tmp/blocks",
        "cache.host_cache_memory": "1GiB",
    }
    with pytest.raises(ConfigError, match=r"cache\.disk_cache_folder: would hold the KV of one rank of 2"):
        load_config(environ={}, given=given)


def test_more_ranks_than_heads_are_refused_with_the_numbers(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.tensor_parallel_size: 3 ranks: the model has 4 heads"):
        LLM({"source": str(model), "tensor_parallel_size": 3, **PLAIN})


def test_a_port_in_use_is_refused_by_name(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = rf"model\.tensor_parallel_port: {HOST}:{port}: Address already in use"
        with pytest.raises(ConfigError, match=told):
            open_store(port, timedelta(seconds=1))
        options = {"source": str(model), "tensor_parallel_size": 2, "tensor_parallel_port": port}
        with pytest.raises(ConfigError, match=told):
            LLM({**options, **PLAIN})


def test_ranks_without_a_gpu_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "gpu_trouble", lambda index: "no such GPU" if index == 3 else None)
    check_gpus(3)
    told = r"model\.tensor_parallel_size: 4 ranks take a GPU each, and cuda:3 cannot be used: no such GPU"
    with pytest.raises(ConfigError, match=told):
        check_gpus(4)


_OTHER_WEIGHTS = """
from pageturner.service.ranks import messages
real = messages.read
def read(kind, payload):
    message = real(kind, payload)
    if isinstance(message, messages.Assignment):
        message.config["model.source"] += "-other"
    return message
messages.read = read
"""


def test_other_weights_on_a_rank_are_refused_by_name(tmp_path: Path) -> None:
    folder, other = tmp_path / "model", tmp_path / "model-other"
    save_chat_model(folder)
    save_chat_model(other)
    content = bytearray((other / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (other / "model.safetensors").write_bytes(content)
    loaded = load_config(
        environ={},
        given={f"model.{key}": value for key, value in {**PLAIN, "source": str(folder)}.items()}
        | {"model.tensor_parallel_size": 2},
    )
    logger, options, cache_dir = recording_logger()[0], loaded.config.model, cache_directory()
    backend = choose_backend(loaded.config, cache_dir, logger)
    artifacts = load_artifacts(options, cache_dir)
    program = (*RANK_PROGRAM[:-1], _OTHER_WEIGHTS + RANK_PROGRAM[-1])
    with (
        pytest.raises(ModelError, match=r"rank 1 \(process \d+\) has other weights \(\w+, rank 0 \w+\)$"),
        started_ranks(options, backend, logger, program) as peers,
    ):
        peers.meet(loaded, options, artifacts, backend, cache_dir)


COUNTS = st.integers(0, 100)
CACHES = st.builds(
    lambda blocks, swap, cache: CacheOptions(blocks + 1, 16, swap + cache, num_host_cache_blocks=cache),
    COUNTS,
    COUNTS,
    COUNTS,
)


@given(CACHES)
def test_a_capacity_is_what_its_sizes_give_back(cache: CacheOptions) -> None:
    capacity = capacity_of(cache)
    assert capacity.num_swap_blocks + capacity.num_host_cache_blocks == cache.num_host_blocks
    assert sized(CacheOptions(1, 16, 0), Sizes(**asdict(capacity))) == cache


def test_sizes_in_bytes_are_those_of_all_ranks() -> None:
    config = CacheConfig(
        kv_cache_memory=Bytes(1000), swap_space=Bytes(600), host_cache_memory=Bytes(300), num_blocks=None
    )
    share = share_of(config, 4)
    assert (share.kv_cache_memory, share.swap_space, share.host_cache_memory) == (250, 150, 75)
    assert share_of(config, 1) is config
    assert share_of(replace(config, kv_cache_memory=None, num_blocks=7), 4).num_blocks == 7


def test_ranks_connect_on_the_loopback_interface_and_leave_the_environment_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of a program which holds an `LLM` is its own."""
    found: list[str | None] = []
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(ranks, "exchange_library", lambda device, cache_dir: None)
    monkeypatch.setattr(
        meeting, "open_collectives", lambda *_: found.append(os.environ.get("GLOO_SOCKET_IFNAME"))
    )
    config = load_config(environ={}, given={"model.device": "cpu"}).config
    logger, entries = recording_logger()
    backend = choose_backend(config, cache_directory(), logger)
    meets_by(backend, 0, 1, cache_directory(), logger)(HashStore(), timedelta(seconds=60))
    assert found == ["lo" if sys.platform == "linux" else "lo0"]
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert not [entry for entry in entries if entry["event"] == "ranks_by_sockets"]
