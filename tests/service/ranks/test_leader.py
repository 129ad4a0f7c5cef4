"""Rank 0 and processes of ranks without a model: what is said, what fails, and who is noticed to be gone."""

from __future__ import annotations

import errno
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.patience import wait_until
from support.processes import is_running
from support.rank_programs import DIES, FAILS, HANGS, Group, program
from support.scripted import recording_logger

from pageturner.service.core.outputs import BlockCopies, ScheduledSequence, SchedulerOutput
from pageturner.service.errors import ConfigError, ModelError, PageturnerError, RankLost
from pageturner.service.ranks import leader as leader_module
from pageturner.service.ranks.leader import Leader, Patience
from pageturner.service.ranks.messages import Hello, Ready
from pageturner.service.ranks.processes import RankProcess, start_rank
from pageturner.service.ranks.ranked_steps import Ranks, StepFailedOnRank

PATIENCE = Patience(silent=60.0, loading=60.0, step=60.0, ending=20.0)
"""What a busy machine never exhausts: a test that is about one of them shortens that one."""


@contextmanager
def leading(
    *arguments: str, size: int = 2, patience: Patience = PATIENCE, name: str = "that follows"
) -> Iterator[Leader]:
    leader = Leader(size, program(name, *arguments), recording_logger()[0], time.monotonic, patience)
    try:
        yield leader
    finally:
        leader.close()
        assert not any(map(is_running, leader.process_ids))


def met(leader: Leader) -> Ranks:
    """All ranks, ready for steps."""
    leader.greet()
    leader.hear(Ready)
    return Ranks(leader, Group())


def step(token: int, step_id: int = 1) -> SchedulerOutput:
    return SchedulerOutput(step_id, (ScheduledSequence(1, "", 0, (token,), 0, 0, (0,), ()),))


def test_every_rank_carries_out_every_step_and_ends_in_order(tmp_path: Path) -> None:
    told = tmp_path / "told"
    with leading(str(told), size=3) as leader:
        ranks = met(leader)
        forward = ranks.together(lambda output: None)
        for number in range(5):
            forward(step(number, step_id=number))
        ranks.copying(lambda copies: None)(BlockCopies(clears=(3,)))
    lines = told.read_text().splitlines()
    assert sorted(lines) == sorted(f"{number} {number}" for number in range(5) for _ in range(2))


@pytest.mark.parametrize("kind", ["on another rank", "on rank 0", "on all", "in block traffic"])
def test_a_step_that_fails_on_one_rank_fails_on_all_and_the_next_is_carried_out(kind: str) -> None:
    def fails(output: object) -> None:
        if kind in ("on rank 0", "on all"):
            raise MemoryError("planted: rank 0 is full")

    with leading(size=3) as leader:
        ranks = met(leader)
        if kind == "in block traffic":
            with pytest.raises(StepFailedOnRank, match="rank 2: RuntimeError: planted: the blocks could"):
                ranks.copying(lambda copies: None)(BlockCopies(clears=(FAILS,)))
        elif kind == "on another rank":
            with pytest.raises(StepFailedOnRank, match="rank 1: RuntimeError: planted: the forward"):
                ranks.together(fails)(step(FAILS))
        else:
            with pytest.raises(MemoryError, match="rank 0 is full"):
                ranks.together(fails)(step(FAILS if kind == "on all" else 1))
        ranks.together(lambda output: None)(step(2))


def test_that_rank_0_was_left_in_a_collective_is_no_loss() -> None:
    def is_left(output: object) -> None:
        raise RankLost("rank 0 has lost another: connection closed by peer")

    with leading() as leader:
        ranks = met(leader)
        with pytest.raises(StepFailedOnRank, match="rank 1: RuntimeError: planted: the forward"):
            ranks.together(is_left)(step(FAILS))
        ranks.together(lambda output: None)(step(2))


def check_lost(leader: Leader, ranks: Ranks, why: str) -> None:
    """Told once, by name; nothing can be done any more, and no process is left."""
    losses: list[RankLost] = []
    leader.on_lost(losses.append)
    wait_until(lambda: bool(losses))
    leader.on_lost(losses.append)  # whoever asks later is told at once
    assert len(set(map(str, losses))) == 1
    assert why in str(losses[0])
    with pytest.raises(RankLost, match=str(losses[0].args[0]).replace("(", r"\(").replace(")", r"\)")):
        ranks.together(lambda output: None)(step(1))
    wait_until(lambda: not any(map(is_running, leader.process_ids)))


def test_a_killed_rank_is_noticed_with_no_step_under_way() -> None:
    with leading(size=3) as leader:
        ranks = met(leader)
        os.kill(leader.process_ids[1], signal.SIGKILL)
        check_lost(
            leader, ranks, f"rank 2 (process {leader.process_ids[1]}) is lost: it was ended by SIGKILL"
        )


def test_a_stopped_rank_is_noticed_by_its_silence() -> None:
    with leading(patience=Patience(silent=1.0, step=60.0)) as leader:
        ranks = met(leader)
        leader.expect_signs()
        os.kill(leader.process_ids[0], signal.SIGSTOP)
        check_lost(leader, ranks, "it has given no sign of life for 1 s")


@pytest.mark.parametrize(
    ("token", "patience", "why"),
    [
        (DIES, 60.0, "it ended with exit code 7"),
        (HANGS, 2.0, "has not carried out a step 2 s after"),
    ],
)
def test_a_rank_that_dies_or_hangs_in_a_step_is_lost(token: int, patience: float, why: str) -> None:
    with leading(size=3, patience=Patience(silent=60.0, step=patience)) as leader:
        ranks = met(leader)
        with pytest.raises(RankLost, match=why):
            ranks.together(lambda output: None)(step(token))
        check_lost(leader, ranks, why)


def test_a_rank_that_does_not_meet_the_others_again_is_lost() -> None:
    with leading() as leader:
        ranks = met(leader)
        ranks._generation = 98
        with pytest.raises(RankLost, match=r"rank 1 .* is lost: it ended with exit code 1"):
            ranks.renew()


@pytest.mark.parametrize(
    ("name", "error", "told"),
    [
        ("of another version", ModelError, "runs Pageturner 0.0.1, with steps in format"),
        ("of another format", ModelError, r"with steps in format 2; rank 0 has .* and format 1"),
    ],
)
def test_a_rank_of_another_version_is_refused(name: str, error: type[PageturnerError], told: str) -> None:
    with leading(name=name) as leader, pytest.raises(error, match=told):
        leader.greet()


def test_what_a_rank_refuses_is_told_with_its_key() -> None:
    with leading(name="that refuses") as leader:
        leader.greet()
        with pytest.raises(ConfigError, match=r"model\.device: rank 1: it has no GPU"):
            leader.hear(Ready)


def test_what_a_rank_refuses_explains_a_collective_that_failed() -> None:
    with leading(name="that refuses") as leader:
        leader.greet()
        cause = leader.cause_of(RankLost("rank 0 has lost another"))
        assert isinstance(cause, ConfigError)


def test_a_rank_that_speaks_nonsense_is_lost() -> None:
    with leading(name="that speaks nonsense") as leader:
        leader.greet()
        with pytest.raises(RankLost, match="it is not understood: a frame of kind 200"):
            leader.hear(Hello)


def test_a_program_that_cannot_be_started_leaves_nothing() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.tensor_parallel_size: a process of rank 1 is refused: No such"
    ):
        Leader(3, ("/no/such/program",), recording_logger()[0], time.monotonic)


def test_a_rank_that_gives_up_is_lost_with_its_reason() -> None:
    """A step that fails might succeed when it is tried again; this one can't."""
    logger, entries = recording_logger()
    leader = Leader(2, program("that gives up"), logger, time.monotonic, PATIENCE)
    with closing(leader):
        ranks = met(leader)
        leader.expect_signs()
        with pytest.raises(RankLost, match=r"rank 1 .* is lost: it can't go on: nobody met it again"):
            ranks.together(lambda output: None)(step(1))
    refused, lost = entries
    assert (refused["event"], refused["rank"], refused["detail"]) == ("rank_refused", 1, "where it was")
    assert lost["event"] == "rank_lost"


class _Refused(selectors.DefaultSelector):
    def __init__(self) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_watch_that_is_refused_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[RankProcess] = []

    def start(rank: int, program: Sequence[str]) -> RankProcess:
        started.append(start_rank(rank, program))
        return started[-1]

    monkeypatch.setattr(leader_module, "start_rank", start)
    monkeypatch.setattr(selectors, "DefaultSelector", _Refused)
    with pytest.raises(ConfigError, match="a watch over other ranks is refused: Too many open files"):
        Leader(3, program("that follows"), recording_logger()[0], time.monotonic, PATIENCE)
    assert len(started) == 2
    assert not any(is_running(each.process.pid) for each in started)


def test_a_watch_without_a_thread_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def kept(make: Callable[[], Any]) -> Callable[[], Any]:
        def one() -> Any:
            made.append(make())
            return made[-1]

        return one

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(socket, "socketpair", kept(socket.socketpair))
    monkeypatch.setattr(selectors, "DefaultSelector", kept(selectors.DefaultSelector))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ConfigError, match="a watch over other ranks is refused: can't start new thread"):
        Leader(2, program("that follows"), recording_logger()[0], time.monotonic, PATIENCE)
    *pairs, selector = made
    assert len(pairs) == 4
    assert all(end.fileno() == -1 for pair in pairs for end in pair)
    with pytest.raises(ValueError, match="closed"):
        selector.fileno()


@pytest.mark.parametrize("number", range(4))
def test_a_rank_that_cannot_be_started_keeps_no_socket(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of its sockets is refused, or its process."""
    made: list[socket.socket] = []

    def pair() -> tuple[socket.socket, socket.socket]:
        if len(made) == 2 * number:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.extend(socketpair())
        return made[-2], made[-1]

    socketpair = socket.socketpair
    monkeypatch.setattr(socket, "socketpair", pair)
    with pytest.raises(OSError, match=r"Too many open files|No such file"):
        start_rank(1, ("/no/such/program",))
    assert len(made) == 2 * number
    assert all(each.fileno() == -1 for each in made)


_PARENT = """
import sys, time
from support.processes import is_running
from support.rank_programs import program
from support.scripted import recording_logger
from pageturner.service.ranks.leader import Leader
leader = Leader(3, program("that follows"), recording_logger()[0], time.monotonic)
print(*leader.process_ids, flush=True)
time.sleep(3600)
"""


def test_no_rank_outlives_a_rank_0_that_is_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _PARENT], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        process_ids = [int(word) for word in parent.stdout.readline().split()]
        assert len(process_ids) == 2
        parent.kill()
        parent.wait()
        wait_until(lambda: not any(map(is_running, process_ids)))


def test_closing_twice_is_no_error() -> None:
    with leading() as leader:
        met(leader)
        leader.close()
