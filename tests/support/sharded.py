"""One tiny model, whole and on several ranks, and steps that both take alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pageturner.kernels.cpu.forward import CpuDecoder
from pageturner.kernels.cpu.ops import CpuOps
from pageturner.kernels.cpu.quantised_ops import CpuQuantisedOps
from pageturner.kernels.interface import PagedOps
from pageturner.kernels.selection import QuantisedKernels
from pageturner.kernels.torch_ops import TorchOps
from pageturner.service.model.adapter_store import AdapterStore
from pageturner.service.model.build import BuiltModel, build_model
from pageturner.service.model.decoder import Decoder
from pageturner.service.model.loader import load_artifacts
from pageturner.service.model.options import ModelOptions, Quantization
from pageturner.service.model.tensor_parallel.collectives import ALONE, Collectives
from support.ops import cpu_library
from support.paged_sessions import PagedSession
from support.thread_ranks import on_ranks

BLOCK_SIZE = 16
Script = Callable[[PagedSession], torch.Tensor]
AdaptedScript = Callable[[PagedSession, Mapping[str, str]], torch.Tensor]
"""Is given the digest of each adapter."""


@dataclass(frozen=True)
class TinyModel:
    """In a folder. scheme: of its weights. cache: where they are packed. in_cpp: floats too are computed by
    the CPU's own operations."""

    folder: Path
    cache: Path
    scheme: Quantization = "none"
    deterministic: bool | None = None
    in_cpp: bool = False

    def build(self, collectives: Collectives = ALONE) -> BuiltModel:
        """This rank's part of it, the whole where there is one rank."""
        options = ModelOptions(
            source=str(self.folder),
            dtype="float32",
            quantization=self.scheme,
            kv_dtype="float32",
            deterministic=self.deterministic,
        )
        artifacts = load_artifacts(options, self.cache)
        if self.scheme == "none":
            ops: PagedOps = TorchOps(deterministic=bool(self.deterministic))
            if self.in_cpp:
                ops = CpuOps(cpu_library())
            return build_model(artifacts, options, BLOCK_SIZE, lambda _: ops, collectives=collectives)
        library = cpu_library()
        kernels = QuantisedKernels(CpuQuantisedOps(library), partial(CpuDecoder, library, num_threads=1))
        ops = CpuOps(library)
        return build_model(
            artifacts, options, BLOCK_SIZE, lambda _: ops, quantised=kernels, collectives=collectives
        )

    def run(self, script: Script, collectives: Collectives = ALONE) -> torch.Tensor:
        """The logits that a script gives on this rank."""
        built = self.build(collectives)
        return script(PagedSession(built.model, built.ops, block_size=BLOCK_SIZE, num_blocks=24))

    def run_adapted(
        self, script: AdaptedScript, adapters: Mapping[str, Path], collectives: Collectives = ALONE
    ) -> torch.Tensor:
        """Likewise, with adapters from their folders."""
        built = self.build(collectives)
        assert isinstance(built.model, Decoder)
        store, digests = AdapterStore(), {"": ""}
        for name, folder in adapters.items():
            weights = built.model.read_adapter(folder, 64, 1 << 30)
            store.put(weights)
            digests[name] = weights.digest
        session = PagedSession(built.model, built.ops, block_size=BLOCK_SIZE, num_blocks=24, adapters=store)
        return script(session, digests)

    def on_ranks(self, size: int, script: Script) -> list[torch.Tensor]:
        """The logits of each rank, as threads of this process."""
        return on_ranks(size, partial(self.run, script))


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
}


def tiny_sharded(family: str, folder: Path, scheme: Quantization = "none", **changes: Any) -> TinyModel:
    """8 query heads of 16 that read 4 KV heads, unless changed."""
    # Here, not above: processes of ranks make no models, and transformers takes seconds to import.
    from support.random_models import save, tiny_model

    _, model = tiny_model(family, 7, **(SIZES | changes))
    return TinyModel(save(model, folder / "model"), folder / "cache", scheme)


def tiny_adapters(family: str, folder: Path, **changes: Any) -> Mapping[str, Path]:
    """Three of them, for the model that `tiny_sharded` makes: of all modules, of some, of one layer alone."""
    from support.adapters import save_adapter
    from support.random_models import tiny_model

    _, model = tiny_model(family, 7, **(SIZES | changes))
    kinds: Mapping[str, dict[str, Any]] = {
        "all": {},
        "some": {"r": 9, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True},
        "one-layer": {"r": 2, "target_modules": ["o_proj", "k_proj", "up_proj"], "layers_to_transform": [0]},
    }
    return {
        name: save_adapter(model, folder / name, seed, **options)
        for seed, (name, options) in enumerate(kinds.items())
    }


def in_company(session: PagedSession, digests: Mapping[str, str]) -> torch.Tensor:
    """Sequences with adapters and without, in chunks beside others, one of them swapped out and in."""
    names = ("all", "", "some", "one-layer", "all")
    sequences = [session.add(tokens_of(seed, 19 + seed), digests[name]) for seed, name in enumerate(names)]
    first, second, third, fourth, fifth = sequences
    logits = [session.step([(first, 9), (second, 4)]), session.step([(third, 17), (first, 3), (fourth, 1)])]
    session.swap_out(first)
    logits.append(session.step([(second, 11), (fifth, 20), (fourth, 6)]))
    session.swap_in(first)
    logits.append(session.step([(each, 1) for each in sequences]))
    logits += [torch.stack(session.finish(each, 2)) for each in sequences]
    return torch.cat(logits)


def tokens_of(seed: int, count: int = 50) -> list[int]:
    """Below the vocabulary of tiny models."""
    return random.Random(seed).choices(range(128), k=count)


def in_chunks(session: PagedSession) -> torch.Tensor:
    """One sequence in chunks and token by token, beside others; with a prefix hit, a swap and a recompute."""
    tokens = tokens_of(1)
    first, second = session.add(tokens), session.add(tokens_of(2, 9))
    logits = [session.step([(first, 33)]), session.step([(second, 9), (first, 1)])]
    third = session.share(first, 2 * BLOCK_SIZE, [*tokens[:32], *tokens_of(3, 8)])
    logits.append(session.step([(third, 8), (first, 1)]))
    session.swap_out(first)
    session.drop(second)
    logits.append(session.step([(second, 5)]))
    session.swap_in(first)
    logits.append(session.step([(first, 10), (second, 4)]))
    logits.append(torch.stack(session.finish(first, 1)))
    return torch.cat(logits)


def greedy(count: int) -> Script:
    """The tokens that a greedy continuation of a prompt has, as numbers in one row."""

    def run(session: PagedSession) -> torch.Tensor:
        sequence = session.add(tokens_of(4, 12))
        logits = session.step([(sequence, 12)])
        for _ in range(count):
            sequence.tokens.append(int(logits[0].argmax()))
            logits = session.step([(sequence, 1)])
        return torch.tensor(sequence.tokens)

    return run


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of two logits."""
    return float((found - expected).abs().max())


def assert_alike(found: Sequence[torch.Tensor]) -> None:
    """All ranks have the same bits."""
    assert all(torch.equal(each, found[0]) for each in found)
