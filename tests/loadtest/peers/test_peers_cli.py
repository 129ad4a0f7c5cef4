"""Which engines the flags of `pageturner peers` name."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import pytest

from pageturner.loadtest.errors import OptionError
from pageturner.loadtest.peers.cases import Demand
from pageturner.loadtest.peers.cli import add_arguments, peers_of
from pageturner.loadtest.peers.machine import Machine
from pageturner.service.client.server_process import PROGRAM

AVX2 = Machine("Zen 3", 2, ("avx2",))
DEMAND = Demand(64, 256)


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_pageturner_is_first_and_the_others_are_those_named() -> None:
    given = ("--vllm-python=v", "--vllm-model=m", "--llamacpp-server=l", "--openvino-python=o", "--gguf=g")
    peers = peers_of(parse(*given, "--pageturner-flags=--dtype 'float32'"), AVX2)
    assert [peer.name for peer in peers] == ["Pageturner", "llama.cpp", "OpenVINO", "vLLM"]
    serve = peers[0].command(80, DEMAND).words
    assert serve[-5:] == ("serve", "--dtype", "float32", "--host=127.0.0.1", "--port=80")
    assert [peer.name for peer in peers_of(parse(), AVX2)] == ["Pageturner"]


def test_sequences_longer_than_the_default_are_allowed_for() -> None:
    (pageturner,) = peers_of(parse(), AVX2)
    assert "--max-model-len=2050" in pageturner.command(80, Demand(1, 2050)).words


@pytest.mark.parametrize(
    ("features", "words", "dtype"),
    [
        (("avx2",), (), "float32"),
        (("avx2", "avx512_bf16"), (), "bfloat16"),
        (("avx2",), ("--vllm-dtype=bfloat16",), "bfloat16"),
    ],
)
def test_vllm_computes_in_what_the_machine_multiplies(
    features: tuple[str, ...], words: tuple[str, ...], dtype: str
) -> None:
    arguments = parse("--vllm-python=v", "--vllm-model=m", *words)
    command = peers_of(arguments, Machine("", 2, features))[1].command(80, DEMAND)
    assert command.words[command.words.index("--dtype") + 1] == dtype
    assert command.environment["HF_HUB_OFFLINE"] == "1"


def test_vllm_needs_a_folder() -> None:
    with pytest.raises(OptionError, match="--vllm-model"):
        peers_of(parse("--vllm-python=v"), AVX2)


def test_a_peer_that_cannot_be_started_ends_the_command_with_its_reason(tmp_path: Path) -> None:
    words = ("peers", "--rounds=0")
    finished = subprocess.run([*PROGRAM, *words], capture_output=True, text=True, cwd=tmp_path)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert "--rounds" in finished.stderr
