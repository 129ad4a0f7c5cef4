"""Commands that start a server or talk to one: real processes, a tiny model."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli_servers import (
    monitoring_port,
    run,
    serving,
    tiny_flags,
)
from support.http_pages import get
from support.model_folders import save_chat_model
from support.scrapes import parse

from pageturner.service.bench.startup import await_parts
from pageturner.service.client.server_process import PROGRAM, RunningServer, running_server
from pageturner.service.errors import ModelError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with a tokenizer of its own and a chat template."""
    return save_chat_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def flags(model: Path) -> list[str]:
    return tiny_flags(model)


@pytest.fixture(scope="module")
def server(flags: list[str]) -> Iterator[RunningServer]:
    with running_server(flags) as running:
        yield running


def test_a_server_is_monitored_over_http_from_the_start(flags: list[str]) -> None:
    with serving(*flags, "--metrics-port=0", "--log-format=json") as (process, target):
        port = monitoring_port(process)
        assert asyncio.run(get(port, "/readyz")).body == "ready\n"
        assert asyncio.run(get(port, "/healthz")).status == 200
        run("generate", "hello", f"--target={target}", "--max-tokens=8")
        scrape = parse(asyncio.run(get(port, "/metrics")))
        assert scrape.value("pageturner:generation_tokens_total") == 8
        assert scrape.value("process_resident_memory_bytes") > 1 << 20
        taken = run("serve", "--port=0", *flags, f"--metrics-port={port}")
        assert taken.returncode == 2
        assert f"metrics.port: 127.0.0.1:{port} is in use" in taken.stderr
        assert "Traceback" not in taken.stderr  # the gRPC server that listened by then was stopped


def test_generate_streams_text(server: RunningServer) -> None:
    plain = run("generate", "hello", f"--target={server.target}", "--max-tokens=8", "--temperature=0")
    assert plain.returncode == 0, plain.stderr
    figures = run(
        "generate", "hello", f"--target={server.target}", "--max-tokens=8", "--temperature=0", "--json"
    )
    answer = json.loads(figures.stdout)
    assert plain.stdout == answer["choices"][0]["text"] + "\n"
    assert answer["usage"]["num_output_tokens"] == len(answer["choices"][0]["token_ids"]) > 0


def test_generate_shows_the_best_answers_of_a_search(server: RunningServer) -> None:
    words = ["generate", "hello", f"--target={server.target}", "--max-tokens=8", "--n=2", "--beam-width=3"]
    found = run(*words, "--length-penalty=0", "--early-stopping=never", "--json")
    assert found.returncode == 0, found.stderr
    scores = [choice["score"] for choice in json.loads(found.stdout)["choices"]]
    assert scores == sorted(scores, reverse=True)
    assert f"score {scores[0]:.4f}" in run(*words, "--length-penalty=0", "--early-stopping=never").stdout


def test_generate_reads_a_raw_prompt_from_standard_input(server: RunningServer) -> None:
    words = (
        "generate",
        "-",
        "--raw",
        f"--target={server.target}",
        "--max-tokens=3",
        "--json",
        "--n=2",
        "--seed=1",
    )
    answer = json.loads(run(*words, stdin="def f(x):").stdout)
    assert len(answer["choices"]) == 2
    assert answer["seed"] == 1


@pytest.mark.fault("8", "25", "27")
@pytest.mark.parametrize("command", ["generate", "chat", "loadtest"])
def test_a_client_command_reaches_its_server_from_any_environment(
    command: str, server: RunningServer
) -> None:
    """No UTF-8, no home folder, a proxy that is not there."""
    taken_out = {"HOME", "XDG_CACHE_HOME", "no_proxy", "NO_PROXY"}
    environment = {name: value for name, value in os.environ.items() if name not in taken_out} | {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "http_proxy": "http://127.0.0.1:9",
    }
    words = {
        "generate": ["é 你 🙂", "--max-tokens=2", "--json"],
        "chat": ["--system=é", "--max-tokens=2"],
        "loadtest": ["--requests=2", "--prompt-tokens=8", "--output-tokens=2", "--warmup=0"],
    }[command]
    finished = subprocess.run(
        [*PROGRAM, command, f"--target={server.target}", *words],
        input="é 你 🙂\n".encode(),
        capture_output=True,
        env=environment,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.isascii()
    if command == "generate":
        assert json.loads(finished.stdout)["usage"]["num_output_tokens"] == 2


def test_chat_answers_each_line_and_remembers(server: RunningServer) -> None:
    flags = (f"--target={server.target}", "--max-tokens=4", "--temperature=0", "--system=s")
    first = run("chat", *flags, stdin="hello\n")
    assert first.returncode == 0, first.stderr
    again = run("chat", *flags, stdin="hello\n/reset\nhello\n/quit\nnot reached\n")
    assert again.stdout == first.stdout * 2
    longer = run("chat", *flags, stdin="hello\nhello\n")
    assert longer.stdout.startswith(first.stdout)
    assert longer.stdout != first.stdout * 2


def test_a_refused_turn_does_not_end_the_chat(server: RunningServer) -> None:
    flags = (f"--target={server.target}", "--max-tokens=4", "--temperature=0")
    chat = run("chat", *flags, stdin="x " * 5000 + "\nhello\n")
    assert chat.returncode == 0
    assert "prompt" in chat.stderr
    assert chat.stdout.strip()


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_answer_to_a_full_disk_ends_the_command(command: str, server: RunningServer) -> None:
    words = [command, f"--target={server.target}", "--max-tokens=4"] + ["-"] * (command == "generate")
    with Path("/dev/full").open("w") as full:
        finished = subprocess.run(
            [*PROGRAM, *words], input="hello\nhello\n", stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert finished.stderr == f"pageturner {command}: standard output: No space left on device\n"
    assert finished.returncode == 2


def test_a_refusal_names_the_field(server: RunningServer) -> None:
    refused = run("generate", "hi", f"--target={server.target}", "--temperature=-1")
    assert refused.returncode == 2
    assert "temperature" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_load_test_is_a_command(server: RunningServer) -> None:
    words = (
        "--requests=4",
        "--concurrency=2",
        "--prompt-tokens=8",
        "--output-tokens=4",
        "--warmup=0",
        "--json",
    )
    finished = run("loadtest", f"--target={server.target}", *words)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)["results"]["num_ok"] == 4


def test_a_second_server_on_the_port_says_so(server: RunningServer, flags: list[str]) -> None:
    port = server.target.rpartition(":")[2]
    second = run("serve", *flags, f"--port={port}")
    assert second.returncode == 2
    assert "server.port" in second.stderr
    assert "in use" in second.stderr
    assert '"built"' not in second.stderr, "it loaded a model first"
    assert "Traceback" not in second.stderr


def test_demo_starts_asks_and_stops(flags: list[str]) -> None:
    finished = run("demo", *flags, "--json", "--max-tokens=4")
    assert finished.returncode == 0, finished.stderr
    figures = json.loads(finished.stdout)
    assert figures["usage"]["num_output_tokens"] > 0
    assert figures["ready_seconds"] > 0
    assert "the service has stopped" in finished.stderr


def test_throughput_is_measured_in_turns(flags: list[str]) -> None:
    words = ("--concurrency=2", "--prompt-tokens=8", "--output-tokens=8", "--rounds=2", "--json")
    finished = run("bench", "throughput", *words, *flags)
    assert finished.returncode == 0, finished.stderr
    figures = json.loads(finished.stdout)
    assert len(figures["service"]) == len(figures["baseline"]) == 2
    assert figures["ratio"] == pytest.approx(
        figures["service_tokens_per_second"] / figures["baseline_tokens_per_second"]
    )


def test_preemption_changes_no_token(model: Path) -> None:
    """The issue's own proof in small: each reclaim policy on a pool far too small, beside an ample one."""
    words = ("--requests=8", "--prompt-tokens=24", "--output-tokens=40", "--tiny-blocks=12", "--json")
    flags = (f"--model={model}", "--device=cpu", "--num-threads=1", "--dtype=float32", "--deterministic=true")
    finished = run("bench", "preemption", *words, *flags, "--swap-space=8MiB")
    assert finished.returncode == 0, finished.stderr
    by_name = {result["reclaim"]: result for result in json.loads(finished.stdout)}
    assert by_name.keys() == {"always-swap", "always-recompute", "cost-model"}
    assert all(result["num_equal"] == result["num_streams"] == 8 for result in by_name.values())
    assert all(result["num_blocks_left"] == 0 for result in by_name.values())
    assert by_name["always-swap"]["num_swaps"] > 0
    assert by_name["always-recompute"]["num_recomputes"] > 0


def test_startup_is_measured(flags: list[str]) -> None:
    finished = run("bench", "startup", "--runs=1", "--json", *flags)
    assert finished.returncode == 0, finished.stderr
    figures = json.loads(finished.stdout)
    assert figures["seconds"] == [figures["median_seconds"]]


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="exit code 2") as caught, running_server([f"--model={tmp_path}"]):
        pass
    assert "model.safetensors" in str(caught.value)


def test_policies_are_set_and_shown(server: RunningServer) -> None:
    target = f"--target={server.target}"
    shown = run("policies", "show", target)
    assert shown.returncode == 0, shown.stderr
    assert "revision 1\n" in shown.stdout
    changed = run(
        "policies",
        "set",
        "victim=last-arrived",
        "reclaim=cost-model:swap_weight=2",
        "--shadow=queue=priority",
        "--revision=1",
        "--json",
        target,
    )
    assert changed.returncode == 0, changed.stderr
    info = json.loads(changed.stdout)
    assert info["revision"] == 2
    by_axis = {policy["axis"]: policy for policy in info["axes"]}
    assert by_axis["victim"]["name"] == "last-arrived"
    assert by_axis["reclaim"]["options"]["swap_weight"] == 2.0
    assert by_axis["queue"]["shadow"]["name"] == "priority"
    shown_again = json.loads(run("policies", "show", "--json", target).stdout)
    for axis in (*shown_again["axes"], *info["axes"]):
        for figure in ("num_calls", "seconds", "step_seconds"):
            axis.pop(figure)  # a step of the engine lies between the two
    assert shown_again == info
    stale = run("policies", "set", "victim=least-computed", "--revision=1", target)
    assert (stale.returncode, stale.stdout) == (2, "")
    assert "revision 2, not 1" in stale.stderr
    wrong = run("policies", "set", "reclaim=cost-model:weight=2", target)
    assert wrong.returncode == 2
    assert "policies[reclaim].options[weight]" in wrong.stderr
    back = run("policies", "set", "--preset=pageturner", "--shadow=queue=none", target)
    assert back.returncode == 0, back.stderr
    assert "shadow" not in back.stdout
    assert back.stderr == ""
    look_alike = run("policies", "set", "--preset=vllm-v1", target)
    assert "scheduler.watermark = 0.0 too, which only a restart changes (0.03)" in look_alike.stderr
    assert run("policies", "set", "--preset=pageturner", target).returncode == 0
    assert "least-computed" in back.stdout


def test_a_server_logs_where_the_time_of_its_start_went(server: RunningServer) -> None:
    parts = await_parts(server)
    assert sum(parts.values()) == pytest.approx(server.ready_seconds, rel=0.01)
    assert list(parts)[1:3] == ["imports of the server", "bind"]
    assert {"imports of the model", "weights and kernels", "warm-up and rates"} <= set(parts)
