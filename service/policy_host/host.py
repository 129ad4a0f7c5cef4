"""Asks the policies, checks the answers, and falls back to an axis's default where one is no good.

The core survives any answer: an exception of any kind, a wrong type, an unknown id, an endless iterator, an
impossible choice. Each is counted as a fault of its axis, and the last one is kept in words for the operator.
Feasibility that only the scheduler knows (is there host room?) is the scheduler's to check; it reports
through `fault`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pageturner.policies.interfaces import (
    Admission,
    BatchSplit,
    KeyChange,
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
from pageturner.service.policy_host import answers
from pageturner.service.policy_host.roster import PolicyRoster


class PolicyHost(PolicyRoster):
    """The six questions, to the policies of its roster and their shadows."""

    _ranked_at: float = 0.0
    """When the last queue key was asked for: keys of other moments do not compare."""

    @property
    def key_change(self) -> KeyChange:
        """When a key of the queue policy in force may change."""
        return self._active["queue"].in_force.key_change

    def queue_key(self, request: RequestView, load: LoadView) -> SortKey:
        """The request's place in the queue, smallest first; of built-in numbers and texts."""
        key = self._active["queue"].ask(answers.sort_key, request, load)
        if "queue" in self._shadows:
            shadow = self._shadows["queue"]
            changes = (self.key_change, shadow.caller.key_change)
            if load.now != self._ranked_at and KeyChange.WITH_TIME in changes:
                shadow.forget_ranks()
            self._ranked_at = load.now
            rank = answers.comparable(key)
            shadow.compare_rank(request.request_id, rank, answers.comparable_key, (request, load))
        return key

    def admission(self, candidate: AdmissionView, load: LoadView) -> Admission:
        """Whether the request whose turn it is starts now."""
        answer = self._active["admission"].ask(answers.admission, candidate, load)
        if "admission" in self._shadows:
            subject = candidate.request.request_id
            self._shadows["admission"].compare(subject, answer, answers.admission, (candidate, load))
        return answer

    def batch_split(self, batch: BatchView) -> BatchSplit:
        """A split that lets something advance if there is work and budget."""
        parse = answers.batch_split(batch)
        split = self._active["batch"].ask(parse, batch)
        if "batch" in self._shadows:
            self._shadows["batch"].compare("a step", split, parse, (batch,))
        return split

    def victim_order(
        self, candidates: Sequence[VictimView], claimant: RequestView, load: LoadView
    ) -> list[str]:
        """Every candidate exactly once. Unknown and repeated ids are dropped, those left out come last."""
        frozen = tuple(candidates)
        known = [view.request.request_id for view in frozen]
        reader = answers.VictimReader(known)
        whole = self._active["victim"].ask(reader.parse, frozen, claimant, load)
        order = list(dict.fromkeys((*reader.understood, *whole)))
        if "victim" in self._shadows and order:
            shadowed = answers.VictimReader(known)
            self._shadows["victim"].compare(
                claimant.request_id,
                order[0],
                lambda answer: shadowed.parse(answer)[0],
                (frozen, claimant, load),
            )
        return order

    def reclaim(self, victim: VictimView, num_blocks_short: int, rates: Rates, load: LoadView) -> Reclaim:
        """How the victim yields; whether there is room for it is the caller's to check."""
        arguments = (victim, num_blocks_short, rates, load)
        answer = self._active["reclaim"].ask(answers.reclaim, *arguments)
        if "reclaim" in self._shadows:
            subject = victim.request.request_id
            self._shadows["reclaim"].compare(subject, answer, answers.reclaim, arguments)
        return answer

    def default_reclaim(
        self, victim: VictimView, num_blocks_short: int, rates: Rates, load: LoadView
    ) -> Reclaim:
        """What the default of the axis would choose."""
        default = self._active["reclaim"].default
        return default.ask(answers.reclaim, victim, num_blocks_short, rates, load)

    def eviction_score(self, block: BlockView) -> float:
        """A finite number; the smallest is evicted first."""
        score = self._active["eviction"].ask(answers.score, block)
        if "eviction" in self._shadows:
            subject = f"block {block.block_id}"
            self._shadows["eviction"].compare_rank(subject, score, answers.score, (block,))
        return score
