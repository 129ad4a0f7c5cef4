"""A GGUF file written out as a transformers folder: the same weights, config and tokens."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.random_models import tiny_model
from support.tiny_gguf import write_gguf
from transformers import AutoModelForCausalLM

from pageturner.service.errors import ModelError
from pageturner.service.model.gguf_convert import convert
from pageturner.service.model.gguf_tokenizer import build_tokenizer
from pageturner.service.model.loader import read_folder
from pageturner.service.model.options import ModelOptions


def converted(tmp_path: Path, family: str, architecture: str, **changes: Any) -> Path:
    _, model = tiny_model(family, 5)
    folder = tmp_path / "folder"
    folder.mkdir()
    convert(write_gguf(model, tmp_path / "a.gguf", architecture, changes=changes), folder, torch.float32)
    return folder


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("llama", "llama"),
        ("llama_tied", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
    ],
)
def test_transformers_loads_the_model_that_was_written(
    family: str, architecture: str, tmp_path: Path
) -> None:
    config, model = tiny_model(family, 5)
    found = AutoModelForCausalLM.from_pretrained(converted(tmp_path, family, architecture))
    assert type(found) is type(model)
    for key in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "vocab_size"):
        assert getattr(found.config, key) == getattr(config, key)
    expected = model.state_dict()
    weights = found.state_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name


def test_the_tokenizer_and_its_special_tokens(tmp_path: Path) -> None:
    folder = converted(tmp_path, "llama", "llama")
    artifacts = read_folder("a.gguf", "a", folder, ModelOptions(source="a.gguf"))
    assert artifacts.eos_token_ids == (0, 1)
    assert (artifacts.bos_token, artifacts.special_tokens["eos_token"]) == ("<|turn|>", "<|end|>")
    assert not artifacts.add_bos
    assert artifacts.chat_template == "{{ messages[0]['content'] }}"
    assert artifacts.architecture == "LlamaForCausalLM"


def test_named_chat_templates_come_over(tmp_path: Path) -> None:
    named: dict[str, Any] = {
        "tokenizer.chat_template.tool_use": "{{ tools }}",
        "tokenizer.chat_template.rag": "{{ documents }}",
        "tokenizer.chat_templates": ["tool_use", "rag"],
    }
    artifacts = read_folder(
        "a.gguf", "a", converted(tmp_path, "llama", "llama", **named), ModelOptions(source="a.gguf")
    )
    assert artifacts.chat_template == "{{ messages[0]['content'] }}"
    assert artifacts.named_templates == {"tool_use": "{{ tools }}", "rag": "{{ documents }}"}


def test_named_chat_templates_need_no_default(tmp_path: Path) -> None:
    named: dict[str, Any] = {
        "tokenizer.chat_template": None,
        "tokenizer.chat_template.rag": "{{ documents }}",
    }
    artifacts = read_folder(
        "a.gguf", "a", converted(tmp_path, "llama", "llama", **named), ModelOptions(source="a.gguf")
    )
    assert artifacts.chat_template is None
    assert artifacts.named_templates == {"rag": "{{ documents }}"}


def fields(**changes: Any) -> dict[str, Any]:
    tokens = ["<|end|>", "<tool>", "1", "2", "h", "e", "l", "Ġ", "he", "12"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 4, *[1] * 8],
        "tokenizer.ggml.merges": ["h e", "1 2"],
        "tokenizer.ggml.bos_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


@pytest.mark.parametrize(
    ("pre", "ids"),
    [("smollm", [8, 7, 2, 3]), ("gpt-2", [8, 7, 9]), ("llama-bpe", [8, 7, 9]), ("qwen2", [8, 7, 2, 3])],
)
def test_the_pre_tokenizer_decides_on_digits(pre: str, ids: list[int]) -> None:
    assert build_tokenizer(fields(pre=pre)).encode("he 12", add_special_tokens=False).ids == ids


def test_special_tokens_are_whole_and_bos_comes_when_asked() -> None:
    tokenizer = build_tokenizer(fields(add_bos_token=True))
    assert tokenizer.encode("he<|end|><tool>1").ids == [0, 8, 0, 1, 2]
    assert tokenizer.encode("he", add_special_tokens=False).ids == [8]
    assert tokenizer.decode([8, 0, 1, 2]) == "he<tool>1"


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_pieces_are_those_of_sentencepiece(prefix: bool) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(Path(__file__).read_text(encoding="utf-8").splitlines()),
        model_writer=trained,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    size = theirs.vocab_size()
    kinds = [
        2 if theirs.is_unknown(i) else 3 if theirs.is_control(i) else 6 if theirs.is_byte(i) else 1
        for i in range(size)
    ]
    ours = build_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [theirs.id_to_piece(i) for i in range(size)],
            "tokenizer.ggml.scores": [theirs.get_score(i) for i in range(size)],
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.add_space_prefix": prefix,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.bos_token_id": 1,
        }
    )
    texts = [
        *Path(__file__).read_text(encoding="utf-8").splitlines(),
        "12 345",
        "日本語 😀",
        "a  b\tc\n",
        " x",
    ]
    for text in filter(None, texts):
        ids = theirs.encode(text)
        assert ours.encode(text).ids == [1, *ids], text
        assert ours.decode(ids) == text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"model": "bert"}, "'bert' tokenizer"), ({"pre": "jais"}, "'jais'"), ({"pre": None}, "pre-tokenizer")],
)
def test_an_unknown_tokenizer_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        build_tokenizer(fields(**changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"general.architecture": "bert"}, "architecture 'bert'"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.dimension_count": 4}, "rotated"),
        ({"llama.block_count": None}, "block_count"),
        ({"split.count": 3}, "split"),
        ({"tokenizer.ggml.merges": None}, "lacks 'tokenizer.ggml.merges'"),
        ({"llama.rope.scaling.type": "yarn"}, r"lacks 'llama\.rope\.scaling\.factor'"),
    ],
)
def test_what_would_run_wrong_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=reason):
        converted(tmp_path, "llama", "llama", **changes)


def test_scaled_rope_is_carried_over(tmp_path: Path) -> None:
    changes = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
    }
    folder = converted(tmp_path, "llama", "llama", **changes)
    config = read_folder("a", "a", folder, ModelOptions(source="a")).config
    assert config["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }


def llama3_factors(factor: float, trained: float) -> torch.Tensor:
    """As llama.cpp's converter computes them, for heads of 8 and a theta of 500,000."""
    factors = []
    for pair in range(4):
        turns = trained / (2 * math.pi * 500_000 ** (2 * pair / 8))
        smooth = (turns - 1) / (4 - 1)
        factors.append(1.0 if turns > 4 else factor if turns < 1 else 1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(factors)


def test_llama3_rope_is_recognised_by_its_factors(tmp_path: Path) -> None:
    _, model = tiny_model("llama", 5)

    def written(trained: float) -> Path:
        factors = {"rope_freqs.weight": llama3_factors(32, trained)}
        theta = {"llama.rope.freq_base": 500_000.0}
        return write_gguf(model, tmp_path / f"{trained}.gguf", "llama", changes=theta, extra=factors)

    (tmp_path / "folder").mkdir()
    convert(written(8192), tmp_path / "folder", torch.float32)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "folder").config.rope_parameters
    assert (found["rope_type"], found["factor"]) == ("llama3", 32.0)
    with pytest.raises(ModelError, match="rope frequencies"):
        convert(written(1024), tmp_path, torch.float32)
