"""A log, a ready line or a recording that cannot be written costs no request and no shutdown."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
from support.cli_servers import (
    read_until,
    serving,
    three_answers_and_a_refusal,
    tiny_flags,
)
from support.http_pages import get
from support.model_folders import save_chat_model
from support.scrapes import parse

from pageturner.service.client.server_process import PROGRAM, READY


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tiny_flags(save_chat_model(tmp_path_factory.mktemp("tiny-llama")))


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
            asyncio.run(three_answers_and_a_refusal(ready.split()[-1]))
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
            read_until(process, "ready_line_lost")
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
        asyncio.run(three_answers_and_a_refusal(target))
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
