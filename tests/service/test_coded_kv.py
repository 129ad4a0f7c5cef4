"""KV in codes: a request's tokens are those of a run with unlimited memory, however it is preempted."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.random_models import save, tiny_model

from pageturner.service.client import AcceptedEvent
from pageturner.service.llm import LLM

LENGTHS = (40, 33, 16, 50, 21, 3)
PROMPTS = [[(31 * seed + 7 * i) % 120 for i in range(length)] for seed, length in enumerate(LENGTHS)]
CODES = ("int8", "fp8")
AMPLE, TIGHT = 200, 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, model = tiny_model("llama", 7, head_dim=16, intermediate_size=64)
    return save(model, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def make(folder: Path) -> Callable[..., LLM]:
    def make(kv_dtype: str, num_blocks: int, **policies: Any) -> LLM:
        options = {"source": str(folder), "device": "cpu", "num_threads": 1, "quantization": "int8"}
        return LLM(
            options | {"kv_dtype": kv_dtype},
            cache={"num_blocks": num_blocks, "block_size": 16, "swap_space": "1MiB"},
            scheduler={"max_model_len": 112, "max_num_batched_tokens": 24},
            policies={"admission": "first-chunk"} | policies,
        )

    return make


def answers(llm: LLM) -> list[list[tuple[int, ...]]]:
    """Of all prompts at once, two choices each; every block is back when they are done."""
    completions = llm.generate(PROMPTS, n=2, max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)
    while llm.load().num_running or llm.load().num_blocks_used:
        time.sleep(0)  # what is never freed fails by the test's time limit
    return [
        [tuple(token.token_id for token in choice.tokens) for choice in completion.choices]
        for completion in completions
    ]


@pytest.fixture(scope="module", params=CODES)
def expected(request: pytest.FixtureRequest, make: Callable[..., LLM]) -> tuple[str, Any]:
    with make(request.param, AMPLE) as llm:
        found = answers(llm)
        load = llm.load()
        assert load.num_swap_preemptions_total + load.num_recompute_preemptions_total == 0
    return request.param, found


@pytest.mark.parametrize("reclaim", ["always-swap", "always-recompute", "tail-first"])
def test_preempted_requests_have_the_tokens_of_ample_memory(
    make: Callable[..., LLM], expected: tuple[str, Any], reclaim: str
) -> None:
    kv_dtype, wanted = expected
    with make(kv_dtype, TIGHT, reclaim=reclaim) as llm:
        assert answers(llm) == wanted
        load = llm.load()
    preemptions = {
        "always-swap": load.num_swap_preemptions_total,
        "always-recompute": load.num_recompute_preemptions_total,
        "tail-first": load.num_tail_preemptions_total,
    }
    assert preemptions[reclaim] > 0
    assert load.num_copied_blocks_total > 0


def test_an_answer_is_resumed_only_where_kv_is_kept_alike(make: Callable[..., LLM]) -> None:
    fingerprints = {}
    for kv_dtype in ("bfloat16", *CODES):
        with make(kv_dtype, AMPLE) as llm:
            accepted = next(llm.stream(PROMPTS[0], max_tokens=1))
        assert isinstance(accepted, AcceptedEvent)
        fingerprints[kv_dtype] = accepted.fingerprint
        assert f"kv={kv_dtype};" in accepted.fingerprint
    assert len(set(fingerprints.values())) == 3
