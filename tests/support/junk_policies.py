"""Policies that answer nonsense, each in every way its axis allows; the core must survive them all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pageturner.policies.interfaces import Admission, BatchSplit, KeyChange, PolicySet, Reclaim
from pageturner.policies.views import (
    AdmissionView,
    BatchView,
    BlockView,
    LoadView,
    Rates,
    RequestView,
    VictimView,
)


@dataclass(frozen=True)
class _Junk:
    """rng: the only unseeded thing about junk would be its source, so it is given."""

    rng: random.Random = field(compare=False)

    def _any_of(self, *answers: Any) -> Any:
        answer = self.rng.choice(answers)
        if answer is RuntimeError:
            raise RuntimeError("junk")
        return answer


@dataclass(frozen=True)
class JunkQueue(_Junk):
    key_change: ClassVar[KeyChange] = KeyChange.WITH_TIME

    def key(self, request: RequestView, load: LoadView) -> Any:
        return self._any_of(
            None, (), ("a",), (1, "b"), (float("nan"),), (float("inf"),), (object(),), 3, RuntimeError
        )


@dataclass(frozen=True)
class JunkAdmission(_Junk):
    def decide(self, candidate: AdmissionView, load: LoadView) -> Any:
        return self._any_of(None, *Admission, "admit", RuntimeError)


@dataclass(frozen=True)
class JunkBatch(_Junk):
    def split(self, batch: BatchView) -> Any:
        return self._any_of(
            None,
            BatchSplit(0, 0),
            BatchSplit(-1, 5),
            BatchSplit(10**9, 0),
            BatchSplit(1, 0),
            BatchSplit(0, 1),
            BatchSplit(1, 1, 0),
            BatchSplit(0, batch.token_budget, 1),
            RuntimeError,
        )


@dataclass(frozen=True)
class JunkVictim(_Junk):
    def rank(self, candidates: Sequence[VictimView], claimant: RequestView, load: LoadView) -> Any:
        ids = [view.request.request_id for view in candidates]
        self.rng.shuffle(ids)
        return self._any_of(None, [], ids, ids[:1], ids + ids, ["nobody", *ids], [[]], 7, RuntimeError)


@dataclass(frozen=True)
class JunkReclaim(_Junk):
    def choose(self, victim: VictimView, num_blocks_short: int, rates: Rates, load: LoadView) -> Any:
        return self._any_of(None, *Reclaim, "swap", RuntimeError)


@dataclass(frozen=True)
class JunkEviction(_Junk):
    def score(self, block: BlockView) -> Any:
        return self._any_of(None, float("nan"), float("inf"), "x", 0, -1.5, RuntimeError)


def junk_policies(seed: int) -> PolicySet:
    rng = random.Random(seed)
    return PolicySet(
        JunkQueue(rng),
        JunkAdmission(rng),
        JunkBatch(rng),
        JunkVictim(rng),
        JunkReclaim(rng),
        JunkEviction(rng),
    )
