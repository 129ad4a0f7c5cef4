"""One decoder over one pool, run by decode graphs and without them: on the emulator's tape, or on a GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from pageturner.kernels.cuda.emulation.runtime import EmulatedRuntime
from pageturner.kernels.cuda.ops import CudaOps
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.service.model.decoder import Decoder, load_decoder
from pageturner.service.model.decoder_config import parse_decoder_config
from pageturner.service.model.graphs import DecodeGraphs, TorchGraphs
from pageturner.service.model.loader import WeightFiles
from pageturner.service.model.runner import Runner
from support.cuda_cases import gpu_launcher
from support.ops import cpu_cache_dir
from support.paged_sessions import PagedSequence, PagedSession
from support.random_models import VOCAB_SIZE, save, tiny_model
from support.tape_graphs import TapeGraphs

BLOCK_SIZE = 16
MAX_BLOCKS = 40
SIZES = (1, 2, 4, 8)


@dataclass
class ReplayedModel:
    """One model twice over one pool: by graphs, and without them."""

    session: PagedSession
    graphs: DecodeGraphs
    backend: TapeGraphs | TorchGraphs
    model: Decoder
    ops: CudaOps

    @property
    def pool(self) -> torch.Tensor:
        return self.session.kv_cache.pool

    def replayed_and_eager(self, work: Sequence[PagedSequence]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of one decode step by both. Both must leave the same pool."""
        output = self.session.output([(sequence, 1) for sequence in work])
        before = self.pool.clone()
        replayed = Runner(self.model, self.session.kv_cache, self.graphs).forward(output).clone()
        pool_after = self.pool.clone()
        self.pool.copy_(before)
        eager = Runner(self.model, self.session.kv_cache).forward(output)
        self.assert_equal(pool_after, self.pool)
        return replayed, eager

    def assert_equal(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """To the bit; on a GPU, whose products round differently for other numbers of rows, nearly."""
        near = (
            0.0 if isinstance(self.backend, TapeGraphs) else 0.03 * float(expected.nan_to_num().abs().max())
        )
        torch.testing.assert_close(found, expected, atol=near, rtol=0, equal_nan=True)

    @contextmanager
    def running(self, lengths: Sequence[int], seed: int = 0, ahead: int = 8) -> Iterator[list[PagedSequence]]:
        """Sequences that have `length` keys in the cache, random ones, and `ahead` tokens to come."""
        dice = random.Random(seed)
        noise = torch.Generator().manual_seed(seed)
        sequences = [self.session.add([dice.randrange(VOCAB_SIZE)] * (length + ahead)) for length in lengths]
        for sequence, length in zip(sequences, lengths, strict=True):
            self.session.output([(sequence, length)])  # deals its blocks
            blocks = self.pool[sequence.blocks]
            self.pool[sequence.blocks] = torch.randn(blocks.shape, generator=noise).to(blocks)
            sequence.tokens = [dice.randrange(VOCAB_SIZE) for _ in sequence.tokens]
        yield sequences
        for sequence in sequences:
            self.session.drop(sequence)


def build(
    folder: Path,
    sizes: Sequence[int] = SIZES,
    num_blocks: int = 400,
    *,
    on_gpu: bool = False,
    **changes: int,
) -> ReplayedModel:
    """A decoder of one layer with all keys and one with a window, two query heads on a kv head of 64.

    Skips the test where a GPU is wanted and the kernels can't run.
    """
    shape = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 40}
    config, model = tiny_model("qwen2_window", 5, max_position_embeddings=1024, **shape | changes)
    save(model, folder)
    launcher, backend = gpu_graphs() if on_gpu else taped_graphs()
    ops = CudaOps(launcher)
    decoder = load_decoder(
        parse_decoder_config(config.to_dict() | {"architectures": None}),
        WeightFiles([folder / "model.safetensors"]),
        ops,
        torch.bfloat16,
        device=ops.device,
    )
    session = PagedSession(decoder, ops, block_size=BLOCK_SIZE, num_blocks=num_blocks)
    session.withhold(0)  # the block that padding names
    graphs = DecodeGraphs(decoder, session.kv_cache, ops, backend, sizes, MAX_BLOCKS)
    return ReplayedModel(session, graphs, backend, decoder, ops)


def taped_graphs() -> tuple[Launcher, TapeGraphs]:
    tapes = TapeGraphs(EmulatedRuntime.cached(cpu_cache_dir()))
    return Launcher(tapes.runtime), tapes


def gpu_graphs() -> tuple[Launcher, TorchGraphs]:
    launcher = gpu_launcher()
    return launcher, TorchGraphs(launcher.runtime.device)
