"""What the start-up probe refuses: models that by-pass us, and models made wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.random_models import tiny_model
from torch import nn
from transformers import PreTrainedModel

from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.torch_ops import TorchOps
from pageturner.service.errors import ModelError
from pageturner.service.model import probe
from pageturner.service.model.transformers_attention import AttentionCall
from pageturner.service.model.transformers_model import checked_model


def refusal(model: PreTrainedModel, *, max_position: int | None = None, deterministic: bool = False) -> str:
    ops = TorchOps(deterministic=deterministic)
    with pytest.raises(ModelError) as caught:
        checked_model(model, lambda _: ops, max_position=max_position, deterministic=deterministic)
    return str(caught.value)


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("Attention")]


@pytest.mark.parametrize("family", ["bloom", "falcon", "mpt", "gpt_neo"])
def test_models_that_bypass_the_interface_are_refused_by_name(family: str) -> None:
    assert refusal(tiny_model(family, 0)[1]) == (
        f"{family}: of 2 layers, 0 called for attention, 0 times in all"
    )


def test_rope_that_looks_at_the_longest_sequence_is_refused_where_it_could_switch() -> None:
    reason = refusal(tiny_model("phi3_longrope", 0)[1])
    assert reason.startswith("phi3: a row's logits change beside a row at position 255; RoPE that switches")
    assert refusal(tiny_model("phi3_longrope", 0)[1], max_position=65).startswith(
        "phi3: a row's logits change"
    )
    assert (
        checked_model(tiny_model("phi3_longrope", 0)[1], lambda _: TorchOps(), max_position=64).max_position
        == 64
    )


def test_long_prompts_under_longrope_are_refused_too() -> None:
    model = tiny_model("phi3_longrope", 0, original_max_position_embeddings=20)[1]
    assert refusal(model).startswith("phi3: logits differ from the plain model's (relative error")


# --- keywords lost ------------------------------------------------------------------------------------

LOST: dict[str, tuple[str, dict[str, object]]] = {
    "window": ("mistral_window", {"sliding_window": None}),
    "one of two windows": ("gemma2", {"sliding_window": None}),
    "chunk": ("llama4", {"chunk": None}),
    "soft cap": ("gemma2", {"logit_softcap": None}),
    "sinks": ("gpt_oss", {"sinks": None}),
    "scale": ("granite", {"scale": 8**-0.5}),
}


def lose(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    true_spec: Callable[[AttentionCall], AttentionSpec] = AttentionCall.spec
    monkeypatch.setattr(AttentionCall, "spec", lambda call: replace(true_spec(call), **changes))


@pytest.mark.parametrize("case", LOST)
def test_a_keyword_that_is_lost_is_found_out_by_the_logits(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, changes = LOST[case]
    lose(monkeypatch, **changes)
    monkeypatch.setattr(probe, "_check_same_keys", lambda *_: None)
    assert "logits differ from the plain model's" in refusal(tiny_model(family, 0)[1])


@pytest.mark.parametrize(
    ("family", "size", "changes"),
    [
        ("mistral_window", {"sliding_window": 4096}, {"sliding_window": None}),
        ("mistral_window", {"sliding_window": 4096}, {"sliding_window": 4097}),
        ("mistral_window", {"sliding_window": 4096}, {"sliding_window": 4095}),
        ("mistral_window", {"sliding_window": 1000}, {"sliding_window": None}),
        ("mistral", {}, {"sliding_window": 1000}),
        ("llama4", {"attention_chunk_size": 8192}, {"chunk": None}),
        ("llama4", {"attention_chunk_size": 8192}, {"chunk": None, "sliding_window": 8192}),
    ],
)
def test_windows_longer_than_any_probe_prompt_are_compared_with_the_mask(
    family: str, size: dict[str, Any], changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family, 0, max_position_embeddings=100_000, **size)[1]
    checked_model(tiny_model(family, 0, max_position_embeddings=100_000, **size)[1], lambda _: TorchOps())
    lose(monkeypatch, **changes)
    assert "the model's mask" in refusal(model)


# --- models made wrong --------------------------------------------------------------------------------


def test_a_layer_with_a_mask_of_its_own_is_refused() -> None:
    _, model = tiny_model("llama", 0)

    def with_bias(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
        rows = keywords["hidden_states"].shape[1]
        return args, keywords | {"attention_mask": torch.zeros(1, 1, rows, rows)}

    attention_modules(model)[1].register_forward_pre_hook(with_bias, with_kwargs=True)
    assert refusal(model) == "llama: a layer brings an attention mask of its own"


def test_a_keyword_that_we_do_not_know_is_refused() -> None:
    _, model = tiny_model("llama", 0)

    def with_bias(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
        return args, keywords | {"position_bias": torch.zeros(1)}

    attention_modules(model)[0].register_forward_pre_hook(with_bias, with_kwargs=True)
    assert refusal(model) == "llama: attention is given 'position_bias', which is not supported"


def test_attention_to_later_tokens_is_refused() -> None:
    _, model = tiny_model("llama", 0)
    module: Any = attention_modules(model)[1]
    module.is_causal = False
    assert refusal(model) == "llama: attention is not causal"


def test_layers_of_different_shapes_are_refused() -> None:
    _, model = tiny_model("llama", 0)
    module: Any = attention_modules(model)[1]
    for name in ("k_proj", "v_proj"):
        setattr(module, name, nn.Linear(32, 32, bias=False))
    module.num_key_value_groups = 1
    assert refusal(model) == "llama: layers differ in heads or their width: [(4, 2, 8, 8), (4, 4, 8, 8)]"


def test_a_layer_that_is_left_out_or_run_twice_is_refused() -> None:
    _, model = tiny_model("llama", 0)
    layers: Any = model.get_submodule("model.layers")
    layers[1] = layers[0]
    assert refusal(model) == "llama: of 2 layers, 1 called for attention, 2 times in all"


def test_positions_that_do_not_arrive_are_found_out() -> None:
    _, model = tiny_model("gpt2", 0)
    forward: Any = model.forward

    def without_positions(*, position_ids: torch.Tensor | None = None, **keywords: Any) -> Any:
        return forward(**keywords)

    model.forward = without_positions
    assert refusal(model).startswith("gpt2: logits differ from the plain model's")


def test_a_forward_that_fails_is_a_refusal() -> None:
    _, model = tiny_model("gpt2", 0)

    def broken(**_: Any) -> Any:
        raise RuntimeError("no flat batches here")

    model.forward = broken
    assert refusal(model) == "gpt2: its forward fails: RuntimeError: no flat batches here"


def test_logits_of_nan_are_a_refusal() -> None:
    _, model = tiny_model("gpt2", 0)
    model.get_submodule("transformer.ln_f").get_parameter("bias").fill_(torch.nan)
    assert "logits differ" in refusal(model)


def test_bits_that_depend_on_the_batch_are_a_refusal_in_deterministic_mode() -> None:
    def with_a_whiff_of_the_batch(_: nn.Module, __: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (1 + 1e-6 * hidden.shape[1])

    _, model = tiny_model("llama", 0)
    model.get_submodule("model.layers.0").register_forward_hook(with_a_whiff_of_the_batch)
    assert refusal(model, deterministic=True) == (
        "llama: deterministic: a row's bits depend on what shares its batch"
    )
    _, model = tiny_model("llama", 0)
    model.get_submodule("model.layers.0").register_forward_hook(with_a_whiff_of_the_batch)
    checked_model(model, lambda _: TorchOps())


@pytest.mark.parametrize("family", ["mixtral", "gpt2", "gpt_neox"])
def test_bfloat16_passes_where_it_is_right_and_only_there(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checked_model(tiny_model(family, 0)[1].bfloat16(), lambda _: TorchOps())
    assert model.dtype is torch.bfloat16
    lose(monkeypatch, scale=2.0)
    assert "logits differ" in refusal(tiny_model(family, 0)[1].bfloat16())


def test_a_model_without_a_longest_sequence_needs_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = tiny_model("llama", 0)
    del model.config.max_position_embeddings
    monkeypatch.delattr(type(model.config), "max_position_embeddings")
    assert refusal(model) == "llama: names no longest sequence; set model.max_position"
    assert checked_model(model, lambda _: TorchOps(), max_position=77).max_position == 77
