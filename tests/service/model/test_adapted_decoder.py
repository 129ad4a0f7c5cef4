"""Several adapters and none in one batch: the logits of each as PEFT has them with its adapter alone."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import logits_by_peft, read, save_adapter
from support.ops import BACKENDS, cpu_library
from support.paged_sessions import PagedSequence, PagedSession
from support.random_models import VOCAB_SIZE, save, tiny_model

from pageturner.kernels.cpu.forward import CpuDecoder
from pageturner.kernels.cpu.ops import CpuOps
from pageturner.kernels.cpu.quantised_ops import CpuQuantisedOps
from pageturner.kernels.interface import PagedOps
from pageturner.service.core.outputs import SchedulerOutput
from pageturner.service.errors import AdapterError
from pageturner.service.model.adapter_store import AdapterStore
from pageturner.service.model.decoder import Decoder, load_decoder
from pageturner.service.model.decoder_config import DecoderConfig, parse_decoder_config
from pageturner.service.model.loader import WeightFiles, read_folder
from pageturner.service.model.options import ModelOptions
from pageturner.service.model.packed_file import PackedFile
from pageturner.service.model.packing import write_packed
from pageturner.service.model.quantised_decoder import QuantisedDecoder
from pageturner.service.model.quantised_products import load_quantised_products

ADAPTERS: Mapping[str, dict[str, Any]] = {
    "all": {},
    "attention": {"r": 8, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "first-layer": {"r": 2, "target_modules": ["o_proj", "down_proj", "up_proj"], "layers_to_transform": [0]},
    "patterns": {
        "rank_pattern": {"q_proj": 7, "1.mlp.down_proj": 3},
        "alpha_pattern": {"layers.1.*gate_proj": 1},
    },
    "by-pattern": {"target_modules": r".*\.1\.(self_attn\.k_proj|mlp\.gate_proj)"},
}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
MIX = ("all", "", "patterns", "attention", "all", "first-layer", "by-pattern", "")


@pytest.fixture(scope="module", params=["llama_bias", "qwen3"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def made(family: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Mapping[str, Path]]:
    """The model of `transformers`, its folder, and those of its adapters."""
    folder = tmp_path_factory.mktemp(family)
    _, model = tiny_model(family, 7, **SIZES)
    adapters = {
        name: save_adapter(model, folder / name, seed, **options)
        for seed, (name, options) in enumerate(ADAPTERS.items())
    }
    return model, save(model, folder / "model"), adapters


def config_of(folder: Path) -> DecoderConfig:
    return parse_decoder_config(read_folder("test", "test", folder, ModelOptions(source="test")).config)


def tokens_of(seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=11 + seed)


def stored(decoder: Decoder, adapters: Mapping[str, Path]) -> tuple[AdapterStore, Mapping[str, str]]:
    """A store of all of them, and the digest of each."""
    store, digests = AdapterStore(), {"": ""}
    for name, folder in adapters.items():
        weights = read(folder, decoder.config, decoder.low_rank)
        store.put(weights)
        digests[name] = weights.digest
    return store, digests


def mixed(session: PagedSession, digests: Mapping[str, str]) -> list[PagedSequence]:
    return [session.add(tokens_of(seed), digests[name]) for seed, name in enumerate(MIX)]


def in_pieces(session: PagedSession, sequences: list[PagedSequence]) -> list[torch.Tensor]:
    """The last logits of each, computed in chunks beside others in changing company."""
    dice = random.Random(3)
    last: dict[int, torch.Tensor] = {}
    while unfinished := [each for each in sequences if each.num_computed < len(each.tokens)]:
        chosen = dice.sample(unfinished, min(len(unfinished), dice.randint(1, 5)))
        work = [(each, min(dice.randint(1, 6), len(each.tokens) - each.num_computed)) for each in chosen]
        for (each, _), logits in zip(work, session.step(work), strict=True):
            last[each.seq_id] = logits
    return [last[each.seq_id] for each in sequences]


@pytest.mark.parametrize("backend", ["torch", "torch-deterministic", "cpu-deterministic"])
def test_each_request_has_the_logits_of_its_adapter_alone(
    backend: str, made: tuple[Any, Path, Mapping[str, Path]]
) -> None:
    model, folder, adapters = made
    ops: PagedOps = BACKENDS[backend]()
    weights = WeightFiles([folder / "model.safetensors"])
    decoder = load_decoder(config_of(folder), weights, ops, torch.float32)
    store, digests = stored(decoder, adapters)
    session = PagedSession(decoder, ops, block_size=16, adapters=store)
    for seed, (name, logits) in enumerate(zip(MIX, in_pieces(session, mixed(session, digests)), strict=True)):
        expected = logits_by_peft(model, adapters.get(name), tokens_of(seed))[-1]
        assert torch.allclose(logits, expected, rtol=0, atol=2e-5), (seed, name)
        if name:
            plain = logits_by_peft(model, None, tokens_of(seed))[-1]
            assert (plain - expected).abs().max() > 0.1, "the adapter changes the answer"


def quantised(folder: Path, into: Path, kv_dtype: torch.dtype, *, is_whole: bool) -> tuple[Decoder, PagedOps]:
    config, library = config_of(folder), cpu_library()
    if not into.exists():
        into.mkdir()
        write_packed(config, WeightFiles([folder / "model.safetensors"]), "int8", into)
    products = load_quantised_products("int8", config, PackedFile(into), CpuQuantisedOps(library), kv_dtype)
    ops = CpuOps(library)
    if not is_whole:
        return Decoder(config, products, ops), ops
    return QuantisedDecoder(
        config, products, ops, make_whole=lambda given: CpuDecoder(library, given, 2)
    ), ops


def test_the_one_call_gives_the_bits_of_its_operations(
    made: tuple[Any, Path, Mapping[str, Path]], tmp_path: Path
) -> None:
    """And a row's bits hang on its tokens and its adapter alone: the calls are of other batches."""
    _, folder, adapters = made
    results = []
    for is_whole in (True, False):
        decoder, ops = quantised(folder, tmp_path / "packed", torch.bfloat16, is_whole=is_whole)
        store, digests = stored(decoder, adapters)
        session = PagedSession(decoder, ops, block_size=16, adapters=store)
        sequences = mixed(session, digests)
        if is_whole:
            results.append(in_pieces(session, sequences))
        else:
            results.append(list(session.step([(each, len(each.tokens)) for each in sequences])))
    for whole, plain in zip(*results, strict=True):
        assert torch.equal(whole, plain)


def test_quantised_it_stays_near(made: tuple[Any, Path, Mapping[str, Path]], tmp_path: Path) -> None:
    model, folder, adapters = made
    decoder, ops = quantised(folder, tmp_path / "packed", torch.float32, is_whole=True)
    store, digests = stored(decoder, adapters)
    session = PagedSession(decoder, ops, block_size=16, adapters=store)
    for seed, (name, logits) in enumerate(zip(MIX, in_pieces(session, mixed(session, digests)), strict=True)):
        expected = logits_by_peft(model, adapters.get(name), tokens_of(seed))[-1]
        # Of 30 texts the model without any is off by up to 0.14: so few layers and channels average little.
        assert (logits - expected).norm() < 0.2 * expected.norm(), name


def test_an_adapter_that_was_dropped_fails_its_step_alone(
    made: tuple[Any, Path, Mapping[str, Path]], tmp_path: Path
) -> None:
    _, folder, adapters = made
    decoder, ops = quantised(folder, tmp_path / "packed", torch.float32, is_whole=True)
    store, digests = stored(decoder, adapters)
    session = PagedSession(decoder, ops, block_size=16, adapters=store)
    adapted, plain = session.add(tokens_of(1), digests["all"]), session.add(tokens_of(2))
    output = session.output([(adapted, 3), (plain, 3)])
    for digest in filter(None, digests.values()):  # a store without any is no other case
        store.drop(digest)
    with pytest.raises(AdapterError, match="not in memory"):
        session.runner.forward(output)
    assert len(session.runner.forward(SchedulerOutput(1, output.scheduled[1:]))) == 1
