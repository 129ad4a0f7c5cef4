"""Which device blocks a copy stream still reads or writes, and the waits that follow from it.

A swap runs beside the computation, on a stream of its own. Three rules keep the two apart:

    compute   --- write 7 ---+------------------ step that leaves 7 alone ---- wait --- write 7 ---
                             |                                                  ^
                           event                                              event
                             v                                                  |
    copies                  wait --- copy 7 to the host ------------------------+

1. A copy starts after all that compute has enqueued so far: it reads finished blocks, and overwrites none
   that compute still reads.
2. Its device blocks are *fenced* until it is done. Compute waits only when it is about to touch a fenced
   block, to read or to write; any other step goes on beside the copy.
3. Copies follow each other on their one stream, which also orders them over the blocks of the host:
   nothing else touches those.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from pageturner.service.model.streams import Event, Streams, Work

BlockIds = Sequence[int] | np.ndarray[Any, np.dtype[np.integer]]


class Fences:
    """Orders the two streams over a pool of `num_blocks` device blocks. Bound to one thread.

    Copies are numbered, and the copy stream finishes them in that order: who has waited for one has waited
    for all before it. So an event is kept only while its copy is neither awaited nor known to be done.
    """

    def __init__(self, streams: Streams, num_blocks: int) -> None:
        self._streams = streams
        self._last_copy = np.zeros(num_blocks, dtype=np.int64)
        """Of each block, the number of the last copy that touches it; 0 for none."""
        self._num_copies = 0
        self._num_settled = 0
        """All that compute enqueues from now on runs after the copies up to this number."""
        self._unsettled: deque[Event] = deque()
        """The events of the copies after those, in order."""

    @property
    def fenced(self) -> list[int]:
        """The blocks for which compute would have to wait, as far as is known."""
        return [int(block) for block in np.flatnonzero(self._last_copy > self._num_settled)]

    @property
    def num_events(self) -> int:
        """Copies whose end is not yet known."""
        return len(self._unsettled)

    def compute(self, blocks: BlockIds, work: Work) -> None:
        """Enqueue work of the compute stream that reads or writes these device blocks."""
        self.touch(blocks)
        self._streams.compute.run(work)

    def copy(self, blocks: BlockIds, work: Work) -> None:
        """Enqueue work of the copy stream that reads or writes these device blocks, and any of the host."""
        copies = self._streams.copies
        copies.wait_event(self._streams.compute.record_event())
        try:
            copies.run(work)
        finally:
            # Work that failed half-way may have enqueued some of its copies, which run all the same.
            self._unsettled.append(copies.record_event())
            self._num_copies += 1
            self._last_copy[np.asarray(blocks, dtype=np.int64)] = self._num_copies
            self._settle_finished()

    def copies_so_far(self) -> Event:
        """The moment at which all copies enqueued by now are done: from then on blocks of the host that none
        of those to come touches may be read and written by any thread."""
        return self._streams.copies.record_event()

    def touch(self, blocks: BlockIds) -> None:
        """Let all that compute enqueues from now on find the copies of these device blocks done."""
        self._settle_finished()
        if not self._unsettled:
            return
        newest = int(self._last_copy[np.asarray(blocks, dtype=np.int64)].max(initial=0))
        if newest > self._num_settled:
            self._streams.compute.wait_event(self._unsettled[newest - self._num_settled - 1])
            self._settle(newest - self._num_settled)

    def _settle_finished(self) -> None:
        while self._unsettled and self._unsettled[0].query():
            self._settle(1)

    def _settle(self, count: int) -> None:
        for _ in range(count):
            self._unsettled.popleft()
        self._num_settled += count
