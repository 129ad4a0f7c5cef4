"""Times a step of vLLM's v1 scheduler as `scheduler.py` times ours.

`scheduler_peer.py` runs this file by a Python that has vLLM; it imports nothing of this project. Every
request decodes, prefixes are cached, no model runs. It says "ready", then answers each line "RUNNING STEPS"
by the median microseconds of `schedule` and `update_from_output` together.
"""

# vLLM is no dependency of this project.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

BLOCK_SIZE = 16
PROMPT_TOKENS = 64
TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 1_000_000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


def measure(num_running: int, num_steps: int, folder: str) -> float:
    """Microseconds of a step with so many decodes, the median of `num_steps`."""
    import torch
    from vllm import SamplingParams
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    init_none_hash(sha256)
    max_tokens = 2 * BLOCK_SIZE + num_steps
    max_model_len = PROMPT_TOKENS + max_tokens
    num_blocks = num_running * -(-max_model_len // BLOCK_SIZE) + 1  # vLLM keeps one as its null block
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_blocks
    config = VllmConfig(
        model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", seed=0),
        scheduler_config=SchedulerConfig(
            max_num_seqs=num_running,
            max_num_batched_tokens=PROMPT_TOKENS * num_running,
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
    )
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32)
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    for number in range(num_running):
        scheduler.add_request(
            Request(
                request_id=f"request-{number}",
                prompt_token_ids=[number * PROMPT_TOKENS + i for i in range(PROMPT_TOKENS)],
                sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                pooling_params=None,
                arrival_time=0.0,
                block_hasher=hasher,
            )
        )

    def step() -> float:
        begun = time.perf_counter()
        output = scheduler.schedule()
        scheduled = time.perf_counter()
        names = list(output.num_scheduled_tokens)
        assert len(names) == num_running
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[7] for _ in names],
        )
        computed = time.perf_counter()
        scheduler.update_from_output(output, result)
        return scheduled - begun + time.perf_counter() - computed

    for _ in range(BLOCK_SIZE + 1):
        step()
    gc.collect()
    gc.disable()
    try:
        return statistics.median(step() for _ in range(num_steps)) * 1e6
    finally:
        gc.enable()


def main() -> None:
    import vllm  # noqa: F401  # what lacks it ends here, not at the first line

    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM's own lines
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY_MODEL))
        answers.write("ready\n")
        answers.flush()
        for line in sys.stdin:
            num_running, num_steps = map(int, line.split())
            answers.write(f"{measure(num_running, num_steps, folder)}\n")
            answers.flush()


if __name__ == "__main__":
    main()
