"""The general machine, and sequences with drafts behind them: some that come true, some in part, some not."""

from __future__ import annotations

import functools
import random

from hypothesis import strategies as st
from hypothesis.stateful import rule

from pageturner.service.core.drafting.ngram_index import Drafts
from pageturner.service.core.options import SpeculationOptions
from pageturner.service.core.request import Sequence
from pageturner.service.core.scheduling.speculation import NgramDrafter
from support.core_harness import CoreHarness
from support.fake_model import ALPHABET, expected_tokens
from support.scheduler_machine import KNOWN, ConversingMachine, WindowMachine, requests

SPECULATION = SpeculationOptions("ngram", num_tokens=5, min_ngram=1, row_cost=0.05)

_expected_tokens = functools.lru_cache(maxsize=4096)(expected_tokens)


class PlannedDrafter:
    """Of every other sequence it knows what is due: drafts of which the first few are right.

    Of the others it guesses as the service does. What comes behind an answer's end is drafted too.
    """

    def __init__(self, harness: CoreHarness) -> None:
        self._harness = harness
        self._ngrams = NgramDrafter(SPECULATION)

    def propose(self, sequence: Sequence, limit: int) -> Drafts:
        if sequence.seq_id % 2:
            return self._ngrams.propose(sequence, limit)
        record, done = self._harness.records[sequence.request.request_id], sequence.num_output_tokens
        new = record.new
        due = _expected_tokens(
            new.prompt_token_ids, new.seed, sequence.index, record.stop, window=self._harness.window
        )
        chance = random.Random(f"{sequence.seq_id}/{done}")
        drafts = [*due[done:], *(chance.randrange(ALPHABET) for _ in range(limit))][:limit]
        if chance.random() < 0.5:
            wrong = chance.randrange(limit)
            drafts[wrong] = (drafts[wrong] + 1) % ALPHABET
        return Drafts(tuple(drafts[: chance.randint(0, limit)]), chance.random() < 0.5)


class KnowingDrafter:
    """Its drafts all come true."""

    def __init__(self, harness: CoreHarness) -> None:
        self._harness = harness

    def propose(self, sequence: Sequence, limit: int) -> Drafts:
        record, done = self._harness.records[sequence.request.request_id], sequence.num_output_tokens
        new = record.new
        due = _expected_tokens(
            new.prompt_token_ids, new.seed, sequence.index, record.stop, window=self._harness.window
        )
        return Drafts(tuple(due[done : done + limit]), True)


class DraftingMachine(ConversingMachine):
    """Prompts that continue answers and answers that are resumed are among its moves.

    A machine of its own, since the planted bugs were searched for with the moves of the others.
    """

    speculation = SPECULATION
    drafter = PlannedDrafter

    @rule(wanted=requests(), known=KNOWN)
    def resume(self, wanted: dict[str, object], known: tuple[int, ...]) -> None:
        self._submit(wanted | {"known": known})

    @rule(count=st.integers(1, 4))
    def fail_some_steps(self, count: int) -> None:
        """A step with drafts fails like any other: what it computed is void."""
        if self.live.num_steps > 8:
            for _ in range(count):
                self.live.fail()


class DraftsUnderWindows(WindowMachine, DraftingMachine):
    """Rows of drafts that are rolled back in tables whose beginning was given back."""
