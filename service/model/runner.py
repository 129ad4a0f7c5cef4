"""Runs a step's forward: SchedulerOutput -> logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pageturner.service.core.outputs import SampledSequence, ScheduledSequence, SchedulerOutput
from pageturner.service.model.adapter_store import AdapterStore
from pageturner.service.model.batch import ForwardBatch, build_batch
from pageturner.service.model.causal_model import CausalModel, ScoringModel
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.model.scores import ScoredRows, StepLogits

if TYPE_CHECKING:
    from pageturner.service.model.graphs import DecodeGraphs


class Runner:
    """A model over its KV cache. graphs: replay its forward where they can. adapters: that steps may have.

    A step scheduled before its predecessor was sampled holds UNKNOWN_TOKEN where the sampled token
    goes; `note_sampled`, called between the two forwards, says what that is.
    """

    def __init__(
        self,
        model: CausalModel,
        kv_cache: KvCache,
        graphs: DecodeGraphs | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        self.model = model
        self._adapters = adapters
        self._forward = model.forward if graphs is None else graphs.forward
        self._kv_cache = kv_cache
        self._sampled: Iterable[SampledSequence] = ()
        self._tokens: dict[tuple[int, int], int] | None = None

    @torch.inference_mode()
    def forward(self, output: SchedulerOutput) -> torch.Tensor:
        """Write the step's KV; logits [R, vocab_size] of every row that is scored or sampled from."""
        if not output.scheduled:
            return torch.empty(0, self.model.vocab_size, dtype=self.model.dtype, device=self._kv_cache.device)
        return self._forward(self._batch(output), self._kv_cache)

    @torch.inference_mode()
    def step(self, output: SchedulerOutput) -> StepLogits:
        """As `forward`, with scores of known tokens: by the model if it makes them, else of its logits."""
        scored = ScoredRows.of(output)
        if scored is None or not isinstance(self.model, ScoringModel):
            return StepLogits.of(self.forward(output), output)
        logits, scores = self.model.forward_scored(self._batch(output), self._kv_cache, scored)
        return StepLogits(logits, scored, scores)

    def _batch(self, output: SchedulerOutput) -> ForwardBatch:
        """The step's tensors, once what it reads is there."""
        batch = build_batch(output, self._kv_cache.layout.block_size, self._kv_cache.device, self._resolve)
        if self._adapters is not None and (adapters := self._adapters.bind(output)) is not None:
            batch = replace(batch, adapters=adapters)
        self._kv_cache.await_copies(batch.attention)
        return batch

    def note_sampled(self, sampled: Iterable[SampledSequence]) -> None:
        """The tokens of the step that ran last; those of the step before it are forgotten."""
        self._sampled, self._tokens = sampled, None

    def _resolve(self, sequence: ScheduledSequence) -> int:
        # A sequence that sampled nothing (non-finite logits) is computed once more in vain: any token.
        if self._tokens is None:
            self._tokens = {
                (result.seq_id, result.epoch): result.tokens[-1].token_id
                for result in self._sampled
                if result.tokens
            }
        return self._tokens.get((sequence.seq_id, sequence.epoch), 0)
