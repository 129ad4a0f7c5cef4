"""Quantised weights through the whole engine: the bits of a stream don't depend on its company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.random_models import save, tiny_model
from support.tiny_tokenizers import byte_level_bpe

from pageturner.service.llm import LLM

OPTIONS: Any = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.0, "logprobs": 1}
PROMPTS = [[7 * request + 3 * place + 5 for place in range(10 + 3 * request)] for request in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of sizes that groups divide, and heads that the CPU's operations take."""
    tokenizer = byte_level_bpe()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 256}
    _, model = tiny_model("llama", 0, vocab_size=tokenizer.get_vocab_size(), **sizes)
    path = save(model, tmp_path_factory.mktemp("tiny"))
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def model_of(folder: Path) -> dict[str, object]:
    return {"source": str(folder), "device": "cpu", "quantization": "int8"}


def answers(folder: Path, **cache: Any) -> tuple[list[Any], int]:
    """(tokens with their log-probabilities, preemptions) of all prompts at once."""
    with LLM(model_of(folder), cache={"enable_prefix_caching": False} | cache) as llm:
        assert llm.model.deterministic
        completions = llm.generate(PROMPTS, **OPTIONS)
        load = llm.load()
    choices = [[(token.token_id, token.logprob) for token in each.choices[0].tokens] for each in completions]
    return choices, load.num_swap_preemptions_total + load.num_recompute_preemptions_total


@pytest.mark.parametrize("swap_space", [0, 1 << 24])
def test_a_tiny_pool_gives_the_bits_of_an_ample_one(folder: Path, swap_space: int) -> None:
    ample, untouched = answers(folder, num_blocks=256, swap_space=0)
    tiny, preempted = answers(folder, num_blocks=12, swap_space=swap_space)
    assert untouched == 0
    assert preempted > 0
    assert tiny == ample


def test_alone_or_together_a_stream_has_the_same_bits(folder: Path) -> None:
    together, _ = answers(folder, num_blocks=256, swap_space=0)
    with LLM(
        {"source": str(folder), "device": "cpu", "quantization": "int8"}, cache={"num_blocks": 64}
    ) as llm:
        alone = llm.generate([PROMPTS[3]], **OPTIONS)
        info = llm.info()
    assert [(token.token_id, token.logprob) for token in alone[0].choices[0].tokens] == together[3]
    assert (info.products.name, info.products.reason) == ("int8", "the configuration names it")
    assert {found.name for found in info.products.measured} >= {"float32", "int8"}
