"""What the router of the policies is told of Ray's replicas and requests. Knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pageturner.service.core.prefix_summary import FINGERPRINT_BYTES, PrefixSummary
from pageturner.service.routing.options import LoadReport, Replica, Routed
from pageturner.service.routing.router import Router
from pageturner.service.scale.calls import RouteHint
from pageturner.service.scale.reports import ReplicaReport

NOTHING_TOLD = PrefixSummary()


class RequestRouting:
    """router: whose replicas are those that `update` names. name: of this router among others.

    All replicas of an application hash under one key, so a summary is taken for what it says.
    """

    def __init__(self, router: Router, name: str) -> None:
        self._router = router
        self._name = name
        self._summaries: dict[str, PrefixSummary] = {}
        self._routed: dict[str, Routed] = {}

    def update(self, reports: Mapping[str, ReplicaReport]) -> None:
        """The replicas that there are, with the last report of each."""
        for replica_id in set(self._router.replica_ids) - set(reports):
            self._router.leave(replica_id)
            self._summaries.pop(replica_id, None)
        known = set(self._router.replica_ids)
        for replica_id, report in reports.items():
            if replica_id not in known:
                self._router.join(Replica(replica_id))
            self._take(replica_id, report)

    def lost(self, replica_id: str) -> None:
        """A replica died; the next `update` may name it once more."""
        self._router.leave(replica_id)
        self._summaries.pop(replica_id, None)

    def order(self, key: str, hint: RouteHint) -> tuple[tuple[str, ...], RouteHint]:
        """(replica ids, the best first, those that are to be avoided last; the hint to send along).

        key: names the request; asked for once more, the former choice is taken back. Raises NoReplica.
        """
        self.ended(key)
        for sent in hint.news:
            self._router.holds(sent.replica_id, _numbers(sent.fingerprints), sent.block_size)
        routed = self._router.route(
            num_prompt_tokens=hint.num_prompt_tokens,
            digests=tuple(map(fingerprint, hint.digests)),
            tokens_per_digest=hint.block_size,
            session=hint.session,
            priority=hint.priority,
            tenant=hint.tenant,
            avoid=hint.avoid,
        )
        self._routed[key] = routed
        first = (routed.replica_id, *routed.others)
        rest = [each for each in self._router.replica_ids if each not in first]
        rest.sort(key=lambda each: (each in hint.avoid, self._router.view(each).load))
        return (*first, *rest), replace(hint, router=self._name, number=routed.number, news=())

    def went_to(self, key: str, replica_id: str) -> None:
        """A replica has taken the request, perhaps not the one that was best."""
        routed = self._routed.get(key)
        if routed is not None and routed.replica_id != replica_id:
            self.ended(key)

    def ended(self, key: str) -> None:
        """The request has ended, whichever way. No matter if it is not known."""
        routed = self._routed.pop(key, None)
        if routed is not None:
            self._router.ended(routed)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._routed)

    def _take(self, replica_id: str, report: ReplicaReport) -> None:
        load = LoadReport(report.num_queued_tokens, report.num_requests)
        self._router.report(replica_id, load, report.seen.get(self._name, -1) + 1)
        if report.cache_tokens:  # one that has just started has told nothing yet
            # What it holds is kept whole, and beside it as much that was sent and is not told of yet.
            self._router.resize(replica_id, 2 * report.cache_tokens)
        before, summary = self._summaries.get(replica_id, NOTHING_TOLD), report.summary
        if summary.revision == before.revision:
            return
        self._summaries[replica_id] = summary
        change = before.change_to(summary)
        self._router.dropped(replica_id, _numbers(change.removed))
        self._router.holds(replica_id, _numbers(change.added), summary.block_size)


def fingerprint(digest: bytes) -> int:
    """Of a block's hash, as summaries tell it."""
    return int.from_bytes(digest[:FINGERPRINT_BYTES], "little")


def _numbers(packed: bytes) -> tuple[int, ...]:
    return tuple(
        int.from_bytes(packed[start : start + FINGERPRINT_BYTES], "little")
        for start in range(0, len(packed), FINGERPRINT_BYTES)
    )
