"""Asks a policy, checks the answer, and falls back to the axis's default when it is no good.

The core survives any answer: an exception, a wrong type, an unknown id, an impossible choice. Each is
counted as a fault of its axis, and the last one is kept in words for the operator. Feasibility that only
the scheduler knows (is there host room?) is the scheduler's to check; it reports through `fault`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from pageturner.policies.interfaces import (
    Admission,
    BatchSplit,
    KeyChange,
    PolicySet,
    Reclaim,
    SortKey,
)
from pageturner.policies.views import (
    AdmissionView,
    BatchView,
    BlockView,
    LoadView,
    Rates,
    RequestView,
    VictimView,
)


class PolicyGuard:
    """policies: in force. defaults: answer in their place when they fail; trusted.

    faults, last_fault: by axis, how many bad answers there were, and the last of them in words.
    """

    def __init__(self, policies: PolicySet, defaults: PolicySet) -> None:
        self._policies = policies
        self._defaults = defaults
        self.faults: Counter[str] = Counter()
        self.last_fault: dict[str, str] = {}

    def fault(self, axis: str, what: str) -> None:
        """Count one bad answer."""
        self.faults[axis] += 1
        self.last_fault[axis] = what

    @property
    def key_change(self) -> KeyChange:
        change = getattr(self._policies.queue, "key_change", None)
        return change if isinstance(change, KeyChange) else KeyChange.WITH_TIME

    def queue_key(self, request: RequestView, load: LoadView) -> SortKey:
        try:
            key = self._policies.queue.key(request, load)
            if isinstance(key, tuple) and all(map(_may_sort, key)):
                return key
            self.fault("queue", f"answered {_shown(key)}")
        except Exception as error:
            self.fault("queue", f"raised {_shown(error)}")
        return self._defaults.queue.key(request, load)

    def admission(self, candidate: AdmissionView, load: LoadView) -> Admission:
        try:
            answer = self._policies.admission.decide(candidate, load)
            if isinstance(answer, Admission):
                return answer
            self.fault("admission", f"answered {_shown(answer)}")
        except Exception as error:
            self.fault("admission", f"raised {_shown(error)}")
        return self._defaults.admission.decide(candidate, load)

    def batch_split(self, batch: BatchView) -> BatchSplit:
        """A split that lets something advance if there is work and budget."""
        try:
            split = self._policies.batch.split(batch)
            if isinstance(split, BatchSplit) and _is_possible(split, batch):
                return split
            self.fault("batch", f"answered {_shown(split)}")
        except Exception as error:
            self.fault("batch", f"raised {_shown(error)}")
        return self._defaults.batch.split(batch)

    def victim_order(
        self, candidates: Sequence[VictimView], claimant: RequestView, load: LoadView
    ) -> list[str]:
        """Every candidate exactly once. Strangers and doubles are dropped, those forgotten come last."""
        known = {view.request.request_id for view in candidates}
        order: list[str] = []
        try:
            ranked = list(self._policies.victim.rank(candidates, claimant, load))
            order = [rid for rid in dict.fromkeys(ranked) if rid in known]
            if len(order) == len(known) == len(ranked):
                return order
            self.fault("victim", f"ranked {_shown(ranked)}")
        except Exception as error:
            self.fault("victim", f"raised {_shown(error)}")
        ranked_before = set(order)
        default = self._defaults.victim.rank(candidates, claimant, load)
        return order + [rid for rid in default if rid not in ranked_before]

    def reclaim(self, victim: VictimView, num_blocks_short: int, rates: Rates, load: LoadView) -> Reclaim:
        try:
            answer = self._policies.reclaim.choose(victim, num_blocks_short, rates, load)
            if isinstance(answer, Reclaim):
                return answer
            self.fault("reclaim", f"answered {_shown(answer)}")
        except Exception as error:
            self.fault("reclaim", f"raised {_shown(error)}")
        return self.default_reclaim(victim, num_blocks_short, rates, load)

    def default_reclaim(
        self, victim: VictimView, num_blocks_short: int, rates: Rates, load: LoadView
    ) -> Reclaim:
        return self._defaults.reclaim.choose(victim, num_blocks_short, rates, load)

    def eviction_score(self, block: BlockView) -> float:
        try:
            score = float(self._policies.eviction.score(block))
            if math.isfinite(score):
                return score
            self.fault("eviction", f"answered {score}")
        except Exception as error:
            self.fault("eviction", f"raised {_shown(error)}")
        return float(self._defaults.eviction.score(block))


def _shown(answer: object) -> str:
    """An answer in words, of bounded length; even its repr is not to be trusted."""
    try:
        return repr(answer)[:200]
    except Exception:
        return f"a {type(answer).__name__} that has no repr"


def _may_sort(part: object) -> bool:
    """Whether a part of a key compares with any other: a text, or a number that is not NaN."""
    return isinstance(part, (str, int)) or (isinstance(part, float) and part == part)


def _is_possible(split: BatchSplit, batch: BatchView) -> bool:
    numbers = [split.decode_tokens, split.prefill_tokens]
    if split.chunk_tokens is not None:
        numbers.append(split.chunk_tokens)
    if any(not isinstance(number, int) or number < 0 for number in numbers):
        return False
    if split.decode_tokens + split.prefill_tokens > batch.token_budget:
        return False
    decodes = min(split.decode_tokens, batch.num_decode_tokens)
    prefills = split.prefill_tokens if split.chunk_tokens != 0 else 0
    may_prefill = bool(batch.prefill_tokens) or batch.num_waiting > 0
    return decodes > 0 or (may_prefill and prefills > 0) or not (batch.num_decode_tokens or may_prefill)
