"""Models of `transformers` over the paged cache against the plain ones, family by family."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.ops import BACKENDS
from support.paged_sessions import PagedSession
from support.random_models import FAMILIES, VOCAB_SIZE, save, tiny_model
from transformers import LlamaForSequenceClassification

from pageturner.kernels.torch_ops import TorchOps
from pageturner.service.errors import ConfigError, ModelError
from pageturner.service.model import transformers_model
from pageturner.service.model.loader import read_folder
from pageturner.service.model.options import ModelOptions
from pageturner.service.model.transformers_model import (
    TransformersModel,
    checked_model,
    load_transformers_model,
)

# See test_transformers_probe.
REFUSED = ("phi3_longrope", "bloom", "falcon", "mpt", "gpt_neo")
# Beyond its trained length the frequencies depend on the longest sequence of a batch.
SHORT = ("llama_dynamic_rope",)
SERVED = tuple(family for family in FAMILIES if family not in REFUSED + SHORT)
# One of each kind: learned positions, partial RoPE, fused projections, soft caps, windows, experts,
# sinks, chunks, and values narrower than keys.
KINDS = (
    "gpt2",
    "gpt_neox",
    "phi3",
    "gemma2",
    "gemma3",
    "mistral_window",
    "mixtral",
    "gpt_oss",
    "llama4",
    "deepseek_v3",
)
LENGTH = 45


def tokens_of(seed: int, count: int = LENGTH) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


@cache
def plain_logits(family: str, seed: int, count: int = LENGTH) -> torch.Tensor:
    """[count, vocab] of tokens_of(seed, count), at once, by the model as `transformers` made it."""
    _, model = tiny_model(family, 0)
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens_of(seed, count)]), use_cache=False).logits
    return logits[0]


@cache
def paged_model(family: str) -> TransformersModel:
    _, model = tiny_model(family, 0)
    return checked_model(model, lambda _: TorchOps())


def session_of(family: str) -> PagedSession:
    model = paged_model(family)
    return PagedSession(model, model.ops)


def assert_near(found: torch.Tensor | Sequence[torch.Tensor], expected: torch.Tensor) -> None:
    rows = found if isinstance(found, torch.Tensor) else torch.stack(list(found))
    torch.testing.assert_close(rows, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", SERVED)
def test_whole_prefill_chunks_and_decode_steps_match_the_plain_model(family: str) -> None:
    session = session_of(family)
    expected = plain_logits(family, 1)
    assert_near(session.finish(session.add(tokens_of(1)), LENGTH), expected[-1:])
    assert_near(session.finish(session.add(tokens_of(1)), 7), expected[[6, 13, 20, 27, 34, 41, 44]])
    decoded = session.add(tokens_of(1))
    session.step([(decoded, 20)])
    assert_near(session.finish(decoded, 1), expected[20:])


@pytest.mark.parametrize("family", SERVED)
def test_ragged_batches_match_the_plain_model(family: str) -> None:
    session = session_of(family)
    lengths = {1: 45, 2: 17, 3: 30, 4: 1}
    sequences = {seed: session.add(tokens_of(seed, length)) for seed, length in lengths.items()}
    steps = [{1: 20, 2: 3}, {3: 9, 1: 1, 4: 1, 2: 13}, {2: 1, 1: 23, 3: 20}, {3: 1, 1: 1}]
    for step in steps:
        logits = session.step([(sequences[seed], count) for seed, count in step.items()])
        for seed, row in zip(step, logits, strict=True):
            assert_near(row, plain_logits(family, seed, lengths[seed])[sequences[seed].num_computed - 1])
    assert all(sequence.num_computed == len(sequence.tokens) for sequence in sequences.values())


@pytest.mark.parametrize("family", SHORT)
def test_what_is_served_up_to_its_trained_length_matches_the_plain_model(family: str) -> None:
    session = session_of(family)
    most = paged_model(family).max_position
    assert most < LENGTH
    long, short = (session.add(tokens_of(seed, count)) for seed, count in ((1, most), (2, 9)))
    session.step([(long, most - 4), (short, 3)])
    found = session.step([(long, 4), (short, 6)])
    for row, expected in zip(found, (plain_logits(family, 1, most), plain_logits(family, 2, 9)), strict=True):
        assert_near(row, expected[-1])


@pytest.mark.parametrize("family", KINDS)
def test_prefix_hits_swaps_and_recomputes_match_the_plain_model(family: str) -> None:
    session = session_of(family)
    expected = plain_logits(family, 1)
    first = session.add(tokens_of(1))
    session.step([(first, 31)])
    hit = session.share(first, 28, tokens_of(1))
    full_hit = session.share(first, 28, tokens_of(1)[:28])
    assert_near(session.step([(full_hit, 1)])[0], expected[27])
    assert_near(session.finish(hit, 9), expected[[36, 44]])

    session.swap_out(first)
    other = session.add(tokens_of(2))
    assert_near(session.finish(other, LENGTH), plain_logits(family, 2)[-1:])
    session.swap_in(first)
    assert_near(session.finish(first, 5), expected[[35, 40, 44]])

    session.drop(other)
    assert_near(session.finish(other, 16), plain_logits(family, 2)[[15, 31, 44]])


# What makes the heads of a family 16 wide, as tiled pages and the C++ operations want them.
WIDE: dict[str, dict[str, int]] = {
    "gpt2": {"n_embd": 64},
    "gpt_neox": {"hidden_size": 64},
    "gemma2": {"head_dim": 16},
    "mistral_window": {"head_dim": 16},
    "gpt_oss": {"head_dim": 16},
    "llama4": {"head_dim": 16},
    "deepseek_v3": {"qk_nope_head_dim": 12},
}


@pytest.mark.parametrize("family", WIDE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_gives_the_layers_what_they_ask_for(family: str, backend: str) -> None:
    _, plain = tiny_model(family, 0, **WIDE[family])
    with torch.inference_mode():
        expected = plain(input_ids=torch.tensor([tokens_of(1)]), use_cache=False).logits[0]
    _, hf_model = tiny_model(family, 0, **WIDE[family])
    model = checked_model(hf_model, lambda _: BACKENDS[backend]())
    session = PagedSession(model, model.ops, block_size=16)
    assert model.head_dim == 16
    assert_near(session.finish(session.add(tokens_of(1)), 19), expected[[18, 37, 44]])


def test_every_linear_is_packed() -> None:
    _, hf_model = tiny_model("mixtral", 0)
    kinds = [type(module) for module in hf_model.modules()]
    assert kinds.count(torch.nn.Linear) == 9, "q, k, v, o of two layers, and the head"
    checked_model(hf_model, lambda _: TorchOps())
    assert torch.nn.Linear not in [type(module) for module in hf_model.modules()]


def test_a_deterministic_model_gives_a_row_the_same_bits_in_every_batch() -> None:
    _, hf_model = tiny_model("phi3", 0)
    ops = TorchOps(deterministic=True)
    session = PagedSession(checked_model(hf_model, lambda _: ops, deterministic=True), ops)
    whole = session.finish(session.add(tokens_of(1)), LENGTH)[0]
    chunked, others = session.add(tokens_of(1)), session.add(tokens_of(2))
    session.step([(others, 3), (chunked, 13)])
    rows = [session.step([(chunked, 16), (others, 20)])[0], session.step([(others, 1), (chunked, 16)])[1]]
    assert torch.equal(rows[1], whole)
    assert not torch.equal(rows[0], whole)


def test_a_step_that_samples_nothing_yields_no_rows() -> None:
    session = session_of("gpt2")
    output = session.output([(session.add(tokens_of(1)), 5)])
    silent = replace(output, scheduled=tuple(replace(part, samples=()) for part in output.scheduled))
    assert session.runner.forward(silent).shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("family", "num_heads", "num_kv_heads", "head_dim"),
    [("gpt2", 4, 4, 8), ("phi3", 4, 2, 8), ("gpt_bigcode", 4, 1, 8), ("deepseek_v3", 4, 4, 12)],
)
def test_shapes_are_what_the_layers_use(
    family: str, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    model = paged_model(family)
    assert model.backend == "transformers"
    assert (model.num_layers, model.vocab_size, model.dtype) == (2, VOCAB_SIZE, torch.float32)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (num_heads, num_kv_heads, head_dim)
    assert model.num_parameters == sum(p.numel() for p in tiny_model(family, 0)[1].parameters())


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_a_saved_model_is_loaded_and_served(family: str, tmp_path: Path) -> None:
    _, hf_model = tiny_model(family, 0)
    artifacts = read_folder("test", "test", save(hf_model, tmp_path), ModelOptions(source="test"))
    model = load_transformers_model(artifacts, lambda _: TorchOps(), max_position=100)
    assert model.max_position == 100
    session = PagedSession(model, model.ops)
    assert_near(session.finish(session.add(tokens_of(1)), 30), plain_logits(family, 1)[[29, 44]])


@pytest.mark.fault("21")
def test_a_checkpoint_that_lacks_weights_is_refused_by_their_names(tmp_path: Path) -> None:
    _, hf_model = tiny_model("llama", 0)
    folder = save(hf_model, tmp_path)
    weights = load_file(folder / "model.safetensors")
    lost = ["model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.q_proj.weight"]
    save_file(
        {name: tensor for name, tensor in weights.items() if name not in lost},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    artifacts = read_folder("test", "holed", folder, ModelOptions(source="test"))
    with pytest.raises(ModelError, match=f"holed: the weights lack {', '.join(lost)}"):
        load_transformers_model(artifacts, lambda _: TorchOps())


@pytest.mark.fault("21")
def test_a_checkpoint_of_another_head_is_refused_for_the_head_it_lacks(tmp_path: Path) -> None:
    config, _ = tiny_model("llama", 0)
    config.num_labels, config.tie_word_embeddings = 2, False
    judge = LlamaForSequenceClassification(config)  # type: ignore[no-untyped-call]  # transformers is half typed
    folder = save(judge, tmp_path)
    artifacts = read_folder("test", "judge", folder, ModelOptions(source="test"))
    with pytest.raises(ModelError, match=r"the weights lack lm_head\.weight"):
        load_transformers_model(artifacts, lambda _: TorchOps())


@pytest.mark.fault("19")
def test_a_stretched_rope_is_served_beyond_max_position_embeddings(tmp_path: Path) -> None:
    _, hf_model = tiny_model("llama", 0)
    folder = save(hf_model, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    trained = config["max_position_embeddings"]
    config["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    config["rope_parameters"]["original_max_position_embeddings"] = trained
    (folder / "config.json").write_text(json.dumps(config))
    artifacts = read_folder("test", "long", folder, ModelOptions(source="test"))
    assert load_transformers_model(artifacts, lambda _: TorchOps()).max_position == 4 * trained


@pytest.mark.parametrize("nonsense", [{"sliding_window": 2.5}, {"query_pre_attn_scalar": 0}])
def test_a_config_that_makes_no_sense_is_refused_in_one_line(
    nonsense: dict[str, object], tmp_path: Path
) -> None:
    """transformers checks some fields by classes of its own, and divides by others."""
    _, hf_model = tiny_model("gemma2", 0)
    folder = save(hf_model, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | nonsense))
    artifacts = read_folder("test", "oddity", folder, ModelOptions(source="test"))
    with pytest.raises(ModelError, match=r"^transformers cannot read oddity: .*$"):
        load_transformers_model(artifacts, lambda _: TorchOps())


def test_a_model_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    _, hf_model = tiny_model("gpt2", 0)
    folder = save(hf_model, tmp_path)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"gpt2"', '"gpt2000"'))
    artifacts = read_folder("test", "oddity", folder, ModelOptions(source="test"))
    with pytest.raises(ModelError, match=r"cannot read oddity: .*gpt2000"):
        load_transformers_model(artifacts, lambda _: TorchOps())


# --- a scaling of the options ---------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "gpt_neox", "gemma2"])
@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 3.0}, {"type": "yarn", "factor": 4.0}])
def test_a_scaling_of_the_options_is_that_of_a_config(
    family: str, scaling: dict[str, Any], tmp_path: Path
) -> None:
    """Beyond the length that the model was trained for; a gpt_neox rotates a part of each head only."""
    _, plain = tiny_model(family, 7, max_position_embeddings=32)
    artifacts = read_folder("test", "short", save(plain, tmp_path), ModelOptions(source="test"))
    model = load_transformers_model(artifacts, lambda _: TorchOps(), rope_scaling=scaling)
    assert model.max_position == int(32 * scaling["factor"])
    parameters = plain.config.rope_parameters | {"rope_type": scaling.get("type")} | scaling
    parameters |= {"original_max_position_embeddings": 32}
    _, stretched = tiny_model(family, 7, max_position_embeddings=32, rope_parameters=parameters)
    with torch.inference_mode():
        expected = stretched(input_ids=torch.tensor([tokens_of(1, 90)]), use_cache=False).logits[0]
        unlike = plain(input_ids=torch.tensor([tokens_of(1, 90)]), use_cache=False).logits[0]
    assert not torch.allclose(expected[-1], unlike[-1], atol=0.01), "the scaling changes nothing here"
    session = PagedSession(model, model.ops)
    assert_near(session.finish(session.add(tokens_of(1, 90)), 30), expected[[29, 59, 89]])


@pytest.mark.parametrize(
    ("family", "scaling", "reason"),
    [
        ("mixtral", {"rope_type": "dynamic", "factor": 2.0}, "'dynamic' is not what transformers computes"),
        ("gpt2", {"rope_type": "linear", "factor": 2.0}, "the RoPE of gpt2 .* is none that one scaling"),
        ("gemma3", {"rope_type": "linear", "factor": 2.0}, "is none that one scaling stretches"),
    ],
)
def test_a_scaling_that_would_be_wrong_or_ignored_is_refused(
    family: str, scaling: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    artifacts = read_folder(
        "test", family, save(tiny_model(family, 0)[1], tmp_path), ModelOptions(source="t")
    )
    with pytest.raises(ConfigError, match=rf"^model\.rope_scaling: .*{reason}"):
        load_transformers_model(artifacts, lambda _: TorchOps(), rope_scaling=scaling)


def test_a_scaling_that_no_module_reads_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tiny_model("mixtral", 0)[1], tmp_path)
    artifacts = read_folder("test", "deaf", folder, ModelOptions(source="test"))
    monkeypatch.setattr(transformers_model, "stretch", lambda config, scaling: None)
    with pytest.raises(ConfigError, match="mixtral does not take it"):
        load_transformers_model(
            artifacts, lambda _: TorchOps(), rope_scaling={"rope_type": "yarn", "factor": 2.0}
        )
