"""What llama.cpp takes for granted where a GGUF file does not say: BOS, and which tokens end an answer."""

from __future__ import annotations

from typing import Any

import pytest

from pageturner.service.model.gguf_tokenizer import build_tokenizer, end_ids

SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "\u2581", "h", "i", "\u2581hi", "hi"],
    "tokenizer.ggml.scores": [0, 0, 0, -3, -4, -5, -1, -2],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1],
}


def byte_level(**changes: Any) -> dict[str, Any]:
    stated = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": ["<|begin|>", "h", "e", "he"],
        "token_type": [3, 1, 1, 1],
        "merges": ["h e"],
        "bos_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in stated.items()}


@pytest.mark.fault("16")
@pytest.mark.parametrize(("stated", "ids"), [({}, [1, 6]), ({"add_bos_token": False}, [6])])
def test_a_sentencepiece_vocabulary_adds_bos_unless_the_file_says_otherwise(
    stated: dict[str, Any], ids: list[int]
) -> None:
    told = {f"tokenizer.ggml.{key}": value for key, value in stated.items()}
    assert build_tokenizer(SENTENCEPIECE | told).encode("hi").ids == ids


@pytest.mark.fault("16")
@pytest.mark.parametrize(("pre", "is_added"), [("llama-bpe", True), ("smollm", False), ("qwen2", False)])
def test_a_byte_level_vocabulary_adds_bos_as_its_pre_tokenizer_has_it(pre: str, is_added: bool) -> None:
    assert (build_tokenizer(byte_level(pre=pre)).encode("he").ids[0] == 0) is is_added
    contrary = byte_level(pre=pre, add_bos_token=not is_added)
    assert (build_tokenizer(contrary).encode("he").ids[0] == 0) is not is_added


@pytest.mark.fault("17")
@pytest.mark.parametrize("closer", ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"])
def test_control_tokens_that_close_a_turn_are_end_tokens(closer: str) -> None:
    tokens = ["<|endoftext|>", "a", closer, "<|im_start|>"]
    stated = byte_level(tokens=tokens, token_type=[3, 1, 3, 3], eos_token_id=0)
    assert end_ids(stated) == [0, 2]
    as_text = byte_level(tokens=tokens, token_type=[3, 1, 1, 3], eos_token_id=0)
    assert end_ids(as_text) == [0]
