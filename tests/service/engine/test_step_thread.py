"""How much comes in between two steps."""

from __future__ import annotations

from typing import Any, cast

from pageturner.service.core.clock import ManualClock
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.engine.api import ResumedChoice
from pageturner.service.engine.engine import Engine
from pageturner.service.engine.step_thread import MAX_RESUMED_TOKENS, StepThread
from pageturner.service.engine.thread_messages import Abort, Command, Submit
from pageturner.service.errors import RequestAborted


class _Idle:
    stats = SchedulerStats()


def _submit(name: str, num_resumed: int) -> Submit:
    resumed = (ResumedChoice((7,) * num_resumed),) if num_resumed else ()
    new = NewRequest(name, (5,), SamplingParams(), seed=1, arrival_time=0.0, resumed=resumed)
    return Submit(new)


def test_long_resumed_answers_are_taken_in_step_by_step() -> None:
    ignored: Any = lambda *_: None  # noqa: E731 # a callback that nobody hears
    thread = StepThread(cast(Engine, _Idle()), ManualClock(0.0), on_outputs=ignored, on_end=ignored)
    half = MAX_RESUMED_TOKENS // 2
    commands: list[Command] = [_submit(str(number), half) for number in range(4)]
    commands[1:1] = [_submit("new", 0)]
    late = Abort("0", RequestAborted("late"))
    for command in (*commands, late):
        thread.send(command)
    assert thread._receive(1.0) == commands[:3]
    assert thread._receive(0.0) == commands[3:5]
    assert thread._receive(1.0) == [late]
    assert thread._receive(0.0) == []
