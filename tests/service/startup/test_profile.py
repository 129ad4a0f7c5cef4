"""The steps whose memory is measured are the largest that the limits allow, and run to their end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.random_models import VOCAB_SIZE, save, tiny_model

from pageturner.kernels.layout import KvLayout
from pageturner.kernels.torch_ops import TorchOps
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.outputs import SampledSequence, SchedulerOutput
from pageturner.service.model.decoder import load_decoder
from pageturner.service.model.decoder_config import parse_decoder_config
from pageturner.service.model.loader import WeightFiles
from pageturner.service.model.sampler import Sampler
from pageturner.service.model.scores import StepLogits
from pageturner.service.startup.profile import largest_step, run_largest_steps


@pytest.mark.parametrize(
    ("tokens", "length", "num_sequences"), [(512, 2048, 64), (100, 2048, 7), (300, 128, 3), (5, 64, 5)]
)
def test_every_token_of_the_budget_is_computed_at_the_longest_context(
    tokens: int, length: int, num_sequences: int
) -> None:
    limits = SchedulerOptions(max_model_len=length, max_num_batched_tokens=tokens)
    step = largest_step(limits, num_sequences, block_size=16)
    assert step.num_tokens == tokens
    assert len(step.scheduled) == num_sequences
    for sequence in step.scheduled:
        assert sequence.end == length
        assert len(sequence.block_table) * 16 >= length
        assert sequence.samples


class Watching(Sampler):
    """Remembers what it sampled."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE)
        self.seen: list[tuple[SampledSequence, ...]] = []

    def sample(
        self, logits: torch.Tensor | StepLogits, output: SchedulerOutput
    ) -> tuple[SampledSequence, ...]:
        self.seen.append(super().sample(logits, output))
        return self.seen[-1]


def test_the_largest_steps_choose_a_token_for_every_sequence(tmp_path: Path) -> None:
    config, model = tiny_model("llama", 3)
    weights = WeightFiles([save(model, tmp_path) / "model.safetensors"])
    ops = TorchOps()
    parsed = parse_decoder_config(config.to_dict() | {"architectures": None})
    decoder = load_decoder(parsed, weights, ops, torch.float32)
    layout = KvLayout(decoder.num_layers, decoder.num_kv_heads, decoder.head_dim, 16, decoder.dtype)
    limits = SchedulerOptions(max_model_len=48, max_num_seqs=6, max_num_batched_tokens=80)
    sampler = Watching()
    run_largest_steps(decoder, layout, ops, limits, sampler)
    assert [sum(bool(each.tokens) for each in sampled) for sampled in sampler.seen] == [6, 2]
    assert [sum(len(each.scores) for each in sampled) for sampled in sampler.seen] == [74, 78]
    assert all(result.error is None for sampled in sampler.seen for result in sampled)
