"""Adapters through the whole engine: the tokens of PEFT with each alone, whatever shares the batch and the
pool."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import adapted_by_peft, save_adapter
from support.random_models import VOCAB_SIZE, save, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from pageturner.service.errors import AdapterNotFound, ConfigError, InvalidArgument
from pageturner.service.llm import LLM
from pageturner.service.model.loader import load_artifacts
from pageturner.service.model.options import ModelOptions

NUM_TOKENS = 12
SMALL = {"num_blocks": 64, "block_size": 4}
NAMES = ("a", "b", "", "c", "a", "b", "", "c")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path, Mapping[str, Path]]:
    """The model of `transformers`, its folder, and those of its adapters; `new` is of no request at first."""
    folder = tmp_path_factory.mktemp("adapted")
    _, model = tiny_model("llama", 3)
    options: Mapping[str, dict[str, Any]] = {
        "a": {},
        "b": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
        "c": {"target_modules": ["down_proj"], "layers_to_transform": [1]},
        "new": {"r": 3},
    }
    adapters = {
        name: save_adapter(model, folder / name, seed, scale=0.6, **given)
        for seed, (name, given) in enumerate(options.items())
    }
    return model, save(model, folder / "model"), adapters


def prompt_of(seed: int) -> list[int]:
    """One prompt for four requests, which have different adapters."""
    return random.Random(seed // 4).choices(range(3, VOCAB_SIZE), k=14)


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], count: int = NUM_TOKENS) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def answers(llm: LLM, names: Sequence[str], count: int = NUM_TOKENS) -> list[list[int]]:
    """Of all at once, each prompt with its adapter."""

    def ask(number: int, name: str) -> list[int]:
        options: dict[str, Any] = {"max_tokens": count, "temperature": 0.0, "ignore_eos": True}
        (answer,) = llm.generate([prompt_of(number)], adapter=name, **options)
        return [token.token_id for token in answer.choices[0].tokens]

    with ThreadPoolExecutor(len(names)) as threads:
        return list(threads.map(ask, range(len(names)), names))


@pytest.mark.parametrize("reclaim", ["always-swap", "always-recompute", "tail-first"])
def test_tokens_are_those_of_peft_in_a_pool_too_small_for_all(
    reclaim: str, made: tuple[PreTrainedModel, Path, Mapping[str, Path]]
) -> None:
    model, folder, adapters = made
    loaded = {name: str(adapters[name]) for name in "abc"}
    with LLM(
        {"source": str(folder), "device": "cpu", "num_threads": 1},
        cache={"num_blocks": 16, "block_size": 4, "swap_space": 1 << 20},
        scheduler={"max_num_batched_tokens": 24},
        policies={"reclaim": reclaim, "admission": "first-chunk"},
        adapters={"load": loaded},
    ) as llm:
        found = answers(llm, NAMES)
        expected = {
            (number // 4, name): greedy(adapted_by_peft(model, adapters.get(name)), prompt_of(number))
            for number, name in enumerate(NAMES)
        }
        for number, name in enumerate(NAMES):
            assert found[number] == expected[number // 4, name], (number, name)
        assert len({tuple(tokens) for tokens in expected.values()}) > 4, "adapters change answers"
        assert llm.model.adapters == ("a", "b", "c")
        load = llm.load()
        assert (
            load.num_swap_preemptions_total
            + load.num_recompute_preemptions_total
            + (load.num_tail_preemptions_total)
        )
        assert load.num_blocks_used == 0
        assert all(each.num_requests == 0 for each in llm.adapters())


def test_other_weights_under_a_name_meet_no_block_of_the_old(
    made: tuple[PreTrainedModel, Path, Mapping[str, Path]], tmp_path: Path
) -> None:
    model, folder, adapters = made
    with LLM({"source": str(folder), "device": "cpu", "num_threads": 1}, cache=SMALL) as llm:
        with pytest.raises(AdapterNotFound):
            llm.generate([[5, 6]], adapter="x", max_tokens=1)
        for name in ("a", "new"):
            info = llm.load_adapter("x", adapters[name])
            assert (info.path, info.is_loaded) == (str(adapters[name]), True)
            wanted = greedy(adapted_by_peft(model, adapters[name]), prompt_of(0))
            assert answers(llm, ["x"]) == [wanted]
        # Loaded again it is what it was: its blocks are found.
        llm.load_adapter("x", adapters["a"])
        (again,) = llm.generate([prompt_of(0)], adapter="x", max_tokens=2)
        assert again.usage.num_cached_prompt_tokens
        with pytest.raises(InvalidArgument, match=r"path: there is no file adapter_config.json"):
            llm.load_adapter("x", tmp_path)
        assert llm.unload_adapter("x", 5.0) == 0
        assert llm.adapters() == ()


def test_a_configured_adapter_that_is_wrong_is_named(
    made: tuple[PreTrainedModel, Path, Mapping[str, Path]], tmp_path: Path
) -> None:
    _, folder, _ = made
    with pytest.raises(ConfigError, match=r"adapters.load.x: there is no file"):
        LLM({"source": str(folder), "device": "cpu"}, adapters={"load": {"x": str(tmp_path)}})


@pytest.mark.slow
def test_the_embedded_model_has_the_tokens_of_peft(tmp_path: Path) -> None:
    """In float32, without quantised products: eight requests with three adapters and none."""
    options = ModelOptions(source="embedded", quantization="none", dtype="float32")
    artifacts = load_artifacts(options, tmp_path / "cache")
    model = AutoModelForCausalLM.from_pretrained(artifacts.folder, dtype=torch.float32)
    adapters = {
        name: save_adapter(model, tmp_path / name, seed, scale=0.03, r=rank, lora_alpha=2 * rank)
        for seed, (name, rank) in enumerate((("a", 8), ("b", 16), ("c", 4)))
    }
    loaded = {name: str(path) for name, path in adapters.items()}
    settings = {"source": "embedded", "quantization": "none", "dtype": "float32", "device": "cpu"}
    with LLM(settings, cache={"num_blocks": 64}, adapters={"load": loaded}) as llm:
        found = answers(llm, NAMES, 8)
    for number, name in enumerate(NAMES):
        expected = greedy(adapted_by_peft(model, adapters.get(name)), prompt_of(number), 8)
        assert found[number] == expected, (number, name)
