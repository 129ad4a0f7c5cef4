"""What each row of a step may sample, found out in a thread of its own while the model computes.

    begin    before the forward: every row's tokens are known, so its mask can be made
    of       after it: the masks, which are mostly there

A sequence's place in its grammar is kept by the log of its tokens and derived from them alone: tokens that
the log has beyond it are taken in. So it needs to be told of no preemption, no failed step and no end, and a
sequence that is resumed finds its place from its tokens. One whose log was forked from another's, as a beam's
is, begins with a copy of the place that this one had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np

from pageturner.service.core.outputs import SampleRow, ScheduledSequence, SchedulerOutput
from pageturner.service.core.structured_output import FIELD, StructuredOutput
from pageturner.service.core.token_log import DraftedTokens, TokenLog, TokenView
from pageturner.service.errors import InvalidArgument, PageturnerError
from pageturner.service.grammars.compiler import Allowed, GrammarTooComplex, Position, Words
from pageturner.service.grammars.grammars import Grammars
from pageturner.service.panics import panics_are_errors

Mask = Words | PageturnerError
"""A bit for each token that may be sampled, or why there is none."""

_Key = tuple[int, int, int]
"""Sequence, epoch, and how many tokens it has: a step asks for one token of each, and for one behind each
draft."""

_Masks = dict[_Key, Mask]


class StepMasks:
    """One thread at a time calls `begin` and `of`. timer: in seconds."""

    def __init__(self, grammars: Grammars, timer: Callable[[], float]) -> None:
        self._grammars = grammars
        self._timer = timer
        self._positions: WeakKeyDictionary[TokenLog, Position] = WeakKeyDictionary()
        self._executor: ThreadPoolExecutor | None = None
        self._begun: Future[_Masks] | None = None
        self._made: _Masks = {}

    def __len__(self) -> int:
        """Sequences whose place is kept."""
        return len(self._positions)

    def begin(self, output: SchedulerOutput) -> None:
        """Begin with the masks of a step whose forward comes next; nothing where no row has a form."""
        if not self._grammars.has_any:
            return
        rows = [
            row
            for part in output.scheduled
            for sample in part.samples
            if sample.params.structured_output is not None
            for row in _drafted_rows(part, sample)
        ]
        self._settle()
        self._made = {}
        if rows:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, "pageturner-masks")
            # Without a thread, which the system may refuse, masks are made when they are asked for.
            with suppress(RuntimeError):
                self._begun = self._executor.submit(self._make, rows)

    def of(self, rows: Sequence[SampleRow]) -> list[Mask]:
        """The mask of each row, all of which have a form: as begun, else made here and now."""
        began = self._timer()
        self._settle()
        missing = [row for row in rows if _key(row) not in self._made]
        if missing:
            self._made |= self._make(missing)
        self._grammars.count_masks(0, 0.0, self._timer() - began)
        return [self._made[_key(row)] for row in rows]

    def close(self) -> None:
        """The last call: ends the thread."""
        if self._executor is not None:
            self._executor.shutdown()

    def _settle(self) -> None:
        """Wait for the masks that were begun, in place of those of the step before."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self._made = begun.result()

    @panics_are_errors("a grammar")
    def _make(self, rows: Iterable[SampleRow]) -> _Masks:
        began = self._timer()
        rows = list(rows)
        for row in rows:  # before any place that is to be copied goes on
            self._branch_off(row)
        masks = {_key(row): self._mask(row) for row in rows}
        self._grammars.count_masks(len(masks), self._timer() - began, 0.0)
        return masks

    def _branch_off(self, row: SampleRow) -> None:
        """Let a log that is new here begin where the one that it was forked from stands, unless that one has
        gone on by tokens of its own."""
        outputs = row.output_token_ids
        view = outputs.view if isinstance(outputs, DraftedTokens) else outputs
        if not isinstance(view, TokenView) or view.log in self._positions:
            return
        origin = view.log.origin
        kept = None if origin is None else self._positions.get(origin)
        if kept is not None and view.start + kept.num_tokens <= view.log.num_shared:
            self._positions[view.log] = kept.copy()

    def _mask(self, row: SampleRow) -> Mask:
        wanted = row.params.structured_output
        assert wanted is not None, "a row without a form has no mask"
        try:
            allowed = self._position(row).allowed()
        except GrammarTooComplex as error:
            num_tokens = len(row.output_token_ids)
            return InvalidArgument(wanted.field, f"{error}, after {num_tokens} tokens")
        except InvalidArgument as error:  # of a grammar that nobody holds, and that cannot be compiled
            return error
        return with_ends(allowed, row)

    def _position(self, row: SampleRow) -> Position:
        """Where the row's sequence stands, behind its drafts if it has any. Raises GrammarTooComplex, or what
        compiling raises."""
        outputs = row.output_token_ids
        wanted = row.params.structured_output
        assert wanted is not None
        if isinstance(outputs, DraftedTokens):
            ahead = self._up_to(wanted, outputs.view).copy()
            if ahead.count_fitting(outputs.drafts) < len(outputs.drafts):
                raise GrammarTooComplex("a draft does not fit")  # so it won't be sampled, nor this row asked
            ahead.take(outputs.drafts)
            return ahead
        if isinstance(outputs, TokenView):
            return self._up_to(wanted, outputs)
        place = self._grammars.compile(wanted).start()
        place.take(outputs)
        return place

    def _up_to(self, wanted: StructuredOutput, outputs: TokenView) -> Position:
        """Behind these tokens; kept for those that follow."""
        kept = self._positions.get(outputs.log)
        if kept is None or kept.num_tokens > len(outputs):
            kept = self._positions[outputs.log] = self._grammars.compile(wanted).start()
        kept.take(outputs[kept.num_tokens :])
        return kept


def with_ends(allowed: Allowed, row: SampleRow) -> Mask:
    """The mask of a row: its end tokens may be sampled where the text is whole, and then, below min_tokens,
    only where nothing else may. Where no token may be sampled it is an error, or of a beam an empty mask."""
    words, ends = allowed.words, np.array(row.end_token_ids, dtype=np.int64)
    places, bits = ends >> 5, np.uint32(1) << (ends & 31).astype(np.uint32)
    view = words.view(np.uint32)
    np.bitwise_and.at(view, places, ~bits)
    is_early = len(row.output_token_ids) < row.params.min_tokens and view.any()
    if allowed.may_end and not is_early:
        np.bitwise_or.at(view, places, bits)
    if not view.any() and row.params.beam_search is None:  # of beams, others may go on
        return InvalidArgument(FIELD, "no token of the model's can go on with the text, or end it")
    return words


def _key(row: SampleRow) -> _Key:
    return row.seq_id, row.epoch, len(row.output_token_ids)


def _drafted_rows(part: ScheduledSequence, sample: SampleRow) -> Iterator[SampleRow]:
    """What is asked for behind the sequence's last token, and behind each of its drafts."""
    yield sample
    outputs = sample.output_token_ids
    if part.num_drafts and isinstance(outputs, TokenView):
        drafts = part.token_ids[-part.num_drafts :]
        for count in range(1, part.num_drafts + 1):
            yield replace(sample, output_token_ids=DraftedTokens(outputs, drafts[:count]))
