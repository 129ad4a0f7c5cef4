"""vLLM's OpenAI server on the CPU."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pageturner.loadtest.peers.cases import Demand
from pageturner.loadtest.peers.completions import completion, completions, count_token_ids
from pageturner.loadtest.peers.peer import Command, Send
from pageturner.loadtest.workload import PlannedRequest

_BLOCK_SIZE = 128
"""The fastest of its CPU attention."""


@dataclass(frozen=True, slots=True)
class Vllm:
    """python: of an environment that has it. model: a folder of safetensors. cache_gib: for its KV cache."""

    python: Path
    model: Path
    dtype: str
    cache_gib: int = 4
    name: str = "vLLM"

    def command(self, port: int, demand: Demand) -> Command:
        return Command(
            (
                *(str(self.python), "-m", "vllm.entrypoints.openai.api_server"),
                *("--model", str(self.model), "--served-model-name", "model", "--dtype", self.dtype),
                *("--host", "127.0.0.1", "--port", str(port)),
                *("--block-size", str(_BLOCK_SIZE), "--max-num-seqs", str(demand.num_sequences)),
                "--disable-uvicorn-access-log",
            ),
            {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": str(self.cache_gib)},
        )

    def connected(self, address: str) -> AbstractAsyncContextManager[Send]:
        return completions(address, _body, count_token_ids)


def _body(request: PlannedRequest) -> dict[str, Any]:
    return {**completion(request), "return_token_ids": True}
