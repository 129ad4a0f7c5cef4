"""Work beside the event loop: its bounds, its order, and that its caller may leave at any time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from support.patience import PATIENCE_SECONDS

from pageturner.service.engine.work_queue import WorkQueue
from pageturner.service.errors import Draining, QueueFull


def make(num_threads: int = 1, max_waiting: int = 1000) -> WorkQueue:
    return WorkQueue("work", num_threads=num_threads, max_waiting=max_waiting)


class Work:
    """Notes which piece ran, in order; the first one holds its thread until `go` is set."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.go = threading.Event()

    def hold(self) -> None:
        assert self.go.wait(PATIENCE_SECONDS)

    def note(self, name: str) -> Callable[[], None]:
        return lambda: self.ran.append(name)


async def turn() -> None:
    """Let every task that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


def refuse_thread(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.fault("O")
async def test_small_work_does_not_wait_behind_large_work() -> None:
    queue, work = make(), Work()
    tasks = [asyncio.create_task(queue.run(100, work.hold))]
    await turn()
    for size in (300, 200, 10, 20):
        tasks.append(asyncio.create_task(queue.run(size, work.note(str(size)))))
    await turn()
    work.go.set()
    await asyncio.gather(*tasks)
    assert work.ran == ["10", "20", "200", "300"]


@pytest.mark.fault("O")
async def test_large_work_is_overtaken_by_about_its_own_size_at_most() -> None:
    queue, work = make(max_waiting=10_000), Work()
    tasks = [asyncio.create_task(queue.run(1, work.hold))]
    await turn()
    tasks.append(asyncio.create_task(queue.run(50, work.note("large"))))
    await turn()

    async def keep_coming(number: int) -> None:
        await queue.run(10, work.note("small"))
        if number:
            await keep_coming(number - 1)

    tasks += [asyncio.create_task(keep_coming(30)) for _ in range(2)]
    await turn()
    work.go.set()
    await asyncio.gather(*tasks)
    assert work.ran.index("large") <= 5


async def test_no_more_runs_at_once_than_there_are_threads() -> None:
    queue, lock, counts = make(num_threads=2, max_waiting=10_000), threading.Lock(), [0, 0]

    def count() -> None:
        with lock:
            counts[0] += 1
            counts[1] = max(counts)
        with lock:
            counts[0] -= 1

    await asyncio.gather(*(queue.run(7, count) for _ in range(50)))
    assert counts[1] <= 2


@pytest.mark.fault("O")
async def test_more_than_may_wait_is_refused_and_one_of_any_size_may() -> None:
    queue, work = make(max_waiting=100), Work()
    tasks = [asyncio.create_task(queue.run(5000, work.hold))]
    await turn()
    tasks.append(asyncio.create_task(queue.run(5000, work.note("large"))))
    await turn()
    with pytest.raises(QueueFull, match="5000 characters of prompts wait"):
        await queue.run(1, work.note("refused"))
    work.go.set()
    await asyncio.gather(*tasks)
    await queue.run(1, work.note("after"))
    assert work.ran == ["large", "after"]


@pytest.mark.fault("O")
async def test_work_whose_caller_leaves_before_its_turn_is_dropped() -> None:
    queue, work = make(max_waiting=60), Work()
    running = asyncio.create_task(queue.run(100, work.hold))
    await turn()
    waiting = asyncio.create_task(queue.run(60, work.note("dropped")))
    await turn()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    last = asyncio.create_task(queue.run(60, work.note("last")))
    await turn()
    work.go.set()
    await asyncio.gather(running, last)
    assert work.ran == ["last"]


async def test_work_whose_caller_leaves_while_it_runs_keeps_its_thread_until_its_end() -> None:
    queue, work = make(), Work()
    running = asyncio.create_task(queue.run(1, work.hold))
    await turn()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    after = asyncio.create_task(queue.run(1, work.note("after")))
    await turn()
    assert work.ran == []
    work.go.set()
    await after
    assert work.ran == ["after"]


async def test_a_caller_that_leaves_as_its_turn_comes_gives_it_back() -> None:
    queue, work = make(), Work()
    running = asyncio.create_task(queue.run(1, work.hold))
    await turn()
    leaving = asyncio.create_task(queue.run(1, work.note("dropped")))
    await turn()
    queue._free_thread("")  # its turn comes, and before it hears of that, it leaves
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await queue.run(1, work.note("after"))
    work.go.set()
    await running
    assert work.ran == ["after"]


async def test_an_error_of_the_work_is_its_callers() -> None:
    queue = make()

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await queue.run(1, fail)
    assert await queue.run(1, lambda: 7) == 7


@pytest.mark.fault("O")
async def test_work_that_gets_no_thread_of_the_system_leaves_its_place_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, work = make(), Work()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await queue.run(1, work.note("refused"))
    await asyncio.wait_for(queue.run(1, work.note("next")), PATIENCE_SECONDS)
    assert work.ran == ["next"]


async def test_a_shutdown_ends_the_wait_of_what_has_not_begun() -> None:
    queue, work = make(), Work()
    running = asyncio.create_task(queue.run(1, work.hold))
    await turn()
    waiting = asyncio.create_task(queue.run(1, work.note("never")))
    await turn()
    queue.fail_waiting(Draining("shutting down"))
    with pytest.raises(Draining):
        await waiting
    work.go.set()
    await running
    assert work.ran == []


@pytest.mark.fault("O")
def test_the_process_ends_without_waiting_for_work_that_runs() -> None:
    code = (
        "import asyncio, threading\n"
        "from pageturner.service.engine.work_queue import WorkQueue\n"
        "async def main():\n"
        "    queue, begun = WorkQueue('work', num_threads=1, max_waiting=1), threading.Event()\n"
        "    task = asyncio.create_task(queue.run(1, lambda: (begun.set(), threading.Event().wait())))\n"
        "    await asyncio.to_thread(begun.wait)\n"
        "    task.cancel()\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


async def test_an_owner_leaves_a_thread_to_others_and_strangers_take_all() -> None:
    queue, work = make(num_threads=2), Work()
    tasks = [asyncio.create_task(queue.run(100, work.hold, "alice")) for _ in range(3)]
    await turn()
    await asyncio.wait_for(queue.run(100, work.note("bob"), "bob"), PATIENCE_SECONDS)
    await asyncio.wait_for(queue.run(100, work.note("anybody")), PATIENCE_SECONDS)
    tasks.append(asyncio.create_task(queue.run(100, work.hold)))
    tasks.append(asyncio.create_task(queue.run(100, work.note("late"), "bob")))
    await turn()
    assert work.ran == ["bob", "anybody"]
    work.go.set()
    await asyncio.gather(*tasks)
    assert work.ran == ["bob", "anybody", "late"]
    assert not queue._num_running_of
    assert not queue._size_waiting_of
    assert queue._num_free == 2


async def test_an_owner_fills_four_fifths_of_what_may_wait() -> None:
    queue, work = make(num_threads=2, max_waiting=100), Work()
    tasks = [asyncio.create_task(queue.run(1, work.hold, "alice"))]
    tasks.append(asyncio.create_task(queue.run(1, work.hold)))
    await turn()
    for number in range(8):
        tasks.append(asyncio.create_task(queue.run(10, work.note(f"alice {number}"), "alice")))
    await turn()
    with pytest.raises(QueueFull):
        await queue.run(10, work.note("refused"), "alice")
    tasks.append(asyncio.create_task(queue.run(10, work.note("bob"), "bob")))
    await turn()
    tasks[2].cancel()  # what leaves makes room
    await turn()
    tasks.append(asyncio.create_task(queue.run(5, work.note("alice again"), "alice")))
    await turn()
    work.go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert "bob" in work.ran
    assert "alice again" in work.ran
    assert "refused" not in work.ran
    assert "alice 0" not in work.ran
    assert (queue._size_waiting, queue._num_free, dict(queue._num_running_of)) == (0, 2, {})
