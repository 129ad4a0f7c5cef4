"""Which rows of logits drafts ask for, and how far they came true.

A sequence with k drafts has k + 1 rows: behind its last token, and behind each draft. Row i is sampled as a
step of its own would sample it, in which the drafts before it were the sequence's tokens; so a result counts
only while each draft before it is the token that was sampled in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pageturner.service.core.outputs import SampledSequence, SampleRow, ScheduledSequence
from pageturner.service.core.token_log import DraftedTokens, TokenView

Rows = tuple[list[int], list[SampleRow], list[int]]
"""Of each token to be drawn: its row of logits, what is asked for, its position."""


def plain_rows(wanted: Sequence[ScheduledSequence]) -> Rows:
    """The rows of the sequences of a step that sample, in order; n of one row where choices fork."""
    rows = [row for row, part in enumerate(wanted) for _ in part.samples]
    samples = [sample for part in wanted for sample in part.samples]
    return rows, samples, [part.end for part in wanted for _ in part.samples]


def drafted_rows(wanted: Sequence[ScheduledSequence]) -> Rows:
    """The same of a step in which some have drafts, whose one SampleRow asks for several rows."""
    rows: list[int] = []
    samples: list[SampleRow] = []
    positions: list[int] = []
    row = 0
    for part in wanted:
        if not part.num_drafts:
            rows += [row] * len(part.samples)
            samples += part.samples
            positions += [part.end] * len(part.samples)
            row += 1
            continue
        (sample,) = part.samples
        drafts = part.token_ids[-part.num_drafts :]
        for count in range(part.num_drafts + 1):
            rows.append(row + count)
            samples.append(_behind(sample, drafts[:count]))
            positions.append(part.end - part.num_drafts + count)
        row += part.num_drafts + 1
    return rows, samples, positions


def _behind(sample: SampleRow, drafts: tuple[int, ...]) -> SampleRow:
    """The same, asked behind drafts: where history counts, they are of it."""
    outputs = sample.output_token_ids
    if not drafts or not sample.params.needs_history:
        return sample
    if isinstance(outputs, TokenView):
        return replace(sample, output_token_ids=DraftedTokens(outputs, drafts))
    return replace(sample, output_token_ids=(*outputs, *drafts))


def verified(
    sampled: Sequence[SampledSequence], wanted: Iterable[ScheduledSequence]
) -> tuple[SampledSequence, ...]:
    """One result for each SampleRow, of one for each of `drafted_rows`: the drafts that came true, and the
    token behind them.

    An error behind a draft that came true is not told: its position is computed again, without drafts, and
    meets it again if it is due to the sequence itself.
    """
    results: list[SampledSequence] = []
    first = 0
    for part in wanted:
        end = first + (part.num_drafts + 1 if part.num_drafts else len(part.samples))
        own = sampled[first:end]
        results += (_verified(part, own),) if part.num_drafts else own
        first = end
    return tuple(results)


def _verified(part: ScheduledSequence, own: Sequence[SampledSequence]) -> SampledSequence:
    if own[0].error is not None:
        return own[0]
    tokens = own[0].tokens
    for draft, result in zip(part.token_ids[-part.num_drafts :], own[1:], strict=True):
        if tokens[-1].token_id != draft or result.error is not None:
            break
        tokens += result.tokens
    return SampledSequence(own[0].seq_id, own[0].epoch, tokens)
