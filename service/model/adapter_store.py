"""The adapters in memory, by digest, and which rows of a step have which.

The event loop puts them in and takes them out, the thread that computes looks them up: each is one operation
on a dictionary. One that is taken out lives on for as long as a step holds it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pageturner.kernels.low_rank import AdapterRows
from pageturner.service.core.outputs import SchedulerOutput
from pageturner.service.errors import AdapterError
from pageturner.service.model.adapters import AdapterWeights


@dataclass(frozen=True, slots=True, eq=False)
class BatchAdapters:
    """rows: of the step, which of `weights` each has."""

    rows: AdapterRows
    weights: tuple[AdapterWeights, ...]


class AdapterStore:
    """Adapters from before the first step of a request that has them until its end is told.

    (A step ahead may compute a sequence in vain whose request has ended. Should it find no adapter any more
    it fails, and is computed again without that sequence.)
    """

    def __init__(self) -> None:
        self._weights: dict[str, AdapterWeights] = {}

    def put(self, weights: AdapterWeights) -> None:
        """From now on steps may have it."""
        self._weights[weights.digest] = weights

    def drop(self, digest: str) -> None:
        """No request has it any more."""
        del self._weights[digest]

    def bind(self, output: SchedulerOutput) -> BatchAdapters | None:
        """The adapters of a step, in the order in which they come first; None for a step that has none.

        Raises AdapterError for one that is not there.
        """
        if not any(sequence.adapter for sequence in output.scheduled):
            return None
        places: dict[str, int] = {"": -1}
        for sequence in output.scheduled:
            places.setdefault(sequence.adapter, len(places) - 1)
        counts = [len(sequence.token_ids) for sequence in output.scheduled]
        of_sequence = np.array([places[sequence.adapter] for sequence in output.scheduled], dtype=np.int32)
        rows = AdapterRows(np.repeat(of_sequence, counts), len(places) - 1)
        return BatchAdapters(rows, tuple(self._of(digest) for digest in places if digest))

    def _of(self, digest: str) -> AdapterWeights:
        weights = self._weights.get(digest)
        if weights is None:
            raise AdapterError(f"adapter {digest} is not in memory")
        return weights
