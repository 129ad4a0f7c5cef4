"""The lock of the interpreter changes hands sooner than Python has it by default."""

from __future__ import annotations

from pageturner.service.startup.interpreter import share_interpreter


def test_a_waiting_thread_gets_the_interpreter_within_a_millisecond() -> None:
    told: list[float] = []
    share_interpreter(told.append)
    assert told == [0.001]
