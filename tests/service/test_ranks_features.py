"""Everything that a request may ask for, on several ranks, while blocks run out: the answers of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from support.model_folders import save_chat_model, save_plain_adapter

from pageturner.service.client import BeamSearch, Completion, OutputForm, StructuredOutput, TokenEvent
from pageturner.service.llm import LLM

LONG = [9 + n % 90 for n in range(70)]
QUOTED = [40, 41, 42, 43, 44] * 8
"""What guesses of n-grams are good at."""

TIGHT = {"num_blocks": 26, "block_size": 8, "swap_space": "64KiB", "host_cache_memory": "256KiB"}
"""Some three requests have room at once, so that others are swapped out; what leaves the pool is cached."""

CASES: Mapping[str, tuple[int, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "quantised": (2, {"quantization": "int8", "kv_dtype": "int8"}, {"policies": {"reclaim": "always-swap"}}),
    "float": (
        2,
        {"quantization": "none", "dtype": "float32"},
        {"speculation": {"method": "ngram", "row_cost": 0.01}, "policies": {"reclaim": "always-swap"}},
    ),
    "four": (
        4,
        {"quantization": "int4", "kv_dtype": "float32"},
        {"speculation": {"method": "ngram", "row_cost": 0.01}, "policies": {"reclaim": "tail-first"}},
    ),
    "ahead": (
        2,
        {"quantization": "int8", "kv_dtype": "fp8"},
        {"engine": {"steps_ahead": 1}, "policies": {"reclaim": "always-recompute"}},
    ),
    "window": (2, {"quantization": "int8"}, {"cache": {**TIGHT, "host_cache_memory": 0}}),
}
FAST = "quantised"
WINDOW = 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Heads of 16 and sizes that 32 divides, which quantised weights want; with and without a window."""
    folder = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "head_dim": 16,
    }
    plain = save_chat_model(folder / "plain", num_key_value_heads=4, **sizes)
    windowed = save_chat_model(
        folder / "window", "mistral_window", num_key_value_heads=4, sliding_window=WINDOW, **sizes
    )
    adapter = save_plain_adapter(plain, folder / "adapter", 5)
    return {"plain": plain, "window": windowed, "adapter": adapter}


def made(folders: Mapping[str, Path], case: str, size: int) -> LLM:
    _, model, sections = CASES[case]
    source = folders["window" if case == "window" else "plain"]
    options = {
        "source": str(source),
        "device": "cpu",
        "num_threads": 1,
        "deterministic": True,
        "tensor_parallel_size": size,
    }
    given: dict[str, Any] = {
        "cache": TIGHT,
        "adapters": {"load": {"one": str(folders["adapter"])}},
        **sections,
    }
    return LLM({**options, **model}, **given)


def drawn(completion: Completion) -> tuple[object, ...]:
    """All that an answer says, beside how it was computed."""
    return (
        completion.prompt_logprobs,
        tuple((choice.text, choice.tokens, choice.reason) for choice in completion.choices),
    )


def asked(llm: LLM) -> Mapping[str, Callable[[], object]]:
    """By name, what is asked at the same time."""

    def answer(prompt: list[int], **options: Any) -> Callable[[], object]:
        return lambda: drawn(llm.generate([prompt], **{"max_tokens": 20, "seed": 7, **options})[0])

    def left() -> object:
        """A storm of streams that are left after a few tokens."""
        for seed in range(6):
            with closing(llm.stream([*LONG, seed], max_tokens=50, seed=seed, ignore_eos=True)) as events:
                next(event for event in events if isinstance(event, TokenEvent))
        return None

    scored = ([5, 6, 7], [5, 6], [9] * 12)
    return {
        "greedy": answer(LONG, temperature=0, ignore_eos=True, logprobs=3),
        "quoted": answer(QUOTED, temperature=0, ignore_eos=True, max_tokens=30),
        "adapted": answer(LONG[:50], temperature=0, ignore_eos=True, adapter="one"),
        "three": answer(LONG[:40], n=3, temperature=0.9, ignore_eos=True),
        "beams": answer(LONG[:30], beam_search=BeamSearch(3), n=2, max_tokens=10),
        "formed": answer(LONG[:20], structured_output=StructuredOutput(OutputForm.REGEX, "[ab]{3,9}c")),
        "prompted": answer(LONG, prompt_logprobs=2, max_tokens=2, temperature=0),
        "scored": lambda: llm.score(LONG[:45], scored).scores,
        "left": left,
        "again": answer([*LONG, 3], temperature=0, ignore_eos=True),
    }


def everything(llm: LLM) -> Mapping[str, object]:
    """All at once, twice: the second time prefixes are cached, in the pool or behind it."""
    found: dict[str, object] = {}
    for turn in ("first", "second"):
        questions = asked(llm)
        with ThreadPoolExecutor(len(questions)) as threads:
            futures = {name: threads.submit(ask) for name, ask in questions.items()}
        found |= {f"{name}, {turn}": future.result() for name, future in futures.items()}
    return found


def is_alike(found: object, expected: object, tolerance: float) -> bool:
    """Equal, numbers of log-probabilities within a tolerance: their sums hang on a row's company."""
    if isinstance(expected, float):
        return isinstance(found, float) and abs(found - expected) <= tolerance
    if is_dataclass(expected) and not isinstance(expected, type):
        return type(found) is type(expected) and is_alike(_fields_of(found), _fields_of(expected), tolerance)
    if isinstance(expected, tuple | list):
        return (
            isinstance(found, tuple | list)
            and len(found) == len(expected)
            and all(map(is_alike, found, expected, [tolerance] * len(expected)))
        )
    return found == expected


def _fields_of(value: Any) -> list[object]:
    return [getattr(value, field.name) for field in fields(value)]


@pytest.mark.parametrize(
    "case", [case if case == FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_everything_is_as_on_one_rank(case: str, folders: Mapping[str, Path]) -> None:
    size, model, _ = CASES[case]
    with made(folders, case, 1) as llm:
        expected = everything(llm)
    with made(folders, case, size) as llm:
        found, load = everything(llm), llm.load()
    for name, answer in expected.items():
        tolerance = 1e-3 if model["quantization"] == "none" else 1e-5
        assert is_alike(found[name], answer, tolerance), (name, found[name], answer)
    preemptions = (
        load.num_swap_preemptions_total,
        load.num_recompute_preemptions_total,
        load.num_tail_preemptions_total,
    )
    assert any(preemptions), "blocks run out"
