"""Where there is no GPU: in which order decode graphs ask torch for what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from pageturner.service.model.graphs import TorchGraphs


def test_a_warm_up_runs_beside_and_both_streams_wait() -> None:
    log: list[str] = []
    graphs = TorchGraphs(torch.device("cuda", 1), _FakeCuda(log))
    graphs.warm_up(lambda: _said(log, "forward"))
    assert log == [
        "pool",
        "side waits for current",
        "enter stream side",
        "forward",
        "leave stream side",
        "current waits for side",
    ]


def test_all_captures_share_one_pool_on_their_device() -> None:
    log: list[str] = []
    graphs = TorchGraphs(torch.device("cuda", 1), _FakeCuda(log))
    for _ in range(2):
        log.clear()
        replay, result = graphs.capture(lambda: _said(log, "forward"))
        assert log == [
            "enter device cuda:1",
            "enter graph in the pool",
            "forward",
            "leave graph in the pool",
            "leave device cuda:1",
        ]
        replay()
        assert log[-1] == "replay"
        assert result.numel() == 0


def _said(log: list[str], word: str) -> torch.Tensor:
    log.append(word)
    return torch.empty(0)


class _FakeCuda:
    """What TorchGraphs asks of torch.cuda, written down."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def graph_pool_handle(self) -> str:
        self.log.append("pool")
        return "the pool"

    def Stream(self, device: torch.device) -> _FakeStream:  # noqa: N802 - torch's name
        return _FakeStream("side", self.log)

    def current_stream(self, device: torch.device) -> _FakeStream:
        return _FakeStream("current", self.log)

    def CUDAGraph(self) -> SimpleNamespace:  # noqa: N802 - torch's name
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    @contextmanager
    def _within(self, what: str) -> Iterator[None]:
        self.log.append(f"enter {what}")
        yield
        self.log.append(f"leave {what}")

    def stream(self, stream: _FakeStream) -> AbstractContextManager[None]:
        return self._within(f"stream {stream.name}")

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return self._within(f"device {device}")

    def graph(self, graph: object, *, pool: str) -> AbstractContextManager[None]:
        return self._within(f"graph in {pool}")


@dataclass
class _FakeStream:
    name: str
    log: list[str]

    def wait_stream(self, other: _FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")
