"""The command line in itself: what it lists, prints and refuses, without a server."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pageturner.policies.interfaces import AXES
from pageturner.service.cli import COMMANDS, main
from pageturner.service.client.server_process import PROGRAM
from pageturner.service.commands import generate, serve
from pageturner.service.commands.flags import flag_of
from pageturner.service.config import KEYS, load_config


def run(*words: str) -> int:
    try:
        return main(words)
    except SystemExit as done:  # argparse ends --help and usage errors so
        return int(done.code or 0)


def test_the_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    listed = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n    {name}" in listed


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_shows_an_example_that_parses(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    example = " ".join(capsys.readouterr().out.split()).partition("example: ")[2]
    assert example.startswith(f"pageturner {command}")


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["serve", "--help"],
        ["generate", "--help"],
        ["chat", "--help"],
        ["demo", "--help"],
        ["loadtest", "--help"],
        ["bench", "startup", "--help"],
        ["config"],
        ["policies"],
        ["plan", "--num-layers=2", "--num-kv-heads=2", "--head-dim=8"],
    ],
    ids=" ".join,
)
def test_nothing_but_serving_pays_for_torch(words: list[str]) -> None:
    code = (
        "import sys; from pageturner.service.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "found = {'torch', 'transformers', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'imported: {found}' if found else 0)"
    )
    finished = subprocess.run([sys.executable, "-P", "-c", code, *words], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def test_no_two_keys_share_a_flag() -> None:
    flags = Counter(flag_of(key) for key in KEYS.values())
    assert max(flags.values()) == 1, flags.most_common(3)
    assert {"--model", "--block-size", "--num-blocks", "--max-num-seqs", "--dtype", "--queue-policy"} <= set(
        flags
    )


def test_the_configuration_printed_is_one_that_reads_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--num-blocks=64", "--swap-space=1GiB", "--no-enable-prefix-caching", "--queue-policy=priority"]
    assert run("config", *words) == 0
    path = tmp_path / "printed.toml"
    path.write_text(capsys.readouterr().out)
    config = load_config(path, {}).config
    assert config.cache.num_blocks == 64
    assert config.cache.enable_prefix_caching is False
    assert config.policies.queue.name == "priority"
    assert run("config", f"--config={path}", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cache.num_blocks"]["value"] == 64
    assert document["cache.num_blocks"]["origin"] == str(path)
    assert document["cache.kv_cache_memory"] == {
        "value": None,
        "default": None,
        "origin": "default",
        "doc": KEYS["cache.kv_cache_memory"].doc,
    }


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["config", "--block-size=zero"], "cache.block_size"),
        (["config", "--victim-policy=nosuch"], "policies.victim"),
        (["config", "--config=/nowhere.toml"], "/nowhere.toml"),
        (["serve", "--swap-space=4"], "cache.swap_space"),
        (["policies", "victims"], "victims"),
        (["plan", "--num-layers=2"], "--num-kv-heads"),
        (["plan", "--num-layers=0", "--num-kv-heads=2", "--head-dim=8"], "num_layers"),
        (["generate", "hi", "--target=x:1", "--block-size=8"], "--block-size"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_mistake_is_one_line_that_names_it(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"pageturner {words[0]}: ")
    assert named in captured.err
    assert captured.err.count("\n") == 1


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sevre") == 2
    assert "serve" in capsys.readouterr().err


def test_policies_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("policies", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == list(AXES)
    for axis in document.values():
        assert axis["question"].endswith("?")
        assert axis["default"] in [policy["name"] for policy in axis["policies"]]
        assert all(policy["summary"] for policy in axis["policies"])


def test_policies_of_one_axis(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("policies", "victim") == 0
    out = capsys.readouterr().out
    assert out.startswith("victim: Who yields")
    assert "queue:" not in out


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (("32", "32", "128", "16", "32768"), "bytes_per_batch", 274_877_906_944),
        (("80", "64", "128", "32", "2048"), "bytes_per_token", 2_621_440),
        (("80", "64", "128", "32", "2048"), "bytes_per_batch", 171_798_691_840),
        (("80", "8", "128", "32", "2048"), "bytes_per_token", 327_680),
    ],
)
def test_plan_by_numbers(
    words: tuple[str, ...], key: str, value: int, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("--num-layers", "--num-kv-heads", "--head-dim", "--batch", "--request-tokens")
    flags = [f"{name}={word}" for name, word in zip(names, words, strict=True)]
    assert run("plan", *flags, "--dtype=float16", "--json") == 0
    assert json.loads(capsys.readouterr().out)[key] == value


def test_plan_for_a_model_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run("plan", str(tmp_path), "--budget=1MiB", "--request-tokens=32", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["bytes_per_token"] == 2 * 4 * 2 * 8 * 2
    assert document["paged_requests"] == (1 << 20) // (256 * 32)
    assert run("plan", str(tmp_path)) == 0
    assert "contiguous" in capsys.readouterr().out


def test_a_closed_pipe_is_no_traceback() -> None:
    code = " ".join(f"'{word}'" for word in PROGRAM)
    finished = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{code} policies | head -n 1"], capture_output=True, text=True
    )
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["policies"],
        ["policies", "--json"],
        ["config"],
        ["plan", "--num-layers=2", "--num-kv-heads=2", "--head-dim=8"],  # through rich
        ["plan", "--num-layers=2", "--num-kv-heads=2", "--head-dim=8", "--json"],
    ],
    ids=lambda words: f"{words[0]}{len(words)}",
)
def test_a_full_disk_is_one_line(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        finished = subprocess.run([*PROGRAM, *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert finished.stderr == f"pageturner {words[0]}: standard output: No space left on device\n"
    assert finished.returncode == 2


def test_setting_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("policies", "set") == 2
    assert "--preset NAME" in capsys.readouterr().err


def test_a_library_that_is_not_installed_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_arguments: argparse.Namespace) -> int:
        raise ModuleNotFoundError(name="torch.nn")

    monkeypatch.setattr(serve, "run", fail)
    assert run("serve") == 2
    error = capsys.readouterr().err
    assert "torch is not installed" in error
    assert "pageturner[serve]" in error
    assert error.count("\n") == 1


def test_a_module_of_ours_that_is_missing_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_arguments: argparse.Namespace) -> int:
        raise ModuleNotFoundError(name="pageturner.gone")

    monkeypatch.setattr(serve, "run", fail)
    with pytest.raises(ModuleNotFoundError):
        run("serve")


def test_a_server_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "CONNECT_SECONDS", 0.2)
    assert run("generate", "hello", "--target=127.0.0.1:1") == 2
    assert "no server at 127.0.0.1:1 was ready within 0.2 s" in capsys.readouterr().err
