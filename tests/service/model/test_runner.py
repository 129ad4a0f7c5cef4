"""A step through Runner, and tokens that were not known when it was planned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.paged_sessions import PagedSession
from support.random_models import VOCAB_SIZE, save, tiny_model

from pageturner.kernels.torch_ops import TorchOps
from pageturner.service.core.outputs import (
    UNKNOWN_TOKEN,
    BlockCopies,
    SampledSequence,
    SampledToken,
    SchedulerOutput,
)
from pageturner.service.model.decoder import load_decoder
from pageturner.service.model.decoder_config import parse_decoder_config
from pageturner.service.model.loader import WeightFiles


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> PagedSession:
    config, model = tiny_model("llama", 3)
    folder = save(model, tmp_path_factory.mktemp("llama"))
    ops = TorchOps()
    weights = WeightFiles([folder / "model.safetensors"])
    parsed = parse_decoder_config(config.to_dict() | {"architectures": None})
    return PagedSession(load_decoder(parsed, weights, ops, torch.float32), ops)


def test_only_sequences_that_sample_have_logits(session: PagedSession) -> None:
    first, second = session.add([1, 2, 3]), session.add([4, 5])
    output = session.output([(first, 3), (second, 2)])
    chunk = replace(output.scheduled[0], samples=())
    logits = session.runner.forward(SchedulerOutput(0, (chunk, output.scheduled[1])))
    assert logits.shape == (1, VOCAB_SIZE)
    assert torch.equal(logits, session.runner.forward(SchedulerOutput(0, (output.scheduled[1],))))
    assert session.runner.forward(SchedulerOutput(0, (chunk,))).shape == (0, VOCAB_SIZE)


def test_a_step_of_copies_alone_computes_nothing(session: PagedSession) -> None:
    output = SchedulerOutput(0, (), BlockCopies(clears=(0,)))
    assert session.runner.forward(output).shape == (0, VOCAB_SIZE)


def test_an_unknown_token_is_what_the_last_step_sampled_for_that_epoch(session: PagedSession) -> None:
    known = session.add([7, 8, 9, 10])
    expected = session.finish(known, 1)[-1]
    unknown = session.add([7, 8, 9, UNKNOWN_TOKEN])
    session.step([(unknown, 3)])
    sampled = SampledSequence(unknown.seq_id, 0, (SampledToken(10),))
    stale = SampledSequence(unknown.seq_id, 1, (SampledToken(99),))
    other = SampledSequence(known.seq_id, 0, (SampledToken(98),))
    session.runner.note_sampled([sampled, stale, other])
    torch.testing.assert_close(session.step([(unknown, 1)])[0], expected)
