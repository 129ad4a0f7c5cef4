"""Planted bugs of the coarse replica, each a plausible mistake, for the comparison with the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pageturner.service.simulator.chunks import ChunkCache
from pageturner.service.simulator.coarse import CoarseReplica
from pageturner.service.simulator.stretches import StretchTime


@dataclass(frozen=True, slots=True)
class CoarseBug:
    """owner.method is replaced by `mistake(original)`."""

    name: str
    owner: type[Any]
    method: str
    mistake: Callable[[Any], Any]


def _context_does_not_grow(original: Any) -> Any:
    def seconds(self: StretchTime, steps: int, count: int, context: int) -> float:
        return steps * float(original(self, 1, count, context))

    return seconds


def _arrivals_wait_for_the_stretch(original: Any) -> Any:
    def cut(self: CoarseReplica, now: float) -> None:
        return None

    return cut


def _cuts_a_step_late(original: Any) -> Any:
    def steps_until(self: StretchTime, seconds: float, count: int, context: int) -> int:
        return int(original(self, seconds, count, context)) + 1

    return steps_until


def _first_tokens_are_free(original: Any) -> Any:
    def seconds(self: CoarseReplica) -> float:
        return float(original(self)) - self._model.a_sample * len(self._chunks)

    return seconds


def _whole_prompts_are_found(original: Any) -> Any:
    def hits(self: ChunkCache, digests: Sequence[int]) -> int:
        return len(digests) if original(self, digests) else 0

    return hits


def _answers_are_not_cached(original: Any) -> Any:
    def add(self: ChunkCache, digests: Sequence[int]) -> None:
        return None

    return add


def _slots_do_not_bind(original: Any) -> Any:
    def fits(self: CoarseReplica, job: Any) -> bool:
        return True

    return fits


BUGS = (
    CoarseBug("contexts do not grow", StretchTime, "seconds", _context_does_not_grow),
    CoarseBug("arrivals wait for the stretch", CoarseReplica, "_cut", _arrivals_wait_for_the_stretch),
    CoarseBug("a stretch is cut a step late", StretchTime, "steps_until", _cuts_a_step_late),
    CoarseBug("first tokens are free", CoarseReplica, "_mixed_seconds", _first_tokens_are_free),
    CoarseBug("whole prompts are found", ChunkCache, "num_hits", _whole_prompts_are_found),
    CoarseBug("answers are not cached", ChunkCache, "add", _answers_are_not_cached),
    CoarseBug("slots do not bind", CoarseReplica, "_fits", _slots_do_not_bind),
)
