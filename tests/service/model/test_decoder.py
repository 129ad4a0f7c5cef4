"""The lean decoder against plain transformers: whole, chunked, decoded, shared, swapped, recomputed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.ops import BACKENDS
from support.paged_sessions import PagedSession
from support.random_models import VOCAB_SIZE, save, tiny_model
from transformers import PreTrainedModel

from pageturner.kernels.interface import PagedOps
from pageturner.kernels.reference import ReferenceOps
from pageturner.kernels.torch_ops import TorchOps
from pageturner.service.errors import ModelError
from pageturner.service.model.decoder import Decoder, load_decoder
from pageturner.service.model.decoder_config import NotLean, parse_decoder_config
from pageturner.service.model.loader import WeightFiles, read_folder
from pageturner.service.model.options import ModelOptions

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_bias": ("llama_bias", {}),
    "llama_tied": ("llama_tied", {}),
    "llama_llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama_yarn": ("llama", {"rope_parameters": _YARN}),
    "llama_linear": ("llama", {"rope_parameters": _LINEAR}),
    "mistral": ("mistral", {}),
    "mistral_window": ("mistral_window", {}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": ("qwen2_window", {}),
    "qwen3": ("qwen3", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
}
NUM_TOKENS = 50
TOLERANCE = 5e-5


def load(
    folder: Path,
    *,
    ops: PagedOps,
    dtype: torch.dtype = torch.float32,
    deterministic: bool = False,
) -> Decoder:
    artifacts = read_folder("test", "test", folder, ModelOptions(source="test"))
    return load_decoder(
        parse_decoder_config(artifacts.config),
        WeightFiles(artifacts.weight_files),
        ops,
        dtype,
        deterministic=deterministic,
    )


def tokens_of(seed: int, count: int = NUM_TOKENS) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab], all at once, without a cache."""
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert not found.isnan().any(), "a slot of no sequence was read"
    assert (found - expected).abs().max().item() < TOLERANCE


@pytest.fixture(scope="module", params=list(CASES))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, Path]:
    family, changes = CASES[request.param]
    _, model = tiny_model(family, 7, **changes)
    return model, save(model, tmp_path_factory.mktemp(request.param))


class TestAgainstTransformers:
    @pytest.mark.parametrize("chunk", [NUM_TOKENS, 7, 1])
    def test_every_chunking_gives_the_logits_of_the_plain_model(
        self, pair: tuple[PreTrainedModel, Path], chunk: int
    ) -> None:
        model, folder = pair
        ops = TorchOps()
        session = PagedSession(load(folder, ops=ops), ops)
        tokens = tokens_of(1)
        found = torch.stack(session.finish(session.add(tokens), chunk))
        ends = [min(end, NUM_TOKENS) - 1 for end in range(chunk, NUM_TOKENS + chunk, chunk)]
        assert_close(found, plain_logits(model, tokens)[ends])

    def test_a_ragged_batch_with_a_prefix_hit_a_swap_and_a_recompute(
        self, pair: tuple[PreTrainedModel, Path]
    ) -> None:
        model, folder = pair
        ops = TorchOps()
        session = PagedSession(load(folder, ops=ops), ops)
        first = session.add(tokens_of(1))
        session.step([(first, 21)])
        second = session.add(tokens_of(2, 30))
        hit = session.share(first, 12, tokens_of(1)[:12] + tokens_of(3, 9))
        whole_hit = session.share(first, 20, tokens_of(1)[:20])
        work = [(first, 1), (second, 13), (hit, 9), (whole_hit, 1)]
        found = [(s.tokens[: s.num_computed + n]) for s, n in work]
        for logits, tokens in zip(session.step(work), found, strict=True):
            assert_close(logits, plain_logits(model, tokens)[-1])

        session.swap_out(second)
        session.drop(hit)
        session.step([(first, 10)])
        session.swap_in(second)
        logits = session.step([(second, 3), (hit, 21), (first, 4)])
        for row, sequence in zip(logits, (second, hit, first), strict=True):
            assert_close(row, plain_logits(model, sequence.tokens[: sequence.num_computed])[-1])

    def test_the_reference_operations_give_the_same(self, pair: tuple[PreTrainedModel, Path]) -> None:
        model, folder = pair
        ops = ReferenceOps()
        session = PagedSession(load(folder, ops=ops), ops)
        sequence = session.add(tokens_of(4, 14))
        found = session.finish(sequence, 5)
        assert_close(torch.stack(found), plain_logits(model, sequence.tokens)[[4, 9, 13]])


def test_dynamic_rope_is_exact_up_to_the_trained_length(tmp_path: Path) -> None:
    _, model = tiny_model("llama_dynamic_rope", 7)
    ops = TorchOps()
    decoder = load(save(model, tmp_path), ops=ops)
    assert decoder.max_position == 24
    session = PagedSession(decoder, ops)
    sequence = session.add(tokens_of(1, 24))
    assert_close(
        torch.stack(session.finish(sequence, 11)), plain_logits(model, sequence.tokens)[[10, 21, 23]]
    )


_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.4],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 32,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize(
    ("parameters", "changes", "served", "num_tokens"),
    [
        (_DYNAMIC, {"max_position_embeddings": 24}, 60, 60),
        (_DYNAMIC, {"max_position_embeddings": 24}, None, 24),
        (_LONGROPE, {}, 100, 100),
        (_LONGROPE, {}, 100, 40),
        (_LONGROPE, {}, None, 32),
        (_LONGROPE | {"factor": 4.0, "attention_factor": 1.2}, {}, 64, 50),
    ],
)
def test_ropes_that_depend_on_the_length_are_those_of_the_longest_sequence(
    parameters: dict[str, Any], changes: dict[str, Any], served: int | None, num_tokens: int, tmp_path: Path
) -> None:
    _, model = tiny_model("llama", 7, rope_parameters=parameters, **changes)
    ops = TorchOps()
    folder = save(model, tmp_path)
    options = ModelOptions(source=str(folder), dtype="float32", max_position=served)
    artifacts = read_folder(str(folder), "tiny", folder, options)
    weights = WeightFiles(artifacts.weight_files)
    decoder = load_decoder(parse_decoder_config(artifacts.config), weights, ops, torch.float32)
    assert decoder.max_position == (served or num_tokens)
    session = PagedSession(decoder, ops)
    sequence = session.add(tokens_of(1, num_tokens))
    found = torch.stack(session.finish(sequence, 11))
    ends = [*range(10, num_tokens - 1, 11), num_tokens - 1]
    assert_close(found, plain_logits(model, sequence.tokens)[ends])


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        _LLAMA3,
    ],
)
def test_a_scaling_of_the_options_is_that_of_a_config(scaling: dict[str, Any], tmp_path: Path) -> None:
    """Far beyond the length that the model was trained for."""
    _, plain = tiny_model("llama", 7, max_position_embeddings=32)
    folder = save(plain, tmp_path)
    options = ModelOptions(source=str(folder), dtype="float32", rope_scaling=scaling)
    artifacts = read_folder(str(folder), "tiny", folder, options)
    ops = TorchOps()
    weights = WeightFiles(artifacts.weight_files)
    decoder = load_decoder(parse_decoder_config(artifacts.config), weights, ops, torch.float32)
    assert decoder.max_position == int(32 * scaling["factor"])
    parameters = {"rope_theta": 10000.0, "rope_type": scaling.get("type")} | scaling
    parameters |= {"original_max_position_embeddings": 32}
    _, stretched = tiny_model("llama", 7, max_position_embeddings=32, rope_parameters=parameters)
    session = PagedSession(decoder, ops)
    sequence = session.add(tokens_of(1, 90))
    found = torch.stack(session.finish(sequence, 30))
    assert_close(found, plain_logits(stretched, sequence.tokens)[[29, 59, 89]])


@pytest.mark.parametrize("name", ["llama_bias", "mistral_window", "qwen3"])
def test_the_compiled_operations_give_the_same(name: str, tmp_path: Path) -> None:
    family, changes = CASES[name]
    _, model = tiny_model(family, 7, **changes, head_dim=16)
    ops = BACKENDS["cpu-deterministic"]()
    session = PagedSession(load(save(model, tmp_path), ops=ops), ops, block_size=16)
    tokens = tokens_of(1)
    found = torch.stack(session.finish(session.add(tokens), 19))
    assert_close(found, plain_logits(model, tokens)[[18, 37, 49]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("llama_bias", "torch-deterministic"),
        ("mistral_window", "torch-deterministic"),
        ("qwen3", "torch-deterministic"),
        ("qwen3", "cpu-deterministic"),
    ],
)
def test_deterministic_logits_have_the_same_bits_in_every_batch(
    name: str, backend: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    family, changes = CASES[name]
    _, model = tiny_model(family, 7, **changes, **({"head_dim": 16} if "cpu" in backend else {}))
    ops = BACKENDS[backend]()
    decoder = load(save(model, tmp_path), ops=ops, dtype=dtype, deterministic=True)
    block_size = 16 if "cpu" in backend else 4
    alone = PagedSession(decoder, ops, block_size=block_size, seed=1)
    prompts = [tokens_of(seed, length) for seed, length in ((1, 50), (2, 33), (3, 17), (4, 3))]
    expected = [torch.stack(alone.finish(alone.add(prompt), 1)) for prompt in prompts]

    for seed in range(4):
        draw = random.Random(seed)
        together = PagedSession(decoder, ops, block_size=block_size, seed=seed + 2)
        sequences = [together.add(prompt) for prompt in prompts]
        while unfinished := [s for s in sequences if s.num_computed < len(s.tokens)]:
            chosen = draw.sample(unfinished, draw.randint(1, len(unfinished)))
            work = [(s, draw.randint(1, len(s.tokens) - s.num_computed)) for s in chosen]
            for logits, (sequence, _) in zip(together.step(work), work, strict=True):
                index = sequences.index(sequence)
                assert torch.equal(logits, expected[index][sequence.num_computed - 1])


class TestRefusals:
    @pytest.mark.parametrize("family", ["gemma2", "gpt2", "mixtral", "phi3", "phi3_longrope"])
    def test_other_architectures_are_not_lean(self, family: str) -> None:
        config, _ = tiny_model(family, 0)
        with pytest.raises(NotLean, match="model_type"):
            parse_decoder_config(config.to_dict())

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"hidden_act": "gelu"}, "hidden_act"),
            ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
            ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
            ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "short_factor"),
            ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
            ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
            ({"pretraining_tp": 2}, "pretraining_tp"),
            ({"num_key_value_heads": 3}, "kv heads"),
            ({"hidden_size": None}, "hidden_size"),
        ],
    )
    def test_a_config_that_is_not_understood_is_refused(self, changes: dict[str, Any], reason: str) -> None:
        config, _ = tiny_model("llama", 0)
        with pytest.raises(NotLean, match=reason):
            parse_decoder_config(config.to_dict() | changes)

    @pytest.mark.parametrize("family", ["mistral_window", "qwen2_window"])
    @pytest.mark.parametrize("window", [0, -1, 4096.0, 2**31])
    def test_a_window_is_a_number_of_keys(self, family: str, window: float) -> None:
        config, _ = tiny_model(family, 0)
        with pytest.raises(NotLean, match=f"sliding_window {window} is no number of keys"):
            parse_decoder_config(config.to_dict() | {"sliding_window": window})

    def test_a_weight_without_a_place_is_refused(self, tmp_path: Path) -> None:
        _, model = tiny_model("llama", 0)
        file = save(model, tmp_path) / "model.safetensors"
        save_file(load_file(file) | {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, file)
        with pytest.raises(ModelError, match=r"model\.layers\.0\.self_attn\.q_norm\.weight"):
            load(tmp_path, ops=TorchOps())

    def test_a_missing_and_a_misshapen_weight_are_named(self, tmp_path: Path) -> None:
        _, model = tiny_model("llama", 0)
        file = save(model, tmp_path) / "model.safetensors"
        weights = load_file(file)
        save_file({name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}, file)
        with pytest.raises(ModelError, match=r"lm_head\.weight"):
            load(tmp_path, ops=TorchOps())
        save_file(weights | {"model.norm.weight": torch.ones(3)}, file)
        with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(3,\)"):
            load(tmp_path, ops=TorchOps())
