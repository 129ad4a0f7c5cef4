"""Options that the engine owns; `service/config.py` composes them with those of the other layers."""

from __future__ import annotations

from dataclasses import dataclass

from pageturner.service.errors import ConfigError

LONGEST_SECONDS = 86400.0
"""A day: beyond some years a thread cannot be waited for at all."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Bounds of the step loop and of what it holds for its clients."""

    stream_buffer_tokens: int = 1024
    """Tokens a stream holds for a reader that lags; its request is paused when they are reached, and
    goes on when half of them are left."""
    slow_consumer_timeout_seconds: float = 30.0
    """A request whose reader lags is cancelled after so long: paused by a full buffer, or at a write
    for which its client's window has no room."""
    max_consecutive_failures: int = 64
    """After so many failed steps without one that succeeds, the engine is dead."""
    max_empty_schedules: int = 256
    """After so many schedules in a row that plan nothing though there is work, the oldest request is
    given up."""
    stall_seconds: float = 30.0
    """A step that takes longer, or requests that no step has taken up for so long, are reported, and the
    service is not ready (health STALLED) until there is progress."""
    dead_after_seconds: float | None = None
    """After so long without progress the engine is given up: its streams end with UNAVAILABLE, liveness fails
    and the process ends with an error, so that what supervises it starts it anew. Unset: it is waited for
    without end."""
    shutdown_seconds: float = 30.0
    """How long a shutdown waits for the step under way."""
    inline_prompt_characters: int = 2048
    """Longer texts are tokenized beside the event loop."""
    num_remembered_requests: int = 4096
    """Finished requests whose ids an abort still knows."""
    flight_recorder_steps: int = 4096
    """How many steps back the flight record reaches; 0 records nothing. It holds what the scheduler was
    told and decided, and no text; a file of it is written when a step or the engine fails."""

    steps_ahead: int | None = None
    """1 plans a step while the model computes the one before, 0 after it. Unset: 1 on a GPU, and 0 on a CPU,
    whose cores the model needs itself. At 1, requests with penalties or of a form take part in every other
    step, since they need every token before the next."""

    def __post_init__(self) -> None:
        for name in ("slow_consumer_timeout_seconds", "stall_seconds", "shutdown_seconds"):
            value = getattr(self, name)
            if not 0 < value <= LONGEST_SECONDS:
                raise ConfigError(f"engine.{name}", f"{value} is not in (0, {LONGEST_SECONDS:g}]")
        for name in ("stream_buffer_tokens", "max_consecutive_failures", "max_empty_schedules"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"engine.{name}", f"{value} is below 1")
        dead_after = self.dead_after_seconds
        if dead_after is not None and not self.stall_seconds < dead_after <= LONGEST_SECONDS:
            bounds = f"(stall_seconds = {self.stall_seconds:g}, {LONGEST_SECONDS:g}]"
            raise ConfigError("engine.dead_after_seconds", f"{dead_after} is not in {bounds}")
        if self.steps_ahead not in (None, 0, 1):
            raise ConfigError("engine.steps_ahead", f"{self.steps_ahead} is neither 0 nor 1")
        for name in ("inline_prompt_characters", "num_remembered_requests", "flight_recorder_steps"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"engine.{name}", f"{value} is below 0")
