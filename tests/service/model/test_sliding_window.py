"""Sequences that give back what their window has passed, on real models: the tokens are the plain model's."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.core_harness import NoText
from support.ops import BACKENDS
from support.random_models import save, tiny_model
from transformers import PreTrainedModel

from pageturner.kernels.interface import PagedOps
from pageturner.kernels.layout import KvLayout
from pageturner.policies import registry
from pageturner.policies.views import Rates
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.outputs import SampledSequence, SampledToken, TokenEvent
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.model.causal_model import CausalModel
from pageturner.service.model.decoder import load_decoder
from pageturner.service.model.decoder_config import parse_decoder_config
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.model.loader import WeightFiles, read_folder
from pageturner.service.model.options import ModelOptions
from pageturner.service.model.probe import examine
from pageturner.service.model.runner import Runner
from pageturner.service.model.transformers_model import TransformersModel
from pageturner.service.model.windows import widest

MAX_TOKENS = 14
PROMPTS = tuple(tuple((7 * i + 3 * length) % 50 + 3 for i in range(length)) for length in (41, 23, 41, 6))


@torch.inference_mode()
def plain_answer(model: PreTrainedModel, prompt: tuple[int, ...]) -> list[int]:
    tokens = list(prompt)
    for _ in range(MAX_TOKENS):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def serve(model: CausalModel, ops: PagedOps, cache: CacheOptions) -> tuple[list[list[int]], Scheduler]:
    """The greedy answers to all prompts at once. A block that no table names holds NaN."""
    layout = KvLayout(
        model.num_layers, model.num_kv_heads, model.head_dim, cache.block_size, model.kv_dtype, ops.key_order
    )
    kv_cache = KvCache(layout, cache.num_blocks, 8, ops, model.device)
    kv_cache.pool.fill_(math.nan)
    runner = Runner(model, kv_cache)
    options = SchedulerOptions(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=13)
    policies = registry.default_policies()
    scheduler = Scheduler(options, cache, policies, NoText(), Rates(), hash_key=b"k")
    answers: list[list[int]] = [[] for _ in PROMPTS]
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
        scheduler.add_request(NewRequest(str(number), prompt, params, 0, 0.0, tenant="t"))
    now = 0.0
    while scheduler.has_work():
        now += 1.0
        output = scheduler.schedule(now)
        kv_cache.apply(output.block_copies)
        rows = iter(runner.forward(output))
        sampled = [
            SampledSequence(row.seq_id, row.epoch, (SampledToken(int(logits.argmax())),))
            for part in output.scheduled
            for row, logits in zip(part.samples, [next(rows)] if part.samples else [], strict=True)
        ]
        for event in scheduler.update(output, tuple(sampled), now):
            if isinstance(event, TokenEvent):
                answers[int(event.request_id)] += [token.token_id for token in event.tokens]
        scheduler.check_integrity()
        device = scheduler.manager.device
        idle = [b for b in range(device.num_blocks) if device.is_available(b) and not device.is_cached(b)]
        kv_cache.pool[idle] = math.nan
        assert now < 1000, "the requests come to no end"
    return answers, scheduler


@pytest.mark.parametrize(
    ("backend", "num_blocks", "block_size"),
    [("torch", 9, 4), ("torch-deterministic", 9, 4), ("cpu-deterministic", 3, 16)],
)
def test_the_lean_decoder_serves_prompts_that_its_pool_could_not_hold(
    backend: str, num_blocks: int, block_size: int, tmp_path: Path
) -> None:
    _, plain = tiny_model("mistral_window", 7, head_dim=16)
    ops = BACKENDS[backend]()
    artifacts = read_folder("test", "test", save(plain, tmp_path), ModelOptions(source="test"))
    config = parse_decoder_config(artifacts.config)
    model = load_decoder(config, WeightFiles(artifacts.weight_files), ops, torch.float32)
    assert model.window is not None
    answers, scheduler = serve(model, ops, CacheOptions(num_blocks, block_size, 8, window=model.window))
    assert answers == [plain_answer(plain, prompt) for prompt in PROMPTS]
    assert scheduler.stats().num_window_blocks_total >= 5
    assert max(map(len, PROMPTS)) + MAX_TOKENS > num_blocks * block_size


def test_a_model_of_transformers_does_as_well() -> None:
    _, plain = tiny_model("mistral_window", 7)
    expected = [plain_answer(plain, prompt) for prompt in PROMPTS]
    ops = BACKENDS["torch"]()
    model = TransformersModel(plain, examine(plain), ops)
    answers, _ = serve(model, ops, CacheOptions(9, 4, 8, window=model.window))
    assert answers == expected


@pytest.mark.parametrize(
    ("family", "has_window"),
    [("mistral_window", True), ("mistral", False), ("qwen2_window", False), ("llama", False)],
)
def test_a_layer_that_sees_everything_keeps_all_blocks(family: str, has_window: bool) -> None:
    config, model = tiny_model(family, 0)
    found = examine(model).window
    assert found == (config.sliding_window if has_window else None)


def test_the_widest_window_decides() -> None:
    assert widest([4, 7, 5]) == 7
    assert widest([4, None, 5]) is None
    assert widest([]) is None
