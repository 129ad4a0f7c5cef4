"""Where there is no GPU: in which order decode graphs ask torch for what, and what they leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from pageturner.service.model.graphs import TorchGraphs

CUDA = torch.device("cuda", 1)


def test_a_warm_up_runs_beside_and_both_streams_wait() -> None:
    cuda = _FakeCuda()
    graphs = TorchGraphs(CUDA, cuda)
    graphs.warm_up(lambda: _said(cuda.log, "forward"))
    assert cuda.log == [
        "new stream",
        "pool",
        "side waits for current",
        "enter stream side",
        "forward",
        "leave stream side",
        "current waits for side",
    ]


def test_all_captures_share_one_pool_on_their_device_and_one_stream_with_the_warm_ups() -> None:
    cuda = _FakeCuda()
    graphs = TorchGraphs(CUDA, cuda)
    for _ in range(2):
        graphs.warm_up(lambda: _said(cuda.log, "warm-up"))
        cuda.log.clear()
        replay, result = graphs.capture(lambda: _said(cuda.log, "forward"))
        assert cuda.log == [
            "enter device cuda:1",
            "enter stream side",
            "enter graph in the pool on side",
            "forward",
            "leave graph in the pool on side",
            "leave stream side",
            "leave device cuda:1",
        ]
        replay()
        assert cuda.log[-1] == "replay"
        assert result.numel() == 0


def test_a_capture_that_is_spoilt_says_by_what_and_leaves_stream_and_allocator_as_they_were() -> None:
    """torch's `graph` raises where the capture cannot be ended, its stream still the current one, its
    allocator still in the capture."""
    cuda = _FakeCuda(ending="operation failed due to a previous error during capture")
    graphs = TorchGraphs(CUDA, cuda)

    def forward() -> torch.Tensor:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.capture(forward)
    assert cuda.log[-4:] == [
        "leave stream side",
        "leave device cuda:1",
        "end allocations of 1 in the pool",
        "release 1 the pool",
    ]


def test_a_forward_that_raises_by_itself_leaves_the_pool_to_torch() -> None:
    """Then the capture ended well, and torch gives up its memory with the graph: not a second time."""
    cuda = _FakeCuda()

    def forward() -> torch.Tensor:
        raise ValueError("a model's own")

    with pytest.raises(ValueError, match="a model's own"):
        TorchGraphs(CUDA, cuda).capture(forward)
    assert cuda.log[-1] == "leave device cuda:1"


def test_what_ends_allocations_in_torch_is_there() -> None:
    """Private names, which torch's own MemPool is made with."""
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        assert callable(getattr(torch.cuda.memory, name))


def _said(log: list[str], word: str) -> torch.Tensor:
    log.append(word)
    return torch.empty(0)


@dataclass
class _FakeCuda:
    """What TorchGraphs asks of torch.cuda, written down. ending: why a capture can't be ended, if so."""

    ending: str | None = None
    log: list[str] = field(default_factory=list)

    def graph_pool_handle(self) -> str:
        self.log.append("pool")
        return "the pool"

    def Stream(self, device: torch.device) -> _FakeStream:  # noqa: N802 - torch's name
        self.log.append("new stream")
        return _FakeStream("side", self.log)

    def current_stream(self, device: torch.device) -> _FakeStream:
        return _FakeStream("current", self.log)

    def CUDAGraph(self) -> SimpleNamespace:  # noqa: N802 - torch's name
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    @contextmanager
    def _within(self, what: str) -> Iterator[None]:
        self.log.append(f"enter {what}")
        try:
            yield
        finally:
            self.log.append(f"leave {what}")

    def stream(self, stream: _FakeStream) -> AbstractContextManager[None]:
        return self._within(f"stream {stream.name}")

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return self._within(f"device {device}")

    @contextmanager
    def graph(self, graph: object, *, pool: str, stream: _FakeStream) -> Iterator[None]:
        with self._within(f"graph in {pool} on {stream.name}"):
            try:
                yield
            finally:
                if self.ending is not None:
                    raise RuntimeError(self.ending)

    @property
    def memory(self) -> SimpleNamespace:
        def end(device: int, pool: str) -> None:
            if self.ending is None:
                raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
            self.log.append(f"end allocations of {device} in {pool}")

        return SimpleNamespace(
            _cuda_endAllocateToPool=end,
            _cuda_releasePool=lambda device, pool: self.log.append(f"release {device} {pool}"),
        )


@dataclass
class _FakeStream:
    name: str
    log: list[str]

    def wait_stream(self, other: _FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")
