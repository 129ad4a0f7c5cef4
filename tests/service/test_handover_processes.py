"""Prefill and decode as two processes of the embedded model, also where the one that prefills is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pageturner.service.client import Client, Completion, SyncClient
from pageturner.service.client.server_process import RunningServer, running_server

COMMON = """
[model]
num_threads = 1
[cache]
kv_cache_memory = "256MiB"
host_cache_memory = "256MiB"
swap_space = 0
[handover]
min_tokens = 64
"""

PROMPTS = tuple(tuple((31 * n + 7 * which) % 900 + 300 for n in range(330)) for which in range(3))
"""Of 20 full blocks each."""

LATER = tuple(37 * n % 900 + 300 for n in range(330))
"""One that is asked when the server that prefills is gone."""


@contextmanager
def server(folder: Path, role: str) -> Iterator[RunningServer]:
    config = folder / "serve.toml"
    config.write_text(COMMON + role)
    with running_server([f"--config={config}"]) as running:
        yield running


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, RunningServer]]:
    """The one that prefills, then the one that decodes."""
    first, second = tmp_path_factory.mktemp("prefill"), tmp_path_factory.mktemp("decode")
    with (
        server(first, 'role = "prefill"') as prefill,
        server(second, f'role = "decode"\nprefill_targets = ["{prefill.target}"]') as decode,
    ):
        yield prefill, decode


OPTIONS: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


def tokens_of(completion: Completion) -> list[int]:
    return [token.token_id for token in completion.choices[0].tokens]


def test_the_tokens_are_those_of_one_server_alone(servers: tuple[RunningServer, RunningServer]) -> None:
    prefill, decode = servers
    with SyncClient(prefill.target) as one, SyncClient(decode.target) as other:
        completion = other.generate(PROMPTS[0], **OPTIONS)
        alone = other.generate(PROMPTS[0], bypass_prefix_cache=True, **OPTIONS)
        assert tokens_of(completion) == tokens_of(alone)
        assert completion.usage.num_cached_prompt_tokens == 320
        assert one.load().num_scheduled_tokens_total == 320
        assert other.server_info().config["handover.role"] == "decode"


def test_a_killed_prefill_server_costs_no_token(servers: tuple[RunningServer, RunningServer]) -> None:
    prefill, decode = servers

    async def live() -> None:
        async with Client(decode.target) as client, Client(prefill.target) as doomed:
            known = (await doomed.load()).num_scheduled_tokens_total
            asked = [asyncio.create_task(client.generate(prompt, **OPTIONS)) for prompt in PROMPTS[1:]]
            async for load in doomed.watch_load(0.1):
                if load.num_scheduled_tokens_total > known:
                    break  # it computes for them
            os.kill(prefill.pid, signal.SIGKILL)
            for prompt, completion in zip(PROMPTS[1:], await asyncio.gather(*asked), strict=True):
                alone = await client.generate(prompt, bypass_prefix_cache=True, **OPTIONS)
                assert tokens_of(completion) == tokens_of(alone)
            await client.generate(LATER, **OPTIONS)  # the others' blocks may all have come before the signal
            load = await client.load()
            assert (load.num_running, load.num_waiting, load.num_blocks_used) == (0, 0, 0)

    asyncio.run(live())
    assert "handover_failed" in decode.log()
