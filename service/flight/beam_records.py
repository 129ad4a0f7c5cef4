"""What a checkpoint keeps of a beam search: how beams and answers lie to one another, and no token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecordedCandidates:
    """Candidates of the sequence at `place`, which wait for those of others. epoch: the sequence's, for which
    they hold. logprobs, stops: as those of `RowResult`."""

    place: int
    epoch: int
    logprobs: bytes
    stops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedHypothesis:
    """An answer that ended. nearest: rank of the beam with which it shares most outputs, num_shared."""

    score: float
    num_tokens: int
    nearest: int
    num_shared: int
    is_stopped: bool


@dataclass(frozen=True, slots=True)
class RecordedBeams:
    """Where a beam search stands; beams by rank.

    places: of their sequences. scores: of the first of them; the others stand in places for which a form had
    no beam, at minus infinity. forks: for each but the best the rank of the better one with which it shares
    most outputs, and how many.
    """

    places: tuple[int, ...]
    scores: tuple[float, ...]
    forks: tuple[tuple[int, int], ...] = ()
    hypotheses: tuple[RecordedHypothesis, ...] = ()
    candidates: tuple[RecordedCandidates, ...] = ()
    num_settled: int = 0
