"""Drives a causal model through Runner and KvCache by hand: any chunking, sharing and swapping.

Blocks are dealt in shuffled order, and every slot that no sequence owns holds NaN.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pageturner.kernels.interface import PagedOps
from pageturner.kernels.layout import KvLayout
from pageturner.service.core.outputs import (
    BlockCopies,
    BlockCopy,
    SampleRow,
    ScheduledSequence,
    SchedulerOutput,
)
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.model.adapter_store import AdapterStore
from pageturner.service.model.causal_model import CausalModel
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.model.runner import Runner
from pageturner.service.model.streams import Streams


@dataclass
class PagedSequence:
    """Known tokens, how many of them the cache holds, and where. shared: tokens it must not write."""

    seq_id: int
    tokens: list[int]
    num_computed: int = 0
    shared: int = 0
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    adapter: str = ""


class PagedSession:
    """A model, its operations, and a pool that starts as nothing but NaN."""

    def __init__(
        self,
        model: CausalModel,
        ops: PagedOps,
        *,
        block_size: int = 4,
        num_blocks: int = 96,
        seed: int = 0,
        streams: Streams | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        layout = KvLayout(
            model.num_layers, model.num_kv_heads, model.head_dim, block_size, model.kv_dtype, ops.key_order
        )
        self.kv_cache = KvCache(layout, num_blocks, num_blocks, ops, model.device, streams)
        for pool in (self.kv_cache.pool, self.kv_cache.host_pool):
            pool.view(torch.uint8).fill_(0xFF)  # NaN, of floats of any size, of scales too
        self.runner = Runner(model, self.kv_cache, adapters=adapters)
        self._block_size = block_size
        self._free = random.Random(seed).sample(range(num_blocks), num_blocks)
        self._free_host = random.Random(seed + 1).sample(range(num_blocks), num_blocks)
        self._num_sequences = 0

    def withhold(self, block: int) -> None:
        """Take a free block away from these sequences, as another request would."""
        self._free.remove(block)

    def add(self, tokens: Sequence[int], adapter: str = "") -> PagedSequence:
        self._num_sequences += 1
        return PagedSequence(self._num_sequences, list(tokens), adapter=adapter)

    def share(self, source: PagedSequence, num_tokens: int, tokens: Sequence[int]) -> PagedSequence:
        """A sequence that begins with the source's first blocks: a prefix hit of num_tokens (whole blocks).

        A hit of every token leaves the last one to be computed again, without writing it.
        """
        assert num_tokens % self._block_size == 0
        assert num_tokens <= source.num_computed
        sequence = self.add(tokens)
        sequence.blocks = source.blocks[: num_tokens // self._block_size]
        sequence.shared = num_tokens
        sequence.num_computed = min(num_tokens, len(tokens) - 1)
        return sequence

    def output(self, work: Sequence[tuple[PagedSequence, int]]) -> SchedulerOutput:
        """The step that computes the next `count` tokens of each sequence and samples after them."""
        scheduled = []
        for sequence, count in work:
            end = sequence.num_computed + count
            assert end <= len(sequence.tokens)
            while len(sequence.blocks) * self._block_size < end:
                sequence.blocks.append(self._free.pop())
            scheduled.append(
                ScheduledSequence(
                    seq_id=sequence.seq_id,
                    request_id=f"request-{sequence.seq_id}",
                    epoch=0,
                    token_ids=tuple(sequence.tokens[sequence.num_computed : end]),
                    start=sequence.num_computed,
                    write_start=max(sequence.num_computed, sequence.shared),
                    block_table=tuple(sequence.blocks),
                    samples=(SampleRow(sequence.seq_id, 0, 0, 0, SamplingParams()),),
                    adapter=sequence.adapter,
                )
            )
            sequence.num_computed = end
        return SchedulerOutput(0, tuple(scheduled))

    def step(self, work: Sequence[tuple[PagedSequence, int]]) -> torch.Tensor:
        """Logits [len(work), vocab_size] after the next `count` tokens of each sequence."""
        return self.runner.forward(self.output(work))

    def finish(self, sequence: PagedSequence, chunk: int) -> list[torch.Tensor]:
        """Compute what is left in chunks; the logits after each."""
        logits = []
        while sequence.num_computed < len(sequence.tokens):
            left = len(sequence.tokens) - sequence.num_computed
            logits.append(self.step([(sequence, min(chunk, left))])[0])
        return logits

    def swap_out(self, sequence: PagedSequence) -> None:
        """To the host; the device blocks it leaves go back and are poisoned."""
        sequence.host_blocks = [self._free_host.pop() for _ in sequence.blocks]
        self._copy(swap_outs=_copies(sequence.blocks, sequence.host_blocks))
        self._poison(sequence.blocks)
        self._free[:0] = sequence.blocks
        sequence.blocks = []

    def swap_in(self, sequence: PagedSequence) -> None:
        sequence.blocks = [self._free.pop() for _ in sequence.host_blocks]
        self._copy(swap_ins=_copies(sequence.host_blocks, sequence.blocks))
        self._poison_host(sequence.host_blocks)
        self._free_host[:0] = sequence.host_blocks
        sequence.host_blocks = []

    def drop(self, sequence: PagedSequence) -> None:
        """Preempted for recompute: its own blocks go back, poisoned."""
        own = sequence.blocks[sequence.shared // self._block_size :]
        self._poison(own)
        self._free[:0] = own
        sequence.blocks, sequence.num_computed, sequence.shared = [], 0, 0

    def _poison(self, blocks: Sequence[int]) -> None:
        pool = self.kv_cache.pool
        self.kv_cache.fences.compute(blocks, lambda: pool.__setitem__(list(blocks), math.nan))

    def _poison_host(self, blocks: Sequence[int]) -> None:
        """By copies in the order of their stream: a GPU may still be reading what they overwrite."""
        pool, host_pool = self.kv_cache.pool, self.kv_cache.host_pool

        def work() -> None:
            nothing = torch.full_like(pool[0], math.nan)
            for block in blocks:
                host_pool[block].copy_(nothing, non_blocking=True)

        self.kv_cache.fences.copy([], work)

    def _copy(self, swap_outs: tuple[BlockCopy, ...] = (), swap_ins: tuple[BlockCopy, ...] = ()) -> None:
        self.kv_cache.apply(BlockCopies(swap_outs=swap_outs, swap_ins=swap_ins))


def _copies(sources: Sequence[int], destinations: Sequence[int]) -> tuple[BlockCopy, ...]:
    return tuple(BlockCopy(*pair) for pair in zip(sources, destinations, strict=True))
