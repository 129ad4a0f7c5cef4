"""Which tokens a sequence has seen and how often it has put each out, kept from one step to the next.

A penalty needs all of a sequence's tokens at every step. Counting them anew would cost time that grows with
the sequence; what is kept here is derived from its log alone and takes in only the tokens that are new.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from pageturner.service.core.outputs import SampleRow
from pageturner.service.core.token_log import DraftedTokens, TokenLog, TokenView
from pageturner.service.model.upload import Array


class TokenCounts:
    """Distinct tokens in the order in which they came: ids, int64 [k], and how often each was put out."""

    def __init__(self, prompt_token_ids: tuple[int, ...]) -> None:
        self.num_outputs = 0
        self._place: dict[int, int] = {}
        self._ids = np.empty(len(prompt_token_ids) + 64, dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.int64)
        for token_id in dict.fromkeys(prompt_token_ids):
            self._enter(token_id)

    @property
    def ids(self) -> Array:
        """Token ids that were counted, each once."""
        return self._ids[: len(self._place)]

    @property
    def output_counts(self) -> Array:
        """0 for tokens that only the prompt holds."""
        return self._counts[: len(self._place)]

    def followed_by(self, token_ids: tuple[int, ...]) -> TokenCounts:
        """A copy that has these outputs too."""
        copy = TokenCounts(())
        copy._place, copy._ids, copy._counts = self._place.copy(), self._ids.copy(), self._counts.copy()
        copy.num_outputs = self.num_outputs
        copy.add_outputs(token_ids)
        return copy

    def add_outputs(self, token_ids: tuple[int, ...]) -> None:
        for token_id in token_ids:
            place = self._place.get(token_id)
            if place is None:
                place = self._enter(token_id)  # which may put longer arrays in the place of these
            self._counts[place] += 1
        self.num_outputs += len(token_ids)

    def _enter(self, token_id: int) -> int:
        place = len(self._place)
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._place[token_id] = place
        self._ids[place] = token_id
        return place


class CountsOfSequences:
    """The counts of every sequence whose log is alive; what ended is forgotten with it."""

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[TokenLog, TokenCounts] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._counts)

    def of(self, row: SampleRow) -> TokenCounts:
        """Counts of the prompt and outputs of the row, which says `needs_history`."""
        outputs = row.output_token_ids
        if isinstance(outputs, DraftedTokens):
            return self._up_to(row, outputs.view).followed_by(outputs.drafts)
        if not isinstance(outputs, TokenView):
            counts = TokenCounts(row.prompt_token_ids)
            counts.add_outputs(outputs)
            return counts
        return self._up_to(row, outputs)

    def _up_to(self, row: SampleRow, outputs: TokenView) -> TokenCounts:
        kept = self._counts.get(outputs.log)
        if kept is None or kept.num_outputs > len(outputs):
            kept = self._counts[outputs.log] = TokenCounts(row.prompt_token_ids)
        kept.add_outputs(outputs[kept.num_outputs :])
        return kept
