"""What files leave behind is found, by name, whatever it is; what they put back is not."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from support.leftovers import Leftovers


@contextmanager
def process() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        yield
        started.communicate()


@contextmanager
def dead_process() -> Iterator[None]:
    process_id = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOWAIT)
    yield
    os.waitpid(process_id, 0)


@contextmanager
def thread() -> Iterator[None]:
    may_end = threading.Event()
    started = threading.Thread(target=may_end.wait, name="pageturner-planted", daemon=True)
    started.start()
    yield
    may_end.set()
    started.join()


@contextmanager
def memory() -> Iterator[None]:
    with tempfile.NamedTemporaryFile(prefix="pageturner-", dir="/dev/shm") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            yield


@pytest.mark.parametrize(
    ("planted", "told"),
    [
        (process, "process "),
        (dead_process, "ended, and not waited for"),
        (thread, "thread pageturner-planted"),
        (memory, "shared memory /dev/shm/pageturner-"),
    ],
)
def test_what_is_left_is_found_until_it_is_put_back(
    planted: Callable[[], AbstractContextManager[None]], told: str
) -> None:
    leftovers = Leftovers(seconds=0.0)
    with planted():
        leftovers.note("test_planted")
        (found,) = leftovers.found()
        assert told in found
        assert found.endswith("test_planted") or planted is memory, "which no test is charged with"
    assert leftovers.found() == []


def test_what_is_about_to_end_is_waited_for() -> None:
    may_end = threading.Event()
    ending = threading.Thread(target=may_end.wait, name="pageturner-planted", daemon=True)
    leftovers = Leftovers(sleep=lambda seconds: may_end.set())
    ending.start()
    assert leftovers.found() == []
    ending.join()


def test_what_a_command_changes_of_its_process_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGETURNER_CHANGED", "before")
    monkeypatch.setenv("PAGETURNER_REMOVED", "before")
    leftovers, environment, handler = Leftovers(), dict(os.environ), signal.getsignal(signal.SIGUSR1)
    os.environ.update({"PAGETURNER_CHANGED": "after", "PAGETURNER_ADDED": "after"})
    del os.environ["PAGETURNER_REMOVED"]
    signal.signal(signal.SIGUSR1, lambda *_: None)
    leftovers.put_back()
    assert dict(os.environ) == environment
    assert signal.getsignal(signal.SIGUSR1) == handler


LEAVING = """
import threading

def test_leaves():
    threading.Thread(target=threading.Event().wait, name="pageturner-left", daemon=True).start()

def test_behind():
    pass
"""


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_a_file_that_leaves_something_has_an_error(tmp_path: Path, is_looked_at: bool) -> None:
    (tmp_path / "test_leaving.py").write_text(LEAVING)
    command = "from support import leftovers; leftovers.SECONDS_TO_END = 0; import sys, pytest;"
    command += "guard = [leftovers.LeftoversGuard()] if sys.argv[2:] else [];"
    command += "sys.exit(pytest.main([sys.argv[1], '-q', '-p', 'no:cacheprovider'], guard))"
    arguments = [sys.executable, "-c", command, str(tmp_path), *["look"] * is_looked_at]
    tests = str(Path(__file__).parent)
    ended = subprocess.run(
        arguments, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": tests}
    )
    assert ended.returncode == is_looked_at, ended.stdout + ended.stderr
    told = "first seen behind test_leaving.py::test_leaves" in ended.stdout
    assert told is is_looked_at
