"""Summaries of what the prefix cache holds, numbered as they change."""

from __future__ import annotations

from pageturner.service.core.inspection import SchedulerInspection
from pageturner.service.core.memory.prefix_cache import PrefixHasher
from pageturner.service.core.prefix_summary import PrefixSummary


class PrefixSummaries:
    """Lives on the event loop. hasher: the scheduler's; None where no prefix is cached."""

    def __init__(self, hasher: PrefixHasher | None, block_size: int) -> None:
        key_id = "" if hasher is None else hasher.key_id
        self._seen: SchedulerInspection | None = None
        self._last = PrefixSummary(0, block_size, key_id)

    def of(self, inspection: SchedulerInspection) -> PrefixSummary:
        """The summary of a look; the last one again, revision and all, where the same blocks are cached."""
        if inspection is self._seen:
            return self._last
        last, self._seen = self._last, inspection
        newest = PrefixSummary.of(last.revision + 1, last.block_size, last.key_id, inspection.cached)
        if (newest.fingerprints, newest.is_truncated) != (last.fingerprints, last.is_truncated):
            self._last = newest
        return self._last
