"""A `pageturner serve` as a child process: on a free port, ready on entry, stopped on leaving."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO

from pageturner.service.errors import ModelError

READY = "serving "
"""How the one line begins that `serve` prints on standard output, once its health is SERVING."""

_STOP_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class RunningServer:
    """target: host:port. pid: of the process. ready_seconds: from its start to SERVING. log: what it has
    written on standard error."""

    target: str
    pid: int
    ready_seconds: float
    log: Callable[[], str] = str


PROGRAM = (
    sys.executable,
    "-P",
    "-c",
    "import sys; from pageturner.service.cli import main; sys.exit(main())",
)
"""`pageturner` of this environment. -P: the folder one stands in may hold a package named `kernels`."""

_OBEY_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_DFL); "
"""What this process was started to ignore, its server must not: SIGTERM is how it is stopped."""


def ready_line(model: str, target: str) -> str:
    return f"{READY}{model} on {target}"


@contextmanager
def running_server(arguments: Sequence[str] = ()) -> Iterator[RunningServer]:
    """Start `pageturner serve ARGUMENTS --port 0`; on leaving, SIGTERM and wait for its drain.

    Its log goes to a temporary file; a server that ends before it is ready is a ModelError with the
    end of that log.
    """
    program = (*PROGRAM[:-1], _OBEY_SIGTERM + PROGRAM[-1])
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="backslashreplace") as log:
        started = time.monotonic()
        process = subprocess.Popen(  # noqa: S603  # the program of this very environment
            [*program, "serve", *arguments, "--port=0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            encoding="utf-8",
            errors="backslashreplace",
            # A Ctrl-C in the terminal is for the parent, which then stops the child itself.
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(READY):
                    ready_seconds = time.monotonic() - started
                    target = line.rstrip().rpartition(" on ")[2]
                    break
            else:
                process.wait()
                end = "\n".join(_text(log).splitlines()[-20:])
                raise ModelError(f"the server did not start (exit code {process.returncode})\n{end}")
            yield RunningServer(target, process.pid, ready_seconds, partial(_text, log))
        finally:
            stop(process)


def _text(log: IO[str]) -> str:
    """All of it. Read by its descriptor: the place where the server writes next stays where it is."""
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), size, 0).decode(errors="backslashreplace")


def stop(process: subprocess.Popen[str]) -> None:
    """SIGTERM, time to drain, then SIGKILL."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
