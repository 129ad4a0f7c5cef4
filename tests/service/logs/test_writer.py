"""The log is written from a thread of its own: what becomes of it delays and fails nothing."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pageturner.service.logs.writer import LogStream, LogWriter, keep_from_blocking, write_descriptor

WAIT_SECONDS = 30.0


class Sink:
    """What the writer writes to. error: raised instead, once `room` bytes are taken. May be held still."""

    def __init__(self) -> None:
        self.data = b""
        self.room: int | None = None
        self.failed = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.may_write = threading.Event()
        self.may_write.set()

    def write(self, data: bytes) -> int:
        self.entered.release()
        assert self.may_write.wait(WAIT_SECONDS)
        if self.room == 0:
            self.failed.release()
            raise OSError(errno.ENOSPC, "no space")
        taken = data[: self.room]
        if self.room is not None:
            self.room -= len(taken)
        self.data += taken
        return len(taken)


def lost_line(count: int) -> bytes:
    return f"{count} lost\n".encode()


@contextmanager
def writing(sink: Sink, max_queued_bytes: int = 1 << 20) -> Iterator[LogWriter]:
    writer = LogWriter(sink.write, lost_line, max_queued_bytes)
    try:
        yield writer
    finally:
        sink.may_write.set()
        writer.close(WAIT_SECONDS)


def wait_for_write(sink: Sink) -> None:
    assert sink.entered.acquire(timeout=WAIT_SECONDS)


def test_lines_are_written_in_order() -> None:
    sink = Sink()
    with writing(sink) as writer:
        for number in range(100):
            writer.put(f"{number}\n".encode())
    assert sink.data.decode().split() == [str(number) for number in range(100)]


@pytest.mark.fault("N")
def test_lines_beyond_the_queue_are_dropped_and_counted_while_nothing_is_read() -> None:
    sink = Sink()
    sink.may_write.clear()
    with writing(sink, max_queued_bytes=10) as writer:
        writer.put(b"1234\n")
        wait_for_write(sink)  # the writer is stuck with the first line, which counts until it is written
        writer.put(b"5678\n")
        for _ in range(7):
            writer.put(b"more\n")
    assert sink.data == b"1234\n7 lost\n5678\n"


@pytest.mark.fault("10", "N")
def test_lines_that_a_full_disk_refuses_are_counted_once_there_is_room() -> None:
    sink = Sink()
    sink.room = 0
    with writing(sink) as writer:
        for number in range(3):
            writer.put(f"{number}\n".encode())
            assert sink.failed.acquire(timeout=WAIT_SECONDS)
        sink.room = None
        writer.put(b"after\n")
        writer.put(b"told once\n")
    assert sink.data == b"3 lost\nafter\ntold once\n"
    assert writer.num_lost == 3, "since the start, for whoever counts"


@pytest.mark.fault("10")
def test_a_line_cut_by_a_full_disk_is_ended_before_the_next() -> None:
    sink = Sink()
    sink.room = 3
    with writing(sink) as writer:
        writer.put(b"first\n")
        assert sink.failed.acquire(timeout=WAIT_SECONDS)
        sink.room = None
        writer.put(b"second\n")
    assert sink.data == b"fir\n1 lost\nsecond\n"


@pytest.mark.fault("N")
def test_closing_gives_up_on_a_log_that_takes_nothing() -> None:
    sink = Sink()
    sink.may_write.clear()
    with writing(sink) as writer:
        writer.put(b"stuck\n")
        wait_for_write(sink)
        writer.close(timeout=0.0)
        writer.put(b"late\n")
        assert sink.data == b""


def test_closing_writes_what_is_queued() -> None:
    sink = Sink()
    sink.may_write.clear()
    writer = LogWriter(sink.write, lost_line)
    for _ in range(5):
        writer.put(b"x\n")
    sink.may_write.set()
    writer.close(WAIT_SECONDS)
    assert sink.data == b"x\n" * 5


def test_a_stream_queues_whole_lines() -> None:
    sink = Sink()
    stream = LogStream(LogWriter(sink.write, lost_line), "ascii", is_terminal=True)
    assert stream.isatty()
    with pytest.raises(io.UnsupportedOperation):
        stream.fileno()
    for text in ("on", "e\ntw", "o é\n", "three"):
        stream.write(text)
    print("!", file=stream, flush=True)
    stream.finish(WAIT_SECONDS)
    assert sink.data == b"one\ntwo \\xe9\nthree!\n"


def fill(descriptor: int) -> None:
    """Write until the pipe refuses, or for ever."""
    while True:
        os.write(descriptor, b"x" * 4096)


@pytest.mark.fault("N")
def test_what_writes_past_the_stream_does_not_wait_for_a_full_pipe() -> None:
    reader, writer = os.pipe()
    try:
        other = os.dup(writer)  # another process's, which may wait
        keep_from_blocking(writer)
        with pytest.raises(BlockingIOError):
            fill(writer)
        assert os.get_blocking(other)
        os.close(other)
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.fault("N")
def test_the_writer_waits_for_room_in_a_pipe_that_does_not_block() -> None:
    reader, descriptor = os.pipe()
    try:
        keep_from_blocking(descriptor)
        writer = LogWriter(write_descriptor(descriptor), lost_line)
        line = b"x" * 65536 + b"\n"
        for _ in range(3):
            writer.put(line)
        received = b""
        while len(received) < 3 * len(line):
            received += os.read(reader, 1 << 16)
        writer.close(WAIT_SECONDS)
        assert received == line * 3
    finally:
        os.close(reader)
        os.close(descriptor)
