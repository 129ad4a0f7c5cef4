"""Commands that start a server or talk to one: real processes, a tiny model, every signal."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import grpc
import pytest
from support.http_pages import get
from support.model_folders import save_chat_model
from support.scrapes import parse

from pageturner.service.bench.startup import await_parts
from pageturner.service.client import Client, FinishedEvent, TokenEvent
from pageturner.service.client.server_process import PROGRAM, READY, RunningServer, running_server
from pageturner.service.errors import InvalidArgument, ModelError
from pageturner.v1 import generation_pb2, generation_pb2_grpc


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with a tokenizer of its own and a chat template."""
    return save_chat_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def flags(model: Path) -> list[str]:
    return [f"--model={model}", "--num-blocks=512", "--swap-space=0", "--device=cpu", "--num-threads=1"]


@pytest.fixture(scope="module")
def server(flags: list[str]) -> Iterator[RunningServer]:
    with running_server(flags) as running:
        yield running


def run(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *words], input=stdin, capture_output=True, text=True)


@contextmanager
def serving(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process under the test's own hand, and its address."""
    command = [*PROGRAM, "serve", "--port=0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert ready.startswith(READY)
            yield process, ready.split()[-1]
        finally:
            process.kill()


def _monitoring_port(process: subprocess.Popen[str]) -> int:
    """As the log tells it, in JSON."""
    assert process.stderr is not None
    lines = map(json.loads, iter(process.stderr.readline, ""))
    return int(next(line["port"] for line in lines if line["event"] == "monitoring"))


def test_a_server_is_monitored_over_http_from_the_start(flags: list[str]) -> None:
    with serving(*flags, "--metrics-port=0", "--log-format=json") as (process, target):
        port = _monitoring_port(process)
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


@pytest.mark.fault("9")
def test_a_server_started_with_sigint_ignored_goes_on_until_sigterm(flags: list[str]) -> None:
    """As a shell starts its background jobs."""
    line = f"trap '' INT; exec {shlex.join([*PROGRAM, 'serve', '--port=0', *flags])}"
    with subprocess.Popen(["sh", "-c", line], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            target = process.stdout.readline().split()[-1]
            process.send_signal(signal.SIGINT)
            asyncio.run(_three_answers_and_a_refusal(target))
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


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


def test_sigterm_lets_streams_finish(flags: list[str]) -> None:
    async def stream(process: subprocess.Popen[str], target: str) -> int:
        """Ask for 300 tokens, send the signal after the first."""
        num_tokens = 0
        async with Client(target) as client:
            async for item in client.stream("hello", max_tokens=300, ignore_eos=True):
                if isinstance(item, TokenEvent):
                    if num_tokens == 0:
                        process.send_signal(signal.SIGTERM)
                    num_tokens += len(item.tokens)
        return num_tokens

    with serving(*flags) as (process, target):
        assert asyncio.run(stream(process, target)) == 300
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert "draining" in process.stderr.read()


def test_a_drained_server_stays_and_says_so_until_it_is_told_to_end(flags: list[str]) -> None:
    async def drain(port: int, target: str) -> tuple[str, str]:
        request = generation_pb2.GenerateStreamRequest(prompt=generation_pb2.Prompt(text="hello"))
        request.sampling.max_tokens, request.sampling.ignore_eos = 4000, True
        async with grpc.aio.insecure_channel(target) as channel:
            stream = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(request)
            messages = aiter(stream)
            await anext(messages)
            words = ("drain", f"--target={target}", "--grace-seconds=0", "--json")
            command = await asyncio.to_thread(run, *words)
            with pytest.raises(grpc.aio.AioRpcError, match="shutting down; this request"):
                _ = [message async for message in messages]
            assert await stream.code() is grpc.StatusCode.UNAVAILABLE
        return command.stdout, (await get(port, "/readyz")).body

    more = ("--max-model-len=4096", "--metrics-port=0", "--log-format=json")
    with serving(*flags, *more) as (process, target):
        told, ready = asyncio.run(drain(_monitoring_port(process), target))
        assert json.loads(told) == {"num_finished": 0, "num_aborted": 1}
        assert ready == "draining: the server is shutting down and takes no new requests\n"
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


HANGS = """
import time
from dataclasses import dataclass
from typing import ClassVar

from pageturner.policies.interfaces import KeyChange

@dataclass(frozen=True)
class Hangs:
    key_change: ClassVar = KeyChange.NEVER

    def key(self, request, load):
        time.sleep(3600)
"""


def test_an_engine_that_hangs_for_too_long_ends_its_process_and_its_streams(
    flags: list[str], tmp_path: Path
) -> None:
    """Liveness: what supervises the process starts it anew, and clients go elsewhere meanwhile."""
    (tmp_path / "hangs.py").write_text(HANGS)
    config = tmp_path / "config.toml"
    config.write_text(
        '[policies]\nqueue = "hangs:Hangs"\n[engine]\nstall_seconds = 0.2\ndead_after_seconds = 0.5\n'
    )

    async def ask(target: str) -> grpc.aio.AioRpcError:
        """Without the client's own tries at a server that may come back."""
        request = generation_pb2.GenerateRequest(prompt=generation_pb2.Prompt(text="hello"))
        async with grpc.aio.insecure_channel(target) as channel:
            try:
                await generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)
            except grpc.aio.AioRpcError as error:
                return error
        raise AssertionError("it was answered")

    with serving(*flags, f"--config={config}", "--log-format=json") as (process, target):
        error = asyncio.run(ask(target))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "the engine stopped after a fault" in str(error.details())
        assert process.wait(30) == 2
        assert process.stderr is not None
        told = process.stderr.read()
    stalled = [json.loads(line) for line in told.splitlines() if '"engine_stalled"' in line]
    assert [line["policy"].endswith("Hangs has not answered") for line in stalled] == [True]
    assert '"engine_dead"' in told


def test_the_second_signal_exits_at_once(flags: list[str]) -> None:
    async def interrupt_twice(process: subprocess.Popen[str], target: str) -> int:
        async with Client(target) as client:
            items = client.stream("hello", max_tokens=4000, ignore_eos=True)
            await anext(items)
            process.send_signal(signal.SIGINT)
            await asyncio.to_thread(_read_until, process, "once more")
            process.send_signal(signal.SIGINT)
            code = await asyncio.to_thread(process.wait, 30)
            await items.aclose()
            return code

    with serving(*flags, "--max-model-len=4096") as (process, target):
        assert asyncio.run(interrupt_twice(process, target)) == 128 + signal.SIGINT


@contextmanager
def unread_pipe() -> Iterator[int]:
    """A pipe that is full and that is not read."""
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 512)
        os.set_blocking(writer, True)
        yield writer
    finally:
        os.close(reader)
        os.close(writer)


@contextmanager
def pipe_without_reader() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        yield writer
    finally:
        os.close(writer)


@contextmanager
def full_disk() -> Iterator[int]:
    with open("/dev/full", "wb") as full:
        yield full.fileno()


def close_stderr() -> None:
    os.close(2)


async def _three_answers_and_a_refusal(target: str) -> None:
    async with Client(target) as client:
        for _ in range(3):
            answer = await client.generate("hello", max_tokens=2, ignore_eos=True)
            assert answer.usage.num_output_tokens == 2
        with pytest.raises(InvalidArgument):
            await client.generate("hello", temperature=-1.0)
        await client.wait_until_serving(1)


@pytest.mark.fault("10", "N")
@pytest.mark.parametrize("log", [unread_pipe, pipe_without_reader, full_disk, None])
def test_a_log_that_cannot_be_written_fails_no_request_and_no_shutdown(
    log: Callable[[], AbstractContextManager[int]] | None, flags: list[str]
) -> None:
    """None: standard error is closed when the server starts."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]  # what the log would tell
    command = [*PROGRAM, "serve", "--port=0", f"--metrics-port={port}", *flags, "--log-level=debug"]
    with (
        nullcontext(subprocess.DEVNULL) if log is None else log() as stderr,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            preexec_fn=close_stderr if log is None else None,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert ready.startswith(READY)
            asyncio.run(_three_answers_and_a_refusal(ready.split()[-1]))
            lost = parse(asyncio.run(get(port, "/metrics"))).value("pageturner:log_lines_lost_total")
            assert (lost > 0) == (log in (pipe_without_reader, full_disk)), "unread lines still wait"
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


@pytest.mark.fault("10")
@pytest.mark.parametrize("output", [pipe_without_reader, full_disk])
def test_a_ready_line_that_cannot_be_written_is_only_logged(
    output: Callable[[], AbstractContextManager[int]], flags: list[str]
) -> None:
    command = [*PROGRAM, "serve", "--port=0", *flags]
    with (
        output() as stdout,
        subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True) as process,
    ):
        try:
            _read_until(process, "ready_line_lost")
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


@pytest.mark.fault("N")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_recording_to_a_full_disk_fails_neither_the_start_nor_a_request_nor_the_end(
    flags: list[str],
) -> None:
    with serving(*flags, "--record=/dev/full") as (process, target):
        asyncio.run(_three_answers_and_a_refusal(target))
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert log.count("recording_ended") == log.count("recording_incomplete") == 1
    assert "Traceback" not in log


@pytest.mark.fault("N")
def test_a_server_that_cannot_start_ends_though_its_log_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with unread_pipe() as stderr:
        finished = subprocess.run(
            [*PROGRAM, "serve", "--port=0", f"--model={tmp_path}"], stderr=stderr, timeout=120
        )
    assert finished.returncode == 2


def _read_until(process: subprocess.Popen[str], word: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if word in line:
            return
    raise AssertionError(f"the server ended without saying {word!r}")


def test_a_command_that_is_ended_takes_its_server_along(flags: list[str]) -> None:
    command = [*PROGRAM, "chat", *flags, "--max-tokens=2"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write("hello\n")
        chat.stdin.flush()
        assert chat.stdout.read(1)  # the server is up and answers
        (server,) = Path(f"/proc/{chat.pid}/task/{chat.pid}/children").read_text().split()
        # A signal that comes just before a blocking read is seen after it: who gets no answer asks again.
        for _ in range(3):
            chat.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                chat.wait(20)
                break
        assert chat.returncode == 128 + signal.SIGTERM
        assert not Path(f"/proc/{server}").exists()


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


def test_sighup_and_a_changed_file_swap_the_policies_and_keep_the_streams(
    flags: list[str], tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text("")

    async def stream(process: subprocess.Popen[str], target: str) -> tuple[int, FinishedEvent]:
        """Ask for more tokens than the server holds for a client that does not read; after the first,
        other policies."""
        num_tokens = 0
        finished: FinishedEvent | None = None
        async with Client(target) as client:
            async for item in client.stream("hello", max_tokens=1500, ignore_eos=True):
                if isinstance(item, TokenEvent):
                    if num_tokens == 0:
                        config.write_text('[policies]\nvictim = "nobody"\n')
                        process.send_signal(signal.SIGHUP)
                        await asyncio.to_thread(_read_until, process, "reload_refused")
                        config.write_text('[policies]\nvictim = "last-arrived"\n')
                        process.send_signal(signal.SIGHUP)
                        await asyncio.to_thread(_read_until, process, "last-arrived(")
                    num_tokens += len(item.tokens)
                if isinstance(item, FinishedEvent):
                    finished = item
            config.write_text('[policies]\nqueue = "priority"\n')
            await asyncio.to_thread(_read_until, process, "priority(")
            in_force = {policy.axis: policy.name for policy in (await client.policies()).axes}
            assert (in_force["queue"], in_force["victim"]) == ("priority", "least-computed")
        assert finished is not None
        return num_tokens, finished

    with serving(*flags, f"--config={config}") as (process, target):
        num_tokens, finished = asyncio.run(stream(process, target))
    assert num_tokens == 1500
    assert finished.policies_changed
    assert finished.policies["victim"] == "last-arrived"


def test_a_server_logs_where_the_time_of_its_start_went(server: RunningServer) -> None:
    parts = await_parts(server)
    assert sum(parts.values()) == pytest.approx(server.ready_seconds, rel=0.01)
    assert list(parts)[1:3] == ["imports of the server", "bind"]
    assert {"imports of the model", "weights and kernels", "warm-up and rates"} <= set(parts)
