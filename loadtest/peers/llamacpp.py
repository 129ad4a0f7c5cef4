"""llama.cpp's own server, `llama-server`, which batches continuously (that of llama-cpp-python does not)."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pageturner.loadtest.peers.cases import Demand
from pageturner.loadtest.peers.completions import Event, completion, completions
from pageturner.loadtest.peers.peer import Command, Send
from pageturner.loadtest.workload import PlannedRequest

_SLACK = 32
"""Tokens a sequence beyond the longest, so that a slot is never full."""


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """program: `llama-server`. model: a GGUF file."""

    program: Path
    model: Path
    name: str = "llama.cpp"

    def command(self, port: int, demand: Demand) -> Command:
        context = demand.num_sequences * (demand.tokens_per_sequence + _SLACK)
        return Command(
            (
                *(str(self.program), "--model", str(self.model), "--host", "127.0.0.1", "--port", str(port)),
                # A slot a sequence, each with a context of its own.
                *("--parallel", str(demand.num_sequences), "--ctx-size", str(context), "--no-kv-unified"),
            )
        )

    def connected(self, address: str) -> AbstractAsyncContextManager[Send]:
        return completions(address, _body, _tokens_so_far)


def _body(request: PlannedRequest) -> dict[str, Any]:
    # An event may hold no token (its text ends within a character) or stand for several; the timings count.
    return {**completion(request), "cache_prompt": False, "timings_per_token": True}


def _tokens_so_far(event: Event, before: int) -> int:
    return int(event["timings"]["predicted_n"]) if "timings" in event else before
