"""The command line in itself: what it lists, prints and refuses, without a server."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest
from support.fake_engine import FakeEngine, FakeStream
from support.serving import serving

from pageturner.policies.interfaces import ALL_AXES
from pageturner.service.cli import COMMANDS, main
from pageturner.service.client import Client, Options
from pageturner.service.client.server_process import PROGRAM
from pageturner.service.commands import policies, serve, signals
from pageturner.service.commands.answer import DEFAULT_MAX_TOKENS, ask_for_some
from pageturner.service.commands.flags import flag_of
from pageturner.service.config import KEYS, load_config
from pageturner.service.engine.api import GenerationRequest
from pageturner.service.errors import InvalidArgument, PageturnerError, RefusalCause, Unauthenticated


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
        (["generate", "hi", "--target="], "HOST:PORT"),
        (["generate", "hi", "--target=x:1", "--length-penalty=2"], "--beam-width"),
        (["plan", f"--num-layers={10**400}", "--num-kv-heads=2", "--head-dim=8"], "num_layers"),
        (["explain", "x", "--file="], "cannot read"),
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
    assert list(document) == list(ALL_AXES)
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
        ["serve", "--help"],
    ],
    ids=lambda words: f"{words[0]}{len(words)}",
)
def test_a_full_disk_is_one_line(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        finished = subprocess.run([*PROGRAM, *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert finished.stderr == f"pageturner {words[0]}: standard output: No space left on device\n"
    assert finished.returncode == 2


@pytest.mark.parametrize(
    "words",
    [["policies", "check", "my_policy:Mine"], ["policies", "new", "queue", "Mine"], ["config", "--config=x"]],
)
def test_a_working_folder_that_is_gone_is_one_line(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    line = f"cd {tmp_path}/gone && rmdir ../gone && {shlex.join([*PROGRAM, *words])}"
    finished = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
    assert finished.returncode == 2
    assert finished.stderr.count("\n") == 1
    assert "No such file or directory" in finished.stderr


OFFLINE = {
    "help": ["--help"],
    "serve-help": ["serve", "--help"],
    "loadtest-help": ["loadtest", "--help"],
    "policies": ["policies", "--json", "victim"],
    "config": ["config", "--json"],
    "plan": ["plan", "--num-layers=2", "--num-kv-heads=2", "--head-dim=8"],
    "simulate": ["simulate", "--workload=mixed:requests=2", "--seeds=1"],
}
HOSTILE: dict[str, dict[str, str]] = {
    "container": {
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "LC_ALL": "C",
        "HOME": "",
        "http_proxy": "http://127.0.0.1:9",
        "PAGETURNER_PORT": "tcp://10.0.0.9:80",
        "PAGETURNER_SERVER_PORT": "tcp://10.0.0.9:80",
        "PAGETURNER_MODEL_SERVICE_PORT": "80",
    },
    "latin-1": {"PYTHONIOENCODING": "latin-1", "HOME": "/"},
}


def hostile(**variables: str) -> dict[str, str]:
    """The environment of this process with these variables; an empty one is taken out."""
    return {name: value for name, value in {**os.environ, **variables}.items() if value}


@pytest.mark.fault("2", "8", "25", "27")
@pytest.mark.parametrize("environment", HOSTILE)
@pytest.mark.parametrize("command", OFFLINE)
def test_a_command_does_its_work_in_any_environment(command: str, environment: str) -> None:
    finished = subprocess.run(
        [*PROGRAM, *OFFLINE[command]], capture_output=True, env=hostile(**HOSTILE[environment])
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout


@pytest.mark.fault("10", "N")
@pytest.mark.parametrize("closed", ["<&- 2>&-", "2>/dev/full"])
@pytest.mark.parametrize("command", OFFLINE)
def test_a_command_does_its_work_without_standard_streams(command: str, closed: str) -> None:
    line = f"{shlex.join([*PROGRAM, *OFFLINE[command]])} {closed}"
    finished = subprocess.run(["sh", "-c", line], capture_output=True)
    assert finished.returncode == 0
    assert finished.stdout


@pytest.mark.fault("10")
@pytest.mark.parametrize("closed", ["2>&-", "2>/dev/full"])
def test_a_mistake_keeps_its_exit_code_where_it_cannot_be_told(closed: str) -> None:
    line = f"{shlex.join([*PROGRAM, 'config', '--block-size=x'])} {closed}"
    assert subprocess.run(["sh", "-c", line], capture_output=True).returncode == 2


@pytest.mark.fault("10")
def test_a_result_that_a_closed_output_cannot_take_fails_the_command() -> None:
    line = f"{shlex.join([*PROGRAM, 'config'])} >&-"
    finished = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
    assert (finished.returncode, finished.stderr) == (
        2,
        "pageturner config: standard output: Bad file descriptor\n",
    )


@pytest.mark.fault("26")
@pytest.mark.parametrize(
    ("words", "stdin", "said"),
    [
        ([b"generate", b"caf\xe9"], b"", "argument prompt: 'caf\\xe9' is not UTF-8 text"),
        ([b"generate", b"-"], b"caf\xe9", "standard input: 'caf\\xe9' is not UTF-8 text"),
        ([b"demo", b"--prompt=\xe9"], b"", "argument --prompt: '\\xe9' is not UTF-8 text"),
        ([b"loadtest", b"--tenants=\xe9:1"], b"", "argument --tenants: '\\xe9:1' is not UTF-8 text"),
        ([b"config", b"--model=\xe9"], b"", "model.source: '\\xe9' is not text in this locale"),
        ([b"policies", b"\xe9"], b"", "'\\xe9' is not UTF-8 text"),
    ],
    ids=lambda value: value[0].decode() if isinstance(value, list) else None,
)
def test_bytes_that_are_no_text_are_one_line(words: list[bytes], stdin: bytes, said: str) -> None:
    finished = subprocess.run([*PROGRAM, *words], input=stdin, capture_output=True)
    assert finished.returncode == 2
    assert said in finished.stderr.decode()
    assert finished.stderr.count(b"\n") == 1


@pytest.mark.fault("9")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_signal_ignored_at_the_start_stays_ignored(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `nohup` leaves SIGHUP, and a shell SIGINT for its background jobs."""
    found: list[object] = []

    async def work() -> None:
        found.append(signal.getsignal(number))
        os.kill(os.getpid(), number)

    def record(_arguments: argparse.Namespace) -> int:
        found.append(signal.getsignal(number))
        signals.run(work())
        return 0

    monkeypatch.setattr(policies, "run", record)
    before = {each: signal.getsignal(each) for each in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)}
    signal.signal(number, signal.SIG_IGN)
    try:
        assert run("policies") == 0
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert found == [signal.SIG_IGN, signal.SIG_IGN]


def test_a_program_that_calls_a_command_has_its_handlers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile: list[object] = []

    def fail(_arguments: argparse.Namespace) -> int:
        meanwhile.append(signal.getsignal(signal.SIGTERM))
        raise PageturnerError("planted")

    def own(number: int, frame: FrameType | None) -> None:
        """Of this program."""

    monkeypatch.setattr(policies, "run", fail)
    before = signal.signal(signal.SIGTERM, own)
    try:
        assert run("policies") == 2
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    assert meanwhile != [own]


@pytest.mark.fault("K")
def test_plan_takes_the_model_as_a_flag_and_a_config_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64, "dtype": "bfloat16"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shape))
    for words in (["--model", str(tmp_path)], ["--model", str(path)], [str(path)]):
        assert run("plan", *words, "--json") == 0
        assert json.loads(capsys.readouterr().out)["bytes_per_token"] == 2 * 4 * 8 * 8 * 2
    assert run("plan", str(path), "--model", str(path)) == 2
    assert "named twice" in capsys.readouterr().err
    path.write_text("[]")
    assert run("plan", str(path)) == 2
    assert f"{path} is not a JSON object" in capsys.readouterr().err
    path.write_text("[" * 100_000)
    assert run("plan", str(path)) == 2
    assert f"{path} is not JSON" in capsys.readouterr().err
    assert run("plan", str(tmp_path / "gone.json")) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.fault("K")
@pytest.mark.parametrize("command", COMMANDS)
def test_no_value_in_the_help_is_called_value(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    shown = capsys.readouterr().out
    assert "VALUE" not in re.sub(r"\w+=VALUE", "", shown)
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.fault("K")
def test_the_help_says_the_default_of_each_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for default in ("tokens of one block (default 16)", "(default 1GiB)", "(default fcfs)"):
        assert default in shown
    assert "--kv-cache-memory SIZE" in shown


@pytest.mark.fault("K")
@pytest.mark.parametrize("words", [["policies"], OFFLINE["plan"]], ids=["policies", "plan"])
def test_lists_and_tables_fit_80_columns(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


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


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_server_that_is_not_there_is_named_without_a_wait(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def wait(_client: Client, _seconds: float) -> None:
        raise AssertionError("nobody is there to be waited for")

    monkeypatch.setattr(Client, "wait_until_serving", wait)
    assert run(command, *["hello"][: command == "generate"], "--target=127.0.0.1:1") == 2
    error = capsys.readouterr().err
    assert "UNAVAILABLE" in error
    assert "127.0.0.1:1" in error


class _Bounded(FakeEngine):
    """Refuses answers that are stated to be longer than this."""

    room = 1000

    async def submit(self, request: GenerationRequest) -> FakeStream:
        if (request.params.max_tokens or 0) > self.room:
            raise InvalidArgument("max_tokens", f"{request.params.max_tokens} do not fit")
        return await super().submit(request)


async def test_an_answer_of_no_stated_length_has_a_bound_or_what_fits() -> None:
    engine = _Bounded()
    async with serving(engine) as served:

        async def length(options: Options) -> int:
            answer = await ask_for_some(served.client, "ab", options, lambda _index, _text: None)
            return answer.usage.num_output_tokens

        assert await length({}) == DEFAULT_MAX_TOKENS
        assert await length({"max_tokens": 3}) == 3
        engine.room = 100
        assert await length({}) == 4  # what the engine takes for the room there is
        with pytest.raises(InvalidArgument):
            await length({"max_tokens": 101})
        with pytest.raises(InvalidArgument, match="temperature"):
            await length({"temperature": -1.0})
        assert await length({"n": 2}) == 8


def test_who_lacks_a_token_is_told_how_to_give_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_arguments: argparse.Namespace) -> int:
        raise Unauthenticated(RefusalCause.MISSING)

    monkeypatch.setattr(policies, "run", refuse)
    assert run("policies") == 2
    assert "--token-file FILE or PAGETURNER_TOKEN_FILE" in capsys.readouterr().err
