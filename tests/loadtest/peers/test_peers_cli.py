"""Which engines the flags of `pageturner peers` name."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from support.peer_slices import slice_of

from pageturner.loadtest.errors import OptionError
from pageturner.loadtest.peers import cli
from pageturner.loadtest.peers.cases import Demand
from pageturner.loadtest.peers.cli import add_arguments, peers_of
from pageturner.loadtest.peers.machine import Machine
from pageturner.loadtest.peers.turns import Slice
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


@pytest.mark.parametrize("num_turns", [0, 1, 3])
def test_ctrl_c_ends_with_the_figures_so_far(
    num_turns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One engine, so that each slice is a turn; without any there is nothing to tell."""

    def turns(*arguments: Any) -> None:
        on_slice: Callable[[Slice], None] = arguments[-1]
        for number in range(1, num_turns + 1):
            on_slice(slice_of("Pageturner", number, 1.0))
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "contenders", lambda *_: nullcontext([MagicMock()]))
    monkeypatch.setattr(cli, "discover", AsyncMock())
    monkeypatch.setattr(cli, "Target", str)
    monkeypatch.setattr(cli, "take_turns", turns)
    if not num_turns:
        with pytest.raises(KeyboardInterrupt):
            cli.run(parse("--json"))
        return
    assert cli.run(parse("--json")) == 130
    assert json.loads(capsys.readouterr().out)["figures"][0]["rounds"] == num_turns
