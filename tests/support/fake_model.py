"""A model whose every token is a hash of what it reads through the block table.

It runs behind the real KvCache, BlockCopy traffic and slot mapping. Each computed position stores
(token, position, chain) in every layer's keys and values, where chain folds in the stored chain of the
position before. The next token hashes all that the table yields for the whole sequence. So any block that
is lost, stale, shared wrongly, copied late or written twice shows as a different token, and `expected_tokens`
says, without any cache, which token is right.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from pageturner.kernels.layout import KvLayout
from pageturner.kernels.torch_ops import TorchOps
from pageturner.service.core.outputs import (
    SampledSequence,
    SampledToken,
    SampleRow,
    ScheduledSequence,
    SchedulerOutput,
    ScoreRun,
    TokenLogprob,
)
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.errors import NonFiniteLogits
from pageturner.service.model.batch import build_batch
from pageturner.service.model.kv_cache import KvCache

NUM_LAYERS = 2
RECORD = 3  # token, position, chain
CHAIN_MODULUS = 1 << 22  # float32 holds such integers exactly
ALPHABET = 3
BEAM_ALPHABET = 7
"""Tokens that a beam is offered, so that there are enough of them beside those that stop."""

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def first_chain(adapter: str) -> float:
    """What the chain of a sequence begins with: an adapter changes the KV of every position."""
    digest = hashlib.blake2b(adapter.encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") % CHAIN_MODULUS) if adapter else 0.0


def next_chain(chain: float, token: int, position: int) -> float:
    return float((int(chain) * 31 + token * 7 + position * 13 + 1) % CHAIN_MODULUS)


def next_token(content: Array, seed: int, index: int, position: int, banned: tuple[int, ...]) -> int:
    """content: float32 [positions, NUM_LAYERS, 2, RECORD] as read."""
    allowed = [token for token in range(ALPHABET) if token not in banned]
    digest = hashlib.blake2b(content.tobytes(), digest_size=8)
    digest.update(f"{seed}/{index}/{position}".encode())
    return allowed[int.from_bytes(digest.digest(), "little") % len(allowed)]


def candidates_of(content: Array, alphabet: int = BEAM_ALPHABET) -> list[TokenLogprob]:
    """What may continue a beam of this content, the likeliest first; ties, which are many, by the lower id.

    The log-probabilities are whole sixteenths, so that no order of sums rounds; they sum to no 1.
    """
    digest = hashlib.blake2b(content.tobytes(), digest_size=alphabet).digest()
    offered = [TokenLogprob(token, -(byte % 48 + 1) / 16) for token, byte in enumerate(digest)]
    return sorted(offered, key=lambda candidate: (-candidate.logprob, candidate.token_id))


def asked_candidates(ranked: list[TokenLogprob], params: SamplingParams) -> tuple[SampledToken, ...]:
    """What a beam's row is given of these, and no more: the `width` likeliest, and as many that go on."""
    assert params.beam_search is not None
    width, stops = params.beam_search.width, params.stop_token_ids
    going_on = [candidate for candidate in ranked if candidate.token_id not in stops][:width]
    top = tuple(candidate for candidate in ranked if candidate in ranked[:width] or candidate in going_on)
    return tuple(SampledToken(best.token_id, best.logprob, top) for best in top[:1])


def score_of(content: Array, token: int) -> float:
    """The log-probability of `token` behind what was read; content: as `next_token`'s."""
    digest = hashlib.blake2b(content.tobytes(), digest_size=8)
    digest.update(f"score/{token}".encode())
    return -float(int.from_bytes(digest.digest(), "little") % 4096) / 256


def content_of(tokens: list[int], adapter: str = "") -> Array:
    """What an uncorrupted cache holds for `tokens`."""
    chain = first_chain(adapter)
    records = []
    for position, token in enumerate(tokens):
        chain = next_chain(chain, token, position)
        records.append((token, position, chain))
    per_position = np.array(records, dtype=np.float32).reshape(len(tokens), 1, 1, RECORD)
    return np.ascontiguousarray(np.broadcast_to(per_position, (len(tokens), NUM_LAYERS, 2, RECORD)))


@dataclass(frozen=True, slots=True)
class Stop:
    """How the fake request ends: these tokens from `min_tokens` on, or max_tokens."""

    max_tokens: int
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()


def expected_tokens(
    prompt: tuple[int, ...],
    seed: int,
    index: int,
    stop: Stop,
    adapter: str = "",
    window: int | None = None,
) -> list[int]:
    """Outputs of one choice with unlimited memory and no scheduler. window: positions that each one sees."""
    tokens = list(prompt)
    for num_outputs in range(stop.max_tokens):
        banned = stop.stop_ids if num_outputs < stop.min_tokens else ()
        seen = content_of(tokens, adapter)[-(window or 0) :]
        token = next_token(seen, seed, index, len(tokens), banned)
        tokens.append(token)
        if token in stop.stop_ids and num_outputs + 1 >= stop.min_tokens:
            break
    return tokens[len(prompt) :]


def expected_score(tokens: list[int], window: int | None = None) -> float:
    """The log-probability of the last of these tokens behind the others that it sees."""
    return score_of(content_of(tokens[:-1])[-(window or 0) :], tokens[-1])


class FakeModel:
    """forward and sample in one; poison: seq ids whose logits are non-finite. window: positions that each one
    sees, None for all."""

    def __init__(
        self, num_blocks: int, num_host_blocks: int, block_size: int, window: int | None = None
    ) -> None:
        assert window != 1, "a position takes its chain from the one before it"
        self.window = window
        layout = KvLayout(NUM_LAYERS, 1, RECORD, block_size, torch.float32)
        self.block_size = block_size
        self.kv_cache = KvCache(layout, num_blocks, num_host_blocks, TorchOps(), torch.device("cpu"))
        self.poisoned_requests: set[str] = set()
        self._pool: Array = self.kv_cache.pool.numpy()[:, :, :, 0]  # [blocks, layers, 2, block_size, RECORD]
        self._host_pool: Array = self.kv_cache.host_pool.numpy()
        self._sampled: dict[tuple[int, int], int] = {}
        self._pool[:] = np.nan
        self._host_pool[:] = np.nan

    def run(self, output: SchedulerOutput) -> tuple[SampledSequence, ...]:
        self.kv_cache.apply(output.block_copies)
        return self.compute(output)

    def compute(self, output: SchedulerOutput) -> tuple[SampledSequence, ...]:
        """The rest of `run`, once the step's block traffic is carried out."""
        if not output.scheduled:
            return ()
        batch = build_batch(output, self.block_size, torch.device("cpu"), self._resolve)
        token_ids = batch.token_ids.numpy()
        slots = batch.attention.slot_mapping.numpy()
        results: list[SampledSequence] = []
        first = 0
        for sequence in output.scheduled:
            last = first + len(sequence.token_ids)
            self._compute(sequence, token_ids[first:last], slots[first:last])
            first = last
        for sequence in output.scheduled:
            results += [self._score(sequence, run) for run in sequence.scored]
        for sequence in output.scheduled:
            results += [self._sample(sequence, row) for row in sequence.samples]
        self._sampled = {(r.seq_id, r.epoch): r.tokens[-1].token_id for r in results if r.tokens}
        return tuple(results)

    def poison(self, device_blocks: set[int], host_blocks: set[int]) -> None:
        """Fill these blocks, which no table names, with NaN."""
        self._pool[sorted(device_blocks)] = np.nan
        self._host_pool[sorted(host_blocks)] = np.nan

    def _resolve(self, sequence: ScheduledSequence) -> int:
        return self._sampled.get((sequence.seq_id, sequence.epoch), 0)

    def _compute(self, sequence: ScheduledSequence, tokens: Array, slots: Array) -> None:
        for position, token, slot in zip(
            range(sequence.start, sequence.end), tokens.tolist(), slots.tolist(), strict=True
        ):
            if slot < 0:
                continue
            chain = first_chain(sequence.adapter)
            if position:
                before = self._read(sequence, position - 1, position)[0, 0, 0, 2]
                chain = float(before) if np.isfinite(before) else -1.0
            block, offset = divmod(int(slot), self.block_size)
            self._pool[block, :, :, offset] = (token, position, next_chain(chain, int(token), position))

    def _read(self, sequence: ScheduledSequence, first: int, last: int) -> Array:
        """[last - first, layers, 2, RECORD], through the table."""
        positions = np.arange(first, last)
        blocks = np.array(sequence.block_table)[positions // self.block_size]
        assert (blocks >= 0).all(), f"window: {sequence.block_table} lacks a block of {first} to {last}"
        return self._pool[blocks, :, :, positions % self.block_size]

    def _score(self, sequence: ScheduledSequence, run: ScoreRun) -> SampledSequence:
        if sequence.request_id in self.poisoned_requests:
            return SampledSequence(run.seq_id, run.epoch, (), NonFiniteLogits("poisoned"))
        scores = []
        for row, token_id in enumerate(run.token_ids, run.start):
            assert sequence.start <= row < sequence.end, f"row {row} is scored and not computed"
            content = self._content(sequence, row + 1)
            ranked = sorted(range(ALPHABET), key=lambda token: -score_of(content, token))[: run.num_top]
            top = tuple(TokenLogprob(token, score_of(content, token)) for token in ranked)
            scores.append(SampledToken(token_id, score_of(content, token_id), top))
        return SampledSequence(run.seq_id, run.epoch, (), scores=tuple(scores))

    def _sample(self, sequence: ScheduledSequence, row: SampleRow) -> SampledSequence:
        if sequence.request_id in self.poisoned_requests:
            return SampledSequence(row.seq_id, row.epoch, (), NonFiniteLogits("poisoned"))
        if row.params.beam_search is not None:
            ranked = candidates_of(self._content(sequence, sequence.end))
            return SampledSequence(row.seq_id, row.epoch, asked_candidates(ranked, row.params))
        tokens: tuple[SampledToken, ...] = ()
        for position in range(sequence.end - sequence.num_drafts, sequence.end + 1):
            content = self._content(sequence, position)
            token = next_token(content, row.seed, row.index, position, row.banned_token_ids)
            tokens += (SampledToken(token),)
            place = position - sequence.start
            if place >= len(sequence.token_ids) or sequence.token_ids[place] != token:
                break
        return SampledSequence(row.seq_id, row.epoch, tokens)

    def _content(self, sequence: ScheduledSequence, position: int) -> Array:
        """All before this position that it sees, as the table yields it."""
        first = 0 if self.window is None else max(0, position - self.window)
        return np.ascontiguousarray(self._read(sequence, first, position))
