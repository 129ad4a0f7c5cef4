"""Notices that the engine makes no progress: a step that does not end, or work that no step takes up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """The engine thread as the event loop sees it, times on the engine's clock.

    busy_since: when the step under way began; None between steps. last_progress: when a step last ended.
    has_work: some request waits for nothing but the engine (its reader does not lag).
    """

    busy_since: float | None
    last_progress: float
    has_work: bool


class Watchdog:
    """Told of the engine's progress now and then, says for how long there was none.

    Work may wait without a step for a good reason: it has just come. So time without a step counts from when
    work was first seen beside the same last step.
    """

    def __init__(self, now: float) -> None:
        self._work_since = now
        self._had_work = False

    def note(self, progress: Progress, now: float) -> float:
        """Seconds without progress; 0 where there is nothing to be done."""
        if progress.has_work and not self._had_work:
            self._work_since = now
        self._had_work = progress.has_work
        if progress.busy_since is not None:
            return max(0.0, now - progress.busy_since)
        if not progress.has_work:
            return 0.0
        return max(0.0, now - max(progress.last_progress, self._work_since))


def stall_reason(progress: Progress, seconds: float, policy: str = "") -> str:
    """Why nothing goes forward, in a sentence. policy: the one that has not answered, if one was asked."""
    if policy:
        return f"the step under way has taken {seconds:.0f} s: {policy} has not answered"
    if progress.busy_since is not None:
        return f"the step under way has taken {seconds:.0f} s"
    return f"no step has begun for {seconds:.0f} s, though requests wait for one"
