"""Log-probabilities of known tokens: which of a step's rows score which, and what becomes of their logits.

A row is gone through once, whatever it scores: behind a prompt that forks one row scores the first token of
every continuation. Logits of rows that score are made and used a few rows at a time at most, and not at all
where the head's product takes them in (`QuantisedOps.norm_scores`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from pageturner.kernels.known_tokens import KnownTokens, TokenScores
from pageturner.service.core.outputs import SampledSequence, SampledToken, SchedulerOutput, ScoreRun
from pageturner.service.errors import NonFiniteLogits
from pageturner.service.model.logprobs import largest, log_masses, row_maxima, told
from pageturner.service.model.upload import Array, upload

_CPU_TILE_ROWS = 32
"""More than of those that are drawn, so that threads wait less often for one another; with 64 at a time, the
temporaries cost more than that saves."""
_GPU_TILE_ROWS = 64
"""Few enough that their temporaries are a small part of the memory: 5 MB a row of 152,000 tokens."""
_HEAD_TILE_ROWS = {"cpu": 64, "cuda": 256}
"""Rows whose logits are there at a time: as many as make reading the head's weights worth it."""


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Which rows of a step score known tokens. Places are among the rows of which logits are wanted, int64.

    places: of the rows that score. sampled: of all others. known: what they score, in the order of `runs`.
    """

    runs: tuple[ScoreRun, ...]
    places: Array
    sampled: Array
    known: KnownTokens

    @classmethod
    def of(cls, output: SchedulerOutput) -> ScoredRows | None:
        """None where a step has none."""
        runs: list[ScoreRun] = []
        places: list[int] = []
        sampled: list[int] = []
        counts: list[int] = []
        row = 0
        for part in output.scheduled:
            if part.scored:
                num_scored = len(part.scored_rows)
                runs += part.scored
                places += range(row, row + num_scored)
                counts += [len(part.scored)] * num_scored  # one run, or at a fork many of one row
                row += num_scored
            num_sampled = part.num_drafts + 1 if part.samples else 0
            sampled += range(row, row + num_sampled)
            row += num_sampled
        if not runs:
            return None
        ids = np.fromiter(chain.from_iterable(run.token_ids for run in runs), dtype=np.int32)
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        assert starts[-1] == len(ids), f"{starts[-1]} tokens by rows, {len(ids)} by runs"
        known = KnownTokens(torch.from_numpy(starts), torch.from_numpy(ids), max(run.num_top for run in runs))
        return cls(tuple(runs), np.array(places, np.int64), np.array(sampled, np.int64), known)

    def results(self, scores: TokenScores) -> tuple[SampledSequence, ...]:
        """What each run yields: NonFiniteLogits where a row of it has no scores."""
        runs, known = self.runs, self.known
        counts = np.repeat([run.num_top for run in runs], [len(run.token_ids) for run in runs])
        (rows,) = upload((known.rows().numpy(),), scores.logprobs.device)
        tokens = told(
            known.token_ids.tolist(),
            scores.logprobs.unsqueeze(-1),
            scores.top_logprobs[rows],
            scores.top_ids[rows],
            counts.tolist(),
        )
        return tuple(_result(run, [next(tokens) for _ in run.token_ids]) for run in runs)


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What the sampler makes a step's results of. rows: logits [R, V] of those that are sampled from. scored,
    scores: of the others, if there are any."""

    rows: torch.Tensor
    scored: ScoredRows | None = None
    scores: TokenScores | None = None

    @classmethod
    def of(cls, logits: torch.Tensor, output: SchedulerOutput) -> StepLogits:
        """logits [R, V]: the rows of each part in order, those that score before what is sampled from."""
        scored = ScoredRows.of(output)
        if scored is None:
            return cls(logits)
        num_rows = len(scored.places) + len(scored.sampled)
        assert num_rows == len(logits), f"{len(logits)} rows of logits for {num_rows}"
        places, sampled = upload((scored.places, scored.sampled), logits.device)
        return cls(logits[sampled], scored, score_logits(logits[places], scored.known))

    def results(self) -> tuple[SampledSequence, ...]:
        """One for each ScoreRun."""
        if self.scored is None or self.scores is None:
            return ()
        return self.scored.results(self.scores)


def _result(run: ScoreRun, tokens: list[SampledToken]) -> SampledSequence:
    if any(token.logprob != token.logprob for token in tokens):
        error = NonFiniteLogits("the model produced NaN or infinite logits")
        return SampledSequence(run.seq_id, run.epoch, (), error)
    return SampledSequence(run.seq_id, run.epoch, (), scores=tuple(tokens))


def score_hidden(
    head: Callable[[slice], torch.Tensor], known: KnownTokens, device: torch.device
) -> TokenScores:
    """By a head that is asked for logits of a few rows at a time: no more of them are there at once."""
    size = _HEAD_TILE_ROWS["cpu" if device.type == "cpu" else "cuda"]
    pieces = []
    for first in range(0, known.num_rows, size):
        last = min(first + size, known.num_rows)
        pieces.append(score_logits(head(slice(first, last)), known.of_rows(first, last)))
    return _joined(pieces)


def score_logits(logits: torch.Tensor, known: KnownTokens, tile_rows: int | None = None) -> TokenScores:
    """logits [R, V], any float dtype, on any device, R > 0; where they are, in float32, the bits of a row by
    itself. tile_rows: whose float32 temporaries are made at a time."""
    if tile_rows is None:
        tile_rows = _CPU_TILE_ROWS if logits.device.type == "cpu" else _GPU_TILE_ROWS
    pieces = []
    for first in range(0, known.num_rows, tile_rows):
        last = min(first + tile_rows, known.num_rows)
        pieces.append(_tile(logits[first:last].float(), known.of_rows(first, last)))
    return _joined(pieces)


def _tile(logits: torch.Tensor, known: KnownTokens) -> TokenScores:
    """logits: float32 [R, V]."""
    best, best_ids = row_maxima(logits)
    masses = torch.where(torch.isfinite(best), log_masses(logits, best_ids), torch.nan)
    row, ids = upload((known.rows().numpy(), known.token_ids.long().numpy()), logits.device)
    values, top_ids = largest(logits, known.num_top)
    return TokenScores(logits[row, ids] - masses[row], values - masses.unsqueeze(-1), top_ids)


def _joined(pieces: list[TokenScores]) -> TokenScores:
    if len(pieces) == 1:
        return pieces[0]
    return TokenScores(
        torch.cat([piece.logprobs for piece in pieces]),
        torch.cat([piece.top_logprobs for piece in pieces]),
        torch.cat([piece.top_ids for piece in pieces]),
    )
