"""A process of a measurement that takes lines and answers with lines of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pageturner.service.client.server_process import stop
from pageturner.service.errors import ModelError


class ChildProcess:
    """A process that is asked by lines and answers with lines of JSON."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def write(self, line: str) -> None:
        """Ask for something."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def write_json(self, document: object) -> None:
        """Ask for something by a line of JSON."""
        self.write(json.dumps(document))

    def read(self) -> Any:
        """The next answer. Raises ModelError where the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ModelError(f"a process of the measurement ended (exit code {self._process.wait()})")
        return json.loads(line)

    def ask(self, line: str) -> Any:
        """Both, one after the other."""
        self.write(line)
        return self.read()


@contextmanager
def child_process(module: str, *words: str) -> Iterator[ChildProcess]:
    """Run a module of ours; on leaving its standard input ends, and it is stopped."""
    process = subprocess.Popen(  # noqa: S603  # our own program
        [sys.executable, "-P", "-m", module, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # a log, at several lines a request
        text=True,
    )
    try:
        yield ChildProcess(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        stop(process)
