"""The whole service on the GPU's path, over gRPC: CUDA kernels on CPU fibers, swaps at the last moment.

On a GPU (`-m gpu`) the same, by the kernels themselves. Held against the service on the CPU's own kernels:
the same tokens, however tight the pool. The model is a random llama in bfloat16; where two kernels round
differently, a token may differ whose rival was as likely: there, streams part, and are compared up to that
place.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.emulation import emulated_launcher
from support.fake_meter import FakeMeter
from support.lazy_streams import LazyStream, lazy_copies
from support.ops import cpu_cache_dir
from support.random_models import save, tiny_model
from support.scripted import recording_logger
from support.tape_graphs import TapeGraphs

from pageturner.kernels.cuda.ops import CudaOps
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.service.client import Client, Options, TokenEvent
from pageturner.service.config import load_config
from pageturner.service.core.clock import MonotonicClock
from pageturner.service.core.outputs import SampledToken
from pageturner.service.engine.metrics import Metrics
from pageturner.service.model.backend import Backend
from pageturner.service.model.graphs import graph_sizes
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.rpc.server import Server
from pageturner.service.startup.wiring import build_service

BLOCK_BYTES = 16_384
"""Two layers, keys and values, two kv heads, 16 tokens of 64 in bfloat16."""
TOLERANCE = 0.06
"""Log-probabilities of two tokens that bfloat16 may turn around: a few times its rounding of logits of 5."""

EMBEDDED_TOLERANCE = 0.25
"""The same of a model of thirty layers, with logits of up to 30."""

SHARED = [7 * i % 120 for i in range(35)]
REQUESTS: Sequence[tuple[list[int], Options]] = [
    ([*SHARED, 5, 6, 7], {}),
    ([*SHARED, 90, 91], {}),
    (list(range(3, 60)), {"n": 3, "temperature": 1.0, "seed": 11}),
    (list(range(100, 30, -1)), {}),
    ([1, 2, 3], {}),
]


def emulated_backend(graphs: TapeGraphs | None = None) -> Backend:
    """graphs: made for the emulated runtime; None: every step runs eagerly."""
    streams = lazy_copies()
    assert isinstance(streams.copies, LazyStream)
    launcher = emulated_launcher() if graphs is None else Launcher(graphs.runtime)
    return Backend(
        torch.device("cpu"),
        lambda heads, dtype: CudaOps(launcher),
        streams,
        synchronize=streams.copies.finish,
        meter=FakeMeter(BLOCK_BYTES, size=100, weights=60, others=10, activations=6),
        graphs=graphs,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, model = tiny_model("llama", 5, head_dim=64)
    return save(model, tmp_path_factory.mktemp("llama"))


@asynccontextmanager
async def running(folder: Path, backend: Backend | None, **flags: str) -> AsyncIterator[Client]:
    chosen = {
        "model.source": str(folder),
        "model.device": "cpu",
        "model.dtype": "bfloat16",
        "model.num_threads": "1",
        "server.port": "0",
        "scheduler.max_model_len": "128",
        "policies.reclaim": "always-swap",
    }
    loaded = load_config(None, {}, chosen | flags)
    clock = MonotonicClock()
    logger, _ = recording_logger()
    metrics = Metrics()
    server = Server(loaded.config.server, logger, clock, metrics, write_timeout_seconds=60.0)
    engine = build_service(loaded, cpu_cache_dir(), clock, clock.now(), logger, metrics, backend=backend)
    port = await server.start()
    await engine.start()
    server.attach(engine)
    try:
        async with Client(f"127.0.0.1:{port}") as client:
            yield client
    finally:
        await server.stop()
        await engine.aclose()


Streams = dict[int, list[SampledToken]]
"""What one request streamed, by choice."""


async def ask(client: Client, prompt: str | Sequence[int], options: Options) -> Streams:
    given: Options = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "logprobs": 10}
    streams: Streams = defaultdict(list)
    asked = prompt if isinstance(prompt, str) else tuple(prompt)
    async for item in client.stream(asked, **(given | options)):
        if isinstance(item, TokenEvent):
            streams[item.index].extend(item.tokens)
    assert sorted(streams) == list(range(options.get("n", 1)))
    assert {len(tokens) for tokens in streams.values()} == {24}
    return streams


async def ask_all(client: Client) -> list[Streams]:
    """The shared prefix is in the cache when the others come, all at once."""
    first = await ask(client, *REQUESTS[0])
    return [first, *await asyncio.gather(*(ask(client, *request) for request in REQUESTS[1:]))]


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two streams part: what either chose, and how far its rival was behind, by the first stream."""

    place: int
    gap: float


def parting(first: Sequence[SampledToken], second: Sequence[SampledToken]) -> Parting | None:
    for place, (one, other) in enumerate(zip(first, second, strict=True)):
        if one.token_id != other.token_id:
            return Parting(place, _logprob_of(one, one.token_id) - _logprob_of(one, other.token_id))
    return None


def _logprob_of(token: SampledToken, token_id: int) -> float:
    return next((t.logprob for t in token.top_logprobs if t.token_id == token_id), -torch.inf)


# What 90 % of the emulated device leaves is 14 blocks.
TIGHT = {
    "cache.gpu_memory_utilization": "0.9",
    "cache.swap_space": "16MiB",
    "scheduler.max_num_batched_tokens": "24",
    "policies.admission": "first-chunk",
}


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Streams]:
    async def ask() -> list[Streams]:
        async with running(folder, None, **{"cache.num_blocks": "256"}) as client:
            assert (await client.server_info()).kernels != "cuda-emulated"
            return await ask_all(client)

    return asyncio.run(ask())


def check_greedy(expected: Sequence[Streams], found: Sequence[Streams]) -> None:
    partings = [
        parting(one[0], other[0])
        for (_, options), one, other in zip(REQUESTS, expected, found, strict=True)
        if not options
    ]
    parted = [found for found in partings if found is not None]
    assert all(found.gap < TOLERANCE for found in parted), partings
    assert len(parted) <= len(partings) / 2, partings


@pytest.mark.parametrize("where", ["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
async def test_tokens_are_those_of_the_cpu_under_swaps_copies_chunks_and_hits(
    folder: Path, expected: list[Streams], where: str
) -> None:
    on_gpu = where == "gpu"
    backend = None if on_gpu else emulated_backend()
    device = {"model.device": "cuda", "cache.num_blocks": "14"} if on_gpu else {}
    async with running(folder, backend, **TIGHT, **device) as client:
        found = await ask_all(client)
        info, load = await client.server_info(), await client.load()
    assert info.num_blocks == 14
    assert (info.kernels, info.device) == (("cuda", "cuda:0") if on_gpu else ("cuda-emulated", "cpu"))
    assert load.num_swapped_out_blocks_total > 0
    assert load.num_swapped_in_blocks_total > 0
    assert load.num_copied_blocks_total > 0
    assert load.num_prefix_hit_tokens_total >= len(SHARED) // 16 * 16
    check_greedy(expected, found)


async def test_tokens_are_those_of_the_cpu_when_decode_steps_are_replayed(
    folder: Path, expected: list[Streams]
) -> None:
    graphs = TapeGraphs(emulated_launcher().runtime)
    async with running(
        folder, emulated_backend(graphs), **TIGHT, **{"scheduler.max_num_seqs": "6"}
    ) as client:
        assert len(graphs.tapes) == len(graph_sizes(6))
        in_calibration = sum(tape.num_replays for tape in graphs.tapes)
        found = await ask_all(client)
        assert sum(tape.num_replays for tape in graphs.tapes) > in_calibration + 24
        assert (await client.load()).num_swapped_out_blocks_total > 0
    check_greedy(expected, found)


async def test_a_step_that_does_not_wait_for_a_swap_would_be_seen(
    folder: Path, expected: list[Streams], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KvCache, "await_copies", lambda cache, batch: None)
    async with running(folder, emulated_backend(), **TIGHT) as client:
        found = await ask_all(client)
    with pytest.raises(AssertionError):
        check_greedy(expected, found)


PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a house by the sea,",
    "To bake bread, you need flour, water,",
)


@pytest.mark.gpu
async def test_the_embedded_model_is_served_as_on_the_cpu() -> None:
    served: list[list[Streams]] = []
    for device in ("cpu", "cuda"):
        flags = {"model.source": "embedded", "model.device": device, "cache.num_blocks": "64"}
        async with running(Path(), None, **flags) as client:
            served.append(await asyncio.gather(*(ask(client, prompt, {}) for prompt in PROMPTS)))
    partings = [parting(one[0], other[0]) for one, other in zip(*served, strict=True)]
    assert all(found is None or found.gap < EMBEDDED_TOLERANCE for found in partings), partings
