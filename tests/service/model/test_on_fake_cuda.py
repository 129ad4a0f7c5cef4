"""The GPU's path on a fake GPU: the same results as on the CPU, nothing on two devices, few waits.

The numbers of waits asserted here are those that the sampler's docstring states.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.fake_cuda import CUDA, FakeCuda, on_cpu
from support.lazy_streams import lazy_copies
from support.ops import cpu_cache_dir
from support.paged_sessions import PagedSession
from support.random_models import VOCAB_SIZE, save, tiny_model
from torch import nn

from pageturner.kernels.cuda.emulation.build import Builder
from pageturner.kernels.cuda.emulation.runtime import EmulatedRuntime
from pageturner.kernels.cuda.ops import CudaOps
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.interface import PagedOps
from pageturner.kernels.layout import KvLayout
from pageturner.kernels.torch_ops import TorchOps
from pageturner.service.core.outputs import BlockCopies, BlockCopy, SchedulerOutput
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.model import kv_cache
from pageturner.service.model.decoder import Decoder, load_decoder
from pageturner.service.model.decoder_config import parse_decoder_config
from pageturner.service.model.invariance import batch_variance
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.model.loader import WeightFiles
from pageturner.service.model.pages import own_pages
from pageturner.service.model.sampler import Sampler
from pageturner.service.model.streams import Streams
from pageturner.service.model.transformers_model import checked_model
from pageturner.service.model.upload import Array, upload

BLOCK_SIZE = 16
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


class OnFakeGpu(EmulatedRuntime):
    """Emulated kernels that are given addresses of the fake GPU's memory."""

    @property
    def device(self) -> torch.device:
        return CUDA


def emulated(device: torch.device) -> PagedOps:
    runtime = OnFakeGpu if device == CUDA else EmulatedRuntime
    return CudaOps(Launcher(runtime(Builder(cpu_cache_dir()))))


def in_torch(device: torch.device) -> PagedOps:
    return TorchOps()


MakeOps = Callable[[torch.device], PagedOps]
Load = Callable[[PagedOps, torch.device], Decoder]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A tiny llama with heads of 64, in bfloat16."""
    config, model = tiny_model("llama", 3, head_dim=64)
    folder = save(model, tmp_path_factory.mktemp("llama"))
    parsed = parse_decoder_config(config.to_dict() | {"architectures": None})

    def load(ops: PagedOps, device: torch.device) -> Decoder:
        weights = WeightFiles([folder / "model.safetensors"])
        return load_decoder(parsed, weights, ops, torch.bfloat16, device=device)

    return load


def session_on(
    device: torch.device,
    make_ops: MakeOps,
    load: Load,
    streams: Streams | None = None,
) -> PagedSession:
    ops = make_ops(device)
    return PagedSession(load(ops, device), ops, block_size=BLOCK_SIZE, num_blocks=24, streams=streams)


def with_params(output: SchedulerOutput, params: SamplingParams) -> SchedulerOutput:
    scheduled = tuple(
        replace(
            part, samples=tuple(replace(row, params=params, output_token_ids=(1, 2)) for row in part.samples)
        )
        for part in output.scheduled
    )
    return replace(output, scheduled=scheduled)


def life(session: PagedSession) -> list[torch.Tensor]:
    """Logits of a prompt in chunks, another beside it, decodes, a swap there and back, copies and a clear."""
    first, second = session.add(list(range(1, 41))), session.add(list(range(50, 75)))
    seen = [session.step([(first, 20)]), session.step([(first, 15), (second, 20)])]
    seen += [session.step([(first, 1), (second, 1)]) for _ in range(2)]
    session.swap_out(first)
    seen.append(session.step([(second, 1)]))
    session.swap_in(first)
    seen.append(session.step([(first, 1), (second, 1)]))
    own = first.blocks[0]
    copy = session._free.pop()
    session.kv_cache.apply(BlockCopies(copies=(BlockCopy(own, copy),)))
    session.kv_cache.apply(BlockCopies(clears=(own,)))
    first.blocks[0] = copy
    seen.append(session.step([(first, 1), (second, 1)]))
    return [on_cpu(logits) for logits in seen]


@pytest.mark.parametrize("make_ops", [emulated, in_torch])
def test_logits_are_those_of_the_cpu_bit_for_bit(make_ops: MakeOps, load: Load) -> None:
    expected = life(session_on(CPU, make_ops, load))
    with FakeCuda():
        found = life(session_on(CUDA, make_ops, load, lazy_copies()))
    assert all(map(torch.equal, found, expected))
    assert all(logits.isfinite().all() for logits in found)


@pytest.fixture
def running(load: Load) -> Iterator[tuple[FakeCuda, PagedSession, SchedulerOutput]]:
    """Three sequences that decode, by emulated kernels; their next step."""
    with FakeCuda() as gpu:
        session = session_on(CUDA, emulated, load, lazy_copies())
        sequences = [session.add(list(range(first, first + 20))) for first in (1, 30, 60)]
        session.step([(sequence, 10) for sequence in sequences])
        session.step([(sequence, 1) for sequence in sequences])
        gpu.syncs.clear()
        yield gpu, session, session.output([(sequence, 1) for sequence in sequences])


@pytest.mark.parametrize(
    ("params", "num_waits"),
    [
        (GREEDY, 1),
        (SamplingParams(), 2),
        (SamplingParams(top_p=0.9, top_k=20, min_p=0.01), 2),
        (replace(GREEDY, repetition_penalty=1.2, logit_bias=((3, 1.0),)), 2),
        (SamplingParams(presence_penalty=0.5), 3),
        (replace(GREEDY, logprobs=5), 2),
        (SamplingParams(frequency_penalty=0.5, logprobs=3), 4),
    ],
)
def test_a_step_waits_for_the_gpu_as_often_as_is_stated(
    running: tuple[FakeCuda, PagedSession, SchedulerOutput], params: SamplingParams, num_waits: int
) -> None:
    gpu, session, output = running
    output = with_params(output, params)
    logits = session.runner.forward(output)
    assert gpu.syncs == Counter()
    found = Sampler(VOCAB_SIZE).sample(logits, output)
    assert gpu.num_syncs == num_waits, gpu.syncs
    assert set(gpu.syncs) == {"tolist"}
    assert found == Sampler(VOCAB_SIZE).sample(on_cpu(logits), output)


def test_block_traffic_is_enqueued_without_waiting(
    running: tuple[FakeCuda, PagedSession, SchedulerOutput],
) -> None:
    gpu, session, _ = running
    pairs = tuple(BlockCopy(block, 20 - block) for block in range(3))
    session.kv_cache.apply(BlockCopies(clears=(5,), swap_outs=pairs, swap_ins=pairs, copies=pairs))
    for pair in pairs:
        session.kv_cache.fences.touch([pair.source, pair.destination])
    assert gpu.syncs == Counter()


@pytest.fixture
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that are made for a probe ask torch for the GPU's streams."""
    monkeypatch.setattr(kv_cache, "streams_of", lambda device: lazy_copies())


@pytest.mark.parametrize("family", ["phi", "gemma2", "gpt2", "llama4"])
@pytest.mark.usefixtures("no_streams")
def test_a_model_of_transformers_is_probed_on_its_device(family: str) -> None:
    _, model = tiny_model(family, 1)
    with FakeCuda():
        nn.Module.to(model, CUDA)
        checked = checked_model(model, lambda heads: TorchOps())
        assert checked.device == CUDA
        assert {parameter.device for parameter in model.parameters()} <= {CUDA, torch.device("meta")}


@pytest.mark.usefixtures("no_streams")
def test_determinism_is_tried_on_the_device(tmp_path: Path) -> None:
    config, model = tiny_model("qwen2", 2)
    weights = WeightFiles([save(model, tmp_path) / "model.safetensors"])
    parsed = parse_decoder_config(config.to_dict() | {"architectures": None})
    with FakeCuda():
        ops = TorchOps(deterministic=True)
        decoder = load_decoder(parsed, weights, ops, torch.float32, deterministic=True, device=CUDA)
        assert batch_variance(decoder, ops, BLOCK_SIZE) is None


def test_many_arrays_travel_as_one(tmp_path: Path) -> None:
    arrays: list[Array] = [
        np.arange(3, dtype=np.int64),
        np.empty((2, 0), dtype=np.int32),
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.array([0.5], dtype=np.float64),
        np.arange(8, dtype=np.int64)[::2],
    ]
    with FakeCuda() as gpu:
        tensors = upload(arrays, CUDA)
        assert gpu.syncs == Counter()
        assert all(tensor.device == CUDA for tensor in tensors)
    for tensor, array in zip(tensors, arrays, strict=True):
        assert np.array_equal(on_cpu(tensor).numpy(), array)
        assert on_cpu(tensor).dtype == torch.from_numpy(array.copy()).dtype
        assert on_cpu(tensor).storage_offset() * on_cpu(tensor).element_size() % 16 == 0


def waits(work: Callable[[torch.Tensor], object]) -> Counter[str]:
    with FakeCuda() as gpu:
        tensor = torch.arange(6.0, device=CUDA).view(2, 3)
        work(tensor)
    found: Counter[str] = gpu.syncs
    return found


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x[0, 0].item(),
        lambda x: x.tolist(),
        lambda x: bool(x.sum() > 0),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: x[[0, 1]],
        lambda x: torch.equal(x, x),
        lambda x: torch.zeros(2).to(CUDA),
        lambda x: torch.zeros(2).to(CUDA, non_blocking=True),
        lambda x: torch.tensor([1, 2], device=CUDA),
        lambda x: x.copy_(torch.zeros(2, 3)),
    ],
)
def test_the_fake_counts_what_waits(work: Callable[[torch.Tensor], object]) -> None:
    assert waits(work).total() == 1


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x[1:].add_(x[0]),
        lambda x: x.index_select(0, torch.zeros(2, dtype=torch.long, device=CUDA)),
        lambda x: torch.where(x > 1, x, 0.0),
        lambda x: x * torch.tensor(2.0),
        lambda x: torch.zeros(2, pin_memory=True).to(CUDA, non_blocking=True),
        lambda x: (len(x), x.shape, x.dtype, x.device, x.data_ptr()),
    ],
)
def test_the_fake_lets_go_on_what_does_not_wait(work: Callable[[torch.Tensor], object]) -> None:
    assert waits(work) == Counter()


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x + torch.zeros(2, 3),
        lambda x: torch.cat((x, torch.zeros(1, 3))),
        lambda x: torch.nn.functional.linear(x, torch.zeros(4, 3)),
        lambda x: x.index_select(0, torch.zeros(2, dtype=torch.long)),
        lambda x: torch.zeros(4, 3)[x[0].long()],
        lambda x: x.numpy(),
    ],
)
def test_the_fake_refuses_two_devices(work: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises((RuntimeError, TypeError), match=r"one device|numpy"):
        waits(work)


def test_the_host_pool_is_pinned_as_long_as_there_is_a_cache() -> None:
    layout = KvLayout(1, 1, 4, 2, torch.float32)
    with FakeCuda() as gpu:
        cache = KvCache(layout, 2, 3, TorchOps(), CUDA, lazy_copies())
        assert gpu.registered == {cache.host_pool.data_ptr()}
        without = KvCache(layout, 2, 0, TorchOps(), CUDA, lazy_copies())
        assert without.num_host_blocks == 0
        pool = cache.host_pool  # outlives the cache: its pages must not be the GPU's then
        del cache
        assert gpu.registered == set()
        assert pool.shape[0] == 3


def test_a_pinned_pool_has_pages_of_its_own() -> None:
    """Small ones, too, which a heap would lay side by side; the driver pins no page twice."""
    layout = KvLayout(1, 1, 4, 2, torch.bfloat16)
    with FakeCuda():
        caches = [KvCache(layout, 2, 3, TorchOps(), CUDA, lazy_copies()) for _ in range(3)]
    addresses = [cache.host_pool.data_ptr() for cache in caches]
    assert all(address % mmap.PAGESIZE == 0 for address in addresses)
    assert len(set(addresses)) == 3
    for number, cache in enumerate(caches):
        cache.host_pool.fill_(number)
    assert [float(cache.host_pool.sum()) for cache in caches] == [48.0 * number for number in range(3)]


def test_a_host_pool_that_the_machine_does_not_have_is_named() -> None:
    with pytest.raises(MemoryError, match=f"{1 << 60} bytes of the host cannot be had"):
        own_pages((1 << 60,), torch.uint8)


def test_a_machine_that_will_not_pin_the_host_pool_is_named() -> None:
    with FakeCuda() as gpu:
        gpu.cudaHostRegister = lambda address, size, flags: 2  # type: ignore[method-assign] # out of memory
        with pytest.raises(MemoryError, match=r"192 bytes of the host cannot be pinned \(CUDA error 2\)"):
            KvCache(KvLayout(1, 1, 4, 2, torch.float32), 2, 3, TorchOps(), CUDA, lazy_copies())
