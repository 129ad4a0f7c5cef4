"""What ends a server, and what ends with it: signals, drains, an engine that hangs."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from support.cli_servers import (
    monitoring_port,
    read_until,
    run,
    serving,
    three_answers_and_a_refusal,
    tiny_flags,
)
from support.http_pages import get
from support.model_folders import save_chat_model

from pageturner.service.client import Client, FinishedEvent, TokenEvent
from pageturner.service.client.server_process import PROGRAM
from pageturner.v1 import generation_pb2, generation_pb2_grpc


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tiny_flags(save_chat_model(tmp_path_factory.mktemp("tiny-llama")))


@pytest.mark.fault("9")
def test_a_server_started_with_sigint_ignored_goes_on_until_sigterm(flags: list[str]) -> None:
    """As a shell starts its background jobs."""
    line = f"trap '' INT; exec {shlex.join([*PROGRAM, 'serve', '--port=0', *flags])}"
    with subprocess.Popen(["sh", "-c", line], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            target = process.stdout.readline().split()[-1]
            process.send_signal(signal.SIGINT)
            asyncio.run(three_answers_and_a_refusal(target))
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


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
        told, ready = asyncio.run(drain(monitoring_port(process), target))
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
            await asyncio.to_thread(read_until, process, "once more")
            process.send_signal(signal.SIGINT)
            code = await asyncio.to_thread(process.wait, 30)
            await items.aclose()
            return code

    with serving(*flags, "--max-model-len=4096") as (process, target):
        assert asyncio.run(interrupt_twice(process, target)) == 128 + signal.SIGINT


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
                        await asyncio.to_thread(read_until, process, "reload_refused")
                        config.write_text('[policies]\nvictim = "last-arrived"\n')
                        process.send_signal(signal.SIGHUP)
                        await asyncio.to_thread(read_until, process, "last-arrived(")
                    num_tokens += len(item.tokens)
                if isinstance(item, FinishedEvent):
                    finished = item
            config.write_text('[policies]\nqueue = "priority"\n')
            await asyncio.to_thread(read_until, process, "priority(")
            in_force = {policy.axis: policy.name for policy in (await client.policies()).axes}
            assert (in_force["queue"], in_force["victim"]) == ("priority", "least-computed")
        assert finished is not None
        return num_tokens, finished

    with serving(*flags, f"--config={config}") as (process, target):
        num_tokens, finished = asyncio.run(stream(process, target))
    assert num_tokens == 1500
    assert finished.policies_changed
    assert finished.policies["victim"] == "last-arrived"
