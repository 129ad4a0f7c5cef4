"""Options that the engine owns; `service/config.py` composes them with those of the other layers."""

from __future__ import annotations

from dataclasses import dataclass

from pageturner.service.errors import ConfigError

LONGEST_SECONDS = 86400.0
"""A day: beyond some years a thread cannot be waited for at all."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Bounds of the step loop and of what it holds for its clients.

    stream_buffer_tokens: tokens a stream holds for a reader that lags; its request is paused when they
    are reached, and goes on when half of them are left.
    slow_consumer_timeout_seconds: a request whose reader lags is cancelled after so long: paused by a full
    buffer, or at a write for which its client's window has no room.
    max_consecutive_failures: after so many failed steps without one that succeeds, the engine is dead.
    max_empty_schedules: after so many schedules in a row that plan nothing though there is work, the
    oldest request is given up.
    stall_seconds: a step that takes longer is reported, and health is STALLED until it returns.
    shutdown_seconds: how long a shutdown waits for the step under way.
    inline_prompt_characters: longer texts are tokenized beside the event loop.
    num_remembered_requests: finished requests whose ids an abort still knows.
    flight_recorder_steps: how many steps back the flight record reaches; 0 records nothing. It holds what
    the scheduler was told and decided, and no text; a file of it is written when a step or the engine fails.
    """

    stream_buffer_tokens: int = 1024
    slow_consumer_timeout_seconds: float = 30.0
    max_consecutive_failures: int = 64
    max_empty_schedules: int = 256
    stall_seconds: float = 30.0
    shutdown_seconds: float = 30.0
    inline_prompt_characters: int = 2048
    num_remembered_requests: int = 4096
    flight_recorder_steps: int = 4096

    def __post_init__(self) -> None:
        for name in ("slow_consumer_timeout_seconds", "stall_seconds", "shutdown_seconds"):
            value = getattr(self, name)
            if not 0 < value <= LONGEST_SECONDS:
                raise ConfigError(f"engine.{name}", f"{value} is not in (0, {LONGEST_SECONDS:g}]")
        for name in ("stream_buffer_tokens", "max_consecutive_failures", "max_empty_schedules"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"engine.{name}", f"{value} is below 1")
        for name in ("inline_prompt_characters", "num_remembered_requests", "flight_recorder_steps"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"engine.{name}", f"{value} is below 0")
