"""The embedded model: its weights, its tokens, and greedy text equal to transformers' generate()."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from support.paged_sessions import PagedSession
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from pageturner.kernels.torch_ops import TorchOps
from pageturner.service.model.artifacts import ModelArtifacts
from pageturner.service.model.build import build_model
from pageturner.service.model.gguf import GgufFile
from pageturner.service.model.loader import embedded_file, load_artifacts
from pageturner.service.model.options import ModelOptions

NUM_TOKENS = 16
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "What is 17 + 25?",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "Name three primary colors.",
    "Explain gravity to a child.",
    "Write a Python function that reverses a string.",
    "Who wrote Romeo and Juliet?",
    "What does HTTP stand for?",
    "Give me a recipe for pancakes.",
    "How many days are in a leap year?",
    "What is photosynthesis?",
    "List the planets of the solar system.",
    "Tell me a joke.",
    "What is the opposite of hot?",
    "Summarize the plot of Cinderella.",
    "How do I boil an egg?",
    "日本の首都はどこですか。",
    "What is a prime number? 😀",
)
DIVERSE_TEXT = {
    "Hello world": [19556, 905],
    "12 345,678": [33, 34, 216, 35, 36, 37, 28, 38, 39, 40],
    "日本語のテキスト": [
        23274,
        115,
        40993,
        179,
        120,
        248,
        26453,
        11100,
        224,
        10391,
        251,
        10391,
        134,
        11100,
        226,
    ],
    "中文字符測試": [28589, 29184, 36518, 40562, 116, 177, 133, 122, 179, 119, 116],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "don't I'll we've": [12420, 982, 339, 3060, 392, 3543],
    "\u200b\u00a0\ufeff": [321, 229, 15442, 186, 136, 140],
    "<jupyter_start>5<empty_output>": [11, 37, 16],
    "": [],
}
"""Ids as llama.cpp and transformers give them."""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> ModelArtifacts:
    return load_artifacts(ModelOptions(dtype="float32"), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizer(artifacts: ModelArtifacts) -> Tokenizer:
    assert artifacts.tokenizer is not None
    return artifacts.tokenizer


@pytest.mark.slow
def test_every_tensor_has_the_bits_of_the_gguf_package() -> None:
    file = GgufFile(embedded_file())
    by_name = {tensor.name: tensor for tensor in gguf.GGUFReader(embedded_file()).tensors}
    assert by_name.keys() == file.tensors.keys()
    for name in file.tensors:
        expected = gguf.quants.dequantize(by_name[name].data, by_name[name].tensor_type)
        np.testing.assert_array_equal(file.read(name).numpy(), expected, err_msg=name)


def test_what_the_file_says_of_itself(artifacts: ModelArtifacts) -> None:
    assert artifacts.architecture == "LlamaForCausalLM"
    assert artifacts.name == "SmolLM2-135M-Instruct.Q4_1"
    assert (artifacts.bos_token, artifacts.special_tokens["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert artifacts.eos_token_ids == (2,)
    assert not artifacts.add_bos
    assert artifacts.chat_template is not None
    assert artifacts.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100_000.0}


@pytest.mark.parametrize("text", list(DIVERSE_TEXT))
def test_tokens_of_diverse_text(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text).ids
    assert ids == DIVERSE_TEXT[text]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def prompt_ids(tokenizer: Tokenizer) -> list[list[int]]:
    return [
        tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids
        for question in QUESTIONS
    ]


@torch.inference_mode()
def generated(artifacts: ModelArtifacts, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' greedy tokens, all prompts in one left-padded batch; what follows an eos is padding."""
    model = AutoModelForCausalLM.from_pretrained(artifacts.folder, dtype=torch.float32)
    width = max(map(len, prompts))
    ids = torch.tensor([[2] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=2, eos_token_id=2
    )
    return [tokens[: tokens.index(2) + 1 if 2 in tokens else None] for tokens in output[:, width:].tolist()]


def test_greedy_text_is_that_of_generate(artifacts: ModelArtifacts, tokenizer: Tokenizer) -> None:
    prompts = prompt_ids(tokenizer)
    built = build_model(artifacts, ModelOptions(dtype="float32"), 16, lambda _: TorchOps())
    session = PagedSession(built.model, built.ops, block_size=16, num_blocks=100)
    sequences = [session.add(prompt) for prompt in prompts]
    running = list(sequences)
    while running:
        work = [(sequence, len(sequence.tokens) - sequence.num_computed) for sequence in running]
        for sequence, token in zip(running, session.step(work).argmax(dim=-1).tolist(), strict=True):
            sequence.tokens.append(token)
        running = [
            sequence
            for sequence, prompt in zip(sequences, prompts, strict=True)
            if sequence.tokens[-1] != 2 and len(sequence.tokens) < len(prompt) + NUM_TOKENS
        ]
    found = [sequence.tokens[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]
    assert found == generated(artifacts, prompts)
    assert "Paris" in tokenizer.decode(found[0])


@pytest.mark.slow
def test_tokens_are_those_of_transformers(tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(str(embedded_file().parent), gguf_file=embedded_file().name)
    for text in (*DIVERSE_TEXT, *QUESTIONS):
        assert theirs.encode(text) == tokenizer.encode(text).ids
