"""The thread that owns the engine: commands in by a queue, outputs and figures out by a call."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from pageturner.service.core.clock import Clock
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.engine.engine import Engine
from pageturner.service.engine.thread_messages import Command, EngineOutput, Inspect, Shutdown, Submit

LONGEST_WAIT = 3600.0
"""Seconds; a deadline may lie further off than a lock can wait."""

MAX_RESUMED_TOKENS = 1 << 14
"""Of the requests that are taken in between two steps: the text of tokens that are known takes some
microseconds each."""


class StepThread:
    """Runs `Engine.step` whenever there is work, and sleeps on its queue when there is none.

    on_outputs: called in this thread twice a step at most, with what was put out and the figures at that
    moment: when the step is planned (requests taken, refused or timed out: their answers do not wait for the
    forward), and at its end. on_end: called once, last, with what ended the loop: None for a Shutdown, else
    the fault.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        *,
        on_outputs: Callable[[tuple[EngineOutput, ...], SchedulerStats], None],
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._on_outputs = on_outputs
        self._on_end = on_end
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        # A step that hangs must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name="pageturner-engine", daemon=True)
        self._busy_since: float | None = None
        self._last_progress = clock.now()
        self._stats = engine.stats

    @property
    def busy_since(self) -> float | None:
        """When the step under way began; None between steps."""
        return self._busy_since

    @property
    def last_progress(self) -> float:
        """When a step last ended."""
        return self._last_progress

    def start(self) -> None:
        """Start the thread. Once only."""
        self._thread.start()

    def send(self, command: Command) -> None:
        """Leave a command for the next step; wakes the thread. From any thread."""
        self._commands.put(command)

    def join(self, timeout: float) -> None:
        """Wait at most so many seconds for the thread to end."""
        self._thread.join(timeout)

    def _run(self) -> None:
        fault: BaseException | None = None
        try:
            self._engine.adopt_thread()
            while self._iterate():
                pass
        except BaseException as error:  # whatever it is, every stream must end with an error
            fault = error
        self._busy_since = None
        self._on_end(fault)
        self._engine.close()

    def _iterate(self) -> bool:
        commands = self._receive(self._engine.seconds_to_next_step())
        self._busy_since = self._clock.now()
        outputs: list[EngineOutput] = []
        for command in commands:
            if isinstance(command, Shutdown):
                self._on_outputs(tuple(outputs), self._engine.stats)
                return False
            outputs += self._engine.apply(command)
        is_look = commands and all(isinstance(command, Inspect) for command in commands)
        if is_look and self._engine.seconds_to_next_step() != 0.0:  # watched, it stays idle
            self._busy_since = None
            self._put_out(outputs)
            return True
        outputs += self._engine.begin_step()
        self._put_out(outputs)
        outputs = [*self._engine.finish_step()]
        self._busy_since, self._last_progress = None, self._clock.now()
        self._put_out(outputs)
        return True

    def _put_out(self, outputs: list[EngineOutput]) -> None:
        if outputs or self._engine.stats is not self._stats:
            self._stats = self._engine.stats
            self._on_outputs(tuple(outputs), self._stats)

    def _receive(self, wait: float | None) -> list[Command]:
        """The commands that wait; if there are none, the first to come within `wait` seconds. Those behind
        MAX_RESUMED_TOKENS are left for the next time, so that what runs takes a step in between."""
        commands: list[Command] = []
        num_resumed = 0
        try:
            if wait is None or wait > 0:
                commands.append(self._commands.get(timeout=min(wait or LONGEST_WAIT, LONGEST_WAIT)))
                num_resumed += _num_resumed_tokens(commands[0])
            while num_resumed < MAX_RESUMED_TOKENS:
                commands.append(self._commands.get_nowait())
                num_resumed += _num_resumed_tokens(commands[-1])
        except queue.Empty:
            pass
        return commands


def _num_resumed_tokens(command: Command) -> int:
    return command.request.num_resumed_tokens if isinstance(command, Submit) else 0
