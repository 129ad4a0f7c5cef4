"""Servers that commands of the program start, under the hand of a test."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pageturner.service.client import Client
from pageturner.service.client.server_process import PROGRAM, READY
from pageturner.service.errors import InvalidArgument


def tiny_flags(model: Path) -> list[str]:
    """Of a server of a tiny model, one thread of which is enough."""
    return [f"--model={model}", "--num-blocks=512", "--swap-space=0", "--device=cpu", "--num-threads=1"]


def run(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The program, to its end."""
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


def read_until(process: subprocess.Popen[str], word: str) -> None:
    """Its log, up to a line that has the word. Raises AssertionError where it ends before."""
    assert process.stderr is not None
    for line in process.stderr:
        if word in line:
            return
    raise AssertionError(f"the server ended without saying {word!r}")


def monitoring_port(process: subprocess.Popen[str]) -> int:
    """As the log tells it, in JSON."""
    assert process.stderr is not None
    lines = map(json.loads, iter(process.stderr.readline, ""))
    return int(next(line["port"] for line in lines if line["event"] == "monitoring"))


async def three_answers_and_a_refusal(target: str) -> None:
    """The server still serves, and still refuses."""
    async with Client(target) as client:
        for _ in range(3):
            answer = await client.generate("hello", max_tokens=2, ignore_eos=True)
            assert answer.usage.num_output_tokens == 2
        with pytest.raises(InvalidArgument):
            await client.generate("hello", temperature=-1.0)
        await client.wait_until_serving(1)
