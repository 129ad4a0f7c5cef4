"""Whether a model's logits keep their bits whatever is batched with what; asked once, at start-up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pageturner.kernels.interface import PagedOps
from pageturner.kernels.layout import KvLayout
from pageturner.service.core.outputs import SampleRow, ScheduledSequence, SchedulerOutput
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.model.causal_model import CausalModel
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.model.runner import Runner

_LENGTHS = (24, 9, 3)
_STEPS: Sequence[Sequence[tuple[int, int, int]]] = (
    ((0, 0, 17), (1, 0, 8)),
    ((1, 8, 9), (2, 0, 3)),
    ((0, 17, 23),),
    ((0, 23, 24),),
)
"""(sequence, start, end) of each part: the sequences of _LENGTHS once more, in pieces, in another batch."""


def batch_variance(model: CausalModel, ops: PagedOps, block_size: int) -> str | None:
    """Three short sequences computed twice, together and in pieces: what is wrong if a bit differs."""
    layout = KvLayout(
        model.num_layers, model.num_kv_heads, model.head_dim, block_size, model.kv_dtype, ops.key_order
    )
    width = -(-max(_LENGTHS) // block_size)
    runner = Runner(model, KvCache(layout, width * len(_LENGTHS), 0, ops, model.device))

    def run(parts: Sequence[tuple[int, int, int]]) -> dict[int, torch.Tensor]:
        """The logits of each sequence that this step completes."""
        logits = runner.forward(SchedulerOutput(0, tuple(_part(model, width, *part) for part in parts)))
        return {
            sequence: row
            for (sequence, _, end), row in zip(parts, logits, strict=True)
            if end == _LENGTHS[sequence]
        }

    together = run([(sequence, 0, length) for sequence, length in enumerate(_LENGTHS)])
    for parts in _STEPS:
        for sequence, row in run(parts).items():
            if not torch.equal(row, together[sequence]):
                return f"{model.dtype} logits on this machine depend on what shares a batch"
    return None


def _part(model: CausalModel, width: int, sequence: int, start: int, end: int) -> ScheduledSequence:
    tokens = tuple((31 * sequence + 7 * position + 1) % model.vocab_size for position in range(start, end))
    table = tuple(range(sequence * width, (sequence + 1) * width))
    sample = SampleRow(sequence, 0, 0, 0, SamplingParams())
    return ScheduledSequence(sequence, str(sequence), 0, tokens, start, start, table, (sample,))
