"""Logits to tokens. All that a choice depends on is in its row and its SampleRow: what is kept from step to
step, counts of tokens, is derived from the rows alone.

For each row, in this order: logit bias, penalties, bans, form (on float32 logits), temperature, min_p, top_k,
top_p (each on what the one before left), then one uniform number by inverse CDF in the order of the
vocabulary. Ties go to the lowest id, in greedy choice and at every cut.

On a GPU each transfer to the host waits for all that was enqueued before it, so there are few: one for the
greedy choices of a step, and for every 64 rows one for those that are drawn, one for those with edited
logits, one for those with logprobs. A step of greedy choices waits once, one of drawn ones twice.

A row's token is bitwise independent of the rows beside it: every reduction used here (softmax, cumsum,
sort, topk over the last axis) works row by row; sums that torch might split over threads are avoided.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from pageturner.service.core.outputs import SampledSequence, SampledToken, SampleRow, SchedulerOutput
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.errors import InvalidArgument, NonFiniteLogits, PageturnerError
from pageturner.service.model.beam_candidates import BeamRows
from pageturner.service.model.logprobs import row_maxima, token_logprobs
from pageturner.service.model.random_streams import uniforms
from pageturner.service.model.scores import StepLogits
from pageturner.service.model.token_counts import CountsOfSequences, TokenCounts
from pageturner.service.model.token_masks import RowMasks, mask_
from pageturner.service.model.truncation import mass_of_runs, run_length, truncate_
from pageturner.service.model.upload import Array, upload
from pageturner.service.model.verification import drafted_rows, plain_rows, verified

_SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny
_CPU_CHUNK_ROWS = 16
"""Few enough rows at a time that their temporaries stay in the cache: half the time of all at once."""
_GPU_CHUNK_ROWS = 64
"""Few enough that their temporaries are a small part of the memory: 5 MB a row of 152,000 tokens."""

_WITHHELD, _INFINITE = -1, -2
"""In the place of a token id: no token is left, or no maximum is."""

_Outcome = int | PageturnerError
"""A token id, or why there is none."""

_Found = tuple[SampledToken, ...] | PageturnerError
"""What a row yields; nothing where a beam can't go on."""


class Sampler:
    """Chooses tokens for a vocabulary of `vocab_size` (the width of the logits). masks: of rows with a
    form."""

    def __init__(self, vocab_size: int, masks: RowMasks | None = None) -> None:
        self._vocab_size = vocab_size
        self._counts = CountsOfSequences()
        self._masks = masks
        self._beams = BeamRows(masks)

    def sample(
        self, logits: torch.Tensor | StepLogits, output: SchedulerOutput
    ) -> tuple[SampledSequence, ...]:
        """One SampledSequence for each ScoreRun, then one for each SampleRow, in order.

        logits: [R, vocab_size], any float dtype, on any device, not written to: of each sequence in turn rows
        that are scored, then if it samples one, with one more before it for each draft; or a step's where the
        former are scored. A row of NaN, +inf or all -inf yields NonFiniteLogits in its own results only.
        """
        step = logits if isinstance(logits, StepLogits) else StepLogits.of(logits, output)
        logits, scores = step.rows, step.results()
        is_cpu = logits.device.type == "cpu"
        chunk_rows = _CPU_CHUNK_ROWS if is_cpu else _GPU_CHUNK_ROWS
        wanted = [part for part in output.scheduled if part.samples]
        num_drafts = sum(part.num_drafts for part in wanted)
        num_rows = len(wanted) + num_drafts
        assert logits.shape == (num_rows, self._vocab_size), f"{logits.shape} for {num_rows} rows"
        if not wanted:
            return scores
        rows, samples, positions = drafted_rows(wanted) if num_drafts else plain_rows(wanted)
        outcomes: list[_Outcome] = []
        beams: list[int] = []
        slow: list[int] = []
        told: list[int] = []
        best, best_ids = row_maxima(logits)
        greedy_ids = torch.where(torch.isfinite(best), best_ids, _INFINITE).tolist()
        for place, (row, sample) in enumerate(zip(rows, samples, strict=True)):
            if greedy_ids[row] == _INFINITE:
                outcomes.append(NonFiniteLogits("the model produced NaN or infinite logits"))
            else:
                outcomes.append(greedy_ids[row])
                if sample.params.beam_search is not None:
                    beams.append(place)
                    continue
                if not sample.params.is_greedy or _edits(sample):
                    slow.append(place)
                if sample.params.needs_logprobs:
                    told.append(place)
        for places in batched(slow, chunk_rows):
            chosen = _choose(
                _floats(logits, rows, places),
                [samples[i] for i in places],
                [positions[i] for i in places],
                self._counts,
                self._masks,
            )
            for i, outcome in zip(places, chosen, strict=True):
                outcomes[i] = outcome

        found: dict[int, _Found] = {}
        for places in batched(beams, chunk_rows):
            asked = [samples[i] for i in places]
            found.update(zip(places, self._beams.search(_floats(logits, rows, places), asked), strict=True))
        for places in batched([i for i in told if isinstance(outcomes[i], int)], chunk_rows):
            with_logprobs = token_logprobs(
                _floats(logits, rows, places),
                [token_id for i in places if isinstance(token_id := outcomes[i], int)],
                [samples[i].params.logprobs or 0 for i in places],
            )
            found.update((i, (token,)) for i, token in zip(places, with_logprobs, strict=True))
        sampled = tuple(
            _sampled(sample, found.get(i, outcome))
            for i, (sample, outcome) in enumerate(zip(samples, outcomes, strict=True))
        )
        return scores + (verified(sampled, wanted) if num_drafts else sampled)


def batched(places: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Pieces of at most `size` places, in order."""
    return (places[first : first + size] for first in range(0, len(places), size))


def _sampled(sample: SampleRow, found: int | _Found) -> SampledSequence:
    if isinstance(found, PageturnerError):
        return SampledSequence(sample.seq_id, sample.epoch, (), found)
    tokens = (SampledToken(found),) if isinstance(found, int) else found
    return SampledSequence(sample.seq_id, sample.epoch, tokens)


def _floats(logits: torch.Tensor, rows: Sequence[int], places: Sequence[int]) -> torch.Tensor:
    """A copy of the rows at these places, in float32."""
    return _rows(logits, [rows[i] for i in places]).float()


def _rows(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """A copy of these rows."""
    (ids,) = upload((np.array(rows, dtype=np.int64),), values.device)
    return values.index_select(0, ids)


def _choose(
    edited: torch.Tensor,
    samples: Sequence[SampleRow],
    positions: Sequence[int],
    counts: CountsOfSequences,
    masks: RowMasks | None,
) -> list[_Outcome]:
    """Edit, scale, truncate and draw. `edited`: float32 [R, V], a copy of the samples' rows to work in.

    The rows are finite before they are edited.
    """
    with_edits = [(row, sample) for row, sample in enumerate(samples) if _edits(sample)]
    _edit(edited, with_edits, counts)
    with_form = [(row, sample) for row, sample in with_edits if sample.params.structured_output is not None]
    errors: dict[int, PageturnerError] = {}
    if with_form:
        assert masks is not None, "a form was asked for where nothing can mask tokens"
        errors = mask_(edited, with_form, masks)
    best, best_ids = row_maxima(edited)
    outcomes: list[_Outcome] = [0] * len(samples)
    if with_edits:
        codes = torch.where(best == -math.inf, _WITHHELD, _INFINITE)
        best_or_code = torch.where(torch.isfinite(best), best_ids, codes).tolist()
        outcomes = [
            errors.get(row) or _outcome(token_id, samples[row]) for row, token_id in enumerate(best_or_code)
        ]
    drawn = [
        i
        for i, (outcome, sample) in enumerate(zip(outcomes, samples, strict=True))
        if isinstance(outcome, int) and not sample.params.is_greedy
    ]
    if drawn:
        if len(drawn) < len(samples):
            edited, best = _rows(edited, drawn), _rows(best, drawn)
        ids = _draw(edited, best, [samples[i] for i in drawn], [positions[i] for i in drawn])
        for i, token_id in zip(drawn, ids, strict=True):
            outcomes[i] = token_id
    return outcomes


def _outcome(token_id: int, sample: SampleRow) -> _Outcome:
    if token_id == _WITHHELD and sample.params.structured_output is not None:
        return InvalidArgument("structured_output", "every token that fits has probability 0")
    if token_id == _WITHHELD:
        return InvalidArgument("min_tokens", "every token that the model allows is withheld as a stop")
    if token_id == _INFINITE:
        return NonFiniteLogits("bias and penalties made the logits infinite")
    return token_id


def inverse_cdf(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """For each row the first id at which the running sum of weights passes draw * mass, int64 [R].

    weights: float32 [R, V], not negative, each row's sum positive. draws: float64 [R] in [0, 1). An id of
    weight 0 is never drawn.
    """
    num_rows, width = weights.shape
    run = run_length(width)
    cdf = mass_of_runs(weights)
    target = (draws * cdf[:, -1]).unsqueeze(-1)
    run_ids = torch.searchsorted(cdf, target, right=True)
    target = target - torch.nn.functional.pad(cdf, (1, 0)).gather(-1, run_ids)
    run_ids = run_ids.squeeze(-1)
    runs = weights.view(num_rows, width // run, run)
    inner = runs[torch.arange(num_rows, device=weights.device), run_ids].cumsum(-1, dtype=torch.float64)
    # The run's two sums may differ in their last bits; the target must not pass its last weight.
    target = torch.minimum(target, inner[:, -1:] * (1 - 2.0**-52))
    return run_ids * run + torch.searchsorted(inner, target, right=True).squeeze(-1)


def _edits(sample: SampleRow) -> bool:
    return bool(sample.banned_token_ids or sample.params.logit_bias or sample.params.needs_history)


def _edit(logits: torch.Tensor, samples: Sequence[tuple[int, SampleRow]], counts: CountsOfSequences) -> None:
    """Apply the biases, penalties and bans of samples to their rows of float32 logits [R, V], in place.

    Each of the three goes to all rows at once: a gather and a scatter over the flat logits, however many
    rows there are.
    """
    flat, width = logits.view(-1), logits.shape[-1]

    def places(ids_by_row: Iterable[tuple[int, Sequence[int] | Array]]) -> Array:
        """Where these ids of these rows lie in the flat logits, int64."""
        return np.concatenate([np.asarray(ids, dtype=np.int64) + row * width for row, ids in ids_by_row])

    biases = [(row, sample.params.logit_bias) for row, sample in samples if sample.params.logit_bias]
    if biases:
        added = np.array([value for _, pairs in biases for _, value in pairs], dtype=np.float32)
        biased = places((row, [token_id for token_id, _ in pairs]) for row, pairs in biases)
        flat.index_add_(0, *upload((biased, added), logits.device))
    seen = [(row, s.params, counts.of(s)) for row, s in samples if s.params.has_penalties]
    if seen:
        ids, factors, subtrahends = upload(
            (
                places((row, tokens.ids) for row, _, tokens in seen),
                np.concatenate([np.full(len(t.ids), p.repetition_penalty, np.float32) for _, p, t in seen]),
                np.concatenate([_subtrahends(params, tokens) for _, params, tokens in seen]),
            ),
            logits.device,
        )
        values = flat[ids]
        values = torch.where(values > 0, values / factors, values * factors)
        flat.scatter_(0, ids, values - subtrahends)
    bans = [(row, sample.banned_token_ids) for row, sample in samples if sample.banned_token_ids]
    if bans:
        (banned,) = upload((places(bans),), logits.device)
        flat.index_fill_(0, banned, -math.inf)


def _subtrahends(params: SamplingParams, tokens: TokenCounts) -> Array:
    """What presence and frequency penalties take from the logit of each token seen, float32 [k]."""
    counts = tokens.output_counts.astype(np.float32)
    return params.presence_penalty * np.minimum(counts, 1) + params.frequency_penalty * counts


def _draw(
    edited: torch.Tensor, best: torch.Tensor, samples: Sequence[SampleRow], positions: Sequence[int]
) -> list[int]:
    """One token id for each row of float32 logits [R, V] whose finite maxima are `best` [R]."""
    params = [sample.params for sample in samples]
    temperatures, min_p, top_k, top_p, draws = upload(
        (
            np.array([max(p.temperature, _SMALLEST_TEMPERATURE) for p in params], dtype=np.float32),
            np.array([p.min_p for p in params], dtype=np.float32),
            np.array([p.top_k for p in params], dtype=np.int64),
            np.array([p.top_p for p in params], dtype=np.float64),
            uniforms([s.seed for s in samples], [s.index for s in samples], positions),
        ),
        edited.device,
    )
    # The maximum goes first, so that a tiny temperature can only underflow: 0 / t stays 0.
    weights = torch.softmax((edited - best.unsqueeze(-1)).div_(temperatures.unsqueeze(-1)), -1)
    cut = [i for i, p in enumerate(params) if p.min_p > 0 or p.top_k > 0 or p.top_p < 1]
    if len(cut) == len(samples):
        truncate_(weights, min_p, top_k, top_p)
    elif cut:
        (cut_rows,) = upload((np.array(cut, dtype=np.int64),), edited.device)
        part = weights[cut_rows]
        truncate_(part, min_p[cut_rows], top_k[cut_rows], top_p[cut_rows])
        weights[cut_rows] = part
    ids: list[int] = inverse_cdf(weights, draws).tolist()
    return ids
