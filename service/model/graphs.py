"""Decode steps as CUDA graphs: the forward of each padded batch size is captured once and then replayed.

A small model's step is hundreds of launches of a few microseconds each, which the host can't issue as fast as
a GPU runs them; a graph issues all of them at once. Steps that no graph fits (a prompt's rows, more
sequences than the largest size) run as they would without.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pageturner.kernels import address_checks
from pageturner.kernels.cuda.attention_plan import AttentionShape
from pageturner.kernels.cuda.ops import CudaOps
from pageturner.kernels.cuda.static_batch import StaticBatch
from pageturner.kernels.layout import AttentionBatch
from pageturner.service.model.batch import ForwardBatch
from pageturner.service.model.causal_model import CausalModel
from pageturner.service.model.kv_cache import KvCache


class GraphBackend(Protocol):
    """Captures device work. All graphs of one backend share their memory, so they run one at a time, and
    what one of them gave is valid until the next replay of any of them."""

    def warm_up(self, forward: Callable[[], torch.Tensor]) -> None:
        """Run it once outside of a capture, so that whatever is compiled, loaded or allocated once is."""
        ...

    def capture(self, forward: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """(replay, the tensor into which each replay puts the result). Raises if it can't be captured."""
        ...


class TorchGraphs:
    """CUDA graphs of one GPU. Our launches join in because they sample torch's current stream.

    All of it happens on one stream: cuBLAS keeps a workspace, 32 MiB on Hopper, for each that it meets.
    cuda: torch.cuda, or what stands for it.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device)
        self._memory = cuda.graph_pool_handle()

    def warm_up(self, forward: Callable[[], torch.Tensor]) -> None:
        current = self._cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with self._cuda.stream(self._stream):
            forward()
        current.wait_stream(self._stream)

    def capture(self, forward: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        cuda, graph = self._cuda, self._cuda.CUDAGraph()
        reason: Exception | None = None
        capturing = cuda.graph(graph, pool=self._memory, stream=self._stream)
        try:
            # The stream twice: torch does not leave its own where ending a capture fails.
            with cuda.device(self._device), cuda.stream(self._stream), capturing:
                try:
                    result = forward()
                except Exception as error:
                    reason = error
                    raise
        except Exception as error:
            self._end_allocations()
            # Ending an invalidated capture fails as well, with an error that hides the first one.
            raise reason or error from None
        return graph.replay, result

    def _end_allocations(self) -> None:
        """What torch leaves out where ending a capture fails (as of 2.13).

        Its allocator would think it under way for ever: never give memory back, and refuse to be asked to.
        """
        with suppress(RuntimeError):  # there is nothing to end: the capture ended well, or never began
            self._cuda.memory._cuda_endAllocateToPool(self._device.index, self._memory)
            self._cuda.memory._cuda_releasePool(self._device.index, self._memory)


@dataclass(frozen=True, slots=True)
class _Graph:
    """logits: [size, vocab_size], of the last replay."""

    batch: StaticBatch
    replay: Callable[[], None]
    logits: torch.Tensor


class DecodeGraphs:
    """The forward of one model over one cache, replayed where a graph fits.

    sizes: numbers of sequences to capture for. max_blocks: longest block table. ops: those of the model.
    Nothing is captured yet; until `capture`, every forward runs eagerly.
    """

    def __init__(
        self,
        model: CausalModel,
        kv_cache: KvCache,
        ops: CudaOps,
        backend: GraphBackend,
        sizes: Sequence[int],
        max_blocks: int,
    ) -> None:
        self.sizes = tuple(sorted(set(sizes)))
        self._model, self._kv_cache, self._ops, self._backend = model, kv_cache, ops, backend
        self._max_blocks = max_blocks
        self._graphs: tuple[_Graph, ...] = ()
        """Smallest first."""

    @property
    def captured(self) -> tuple[int, ...]:
        """Sizes that are replayed, ascending."""
        return tuple(graph.batch.size for graph in self._graphs)

    @torch.inference_mode()
    def capture(self) -> str | None:
        """Capture all sizes, or none and say why in one line. The cache is not written to.

        A model that can't be captured, for whatever reason (it reads results on the host, allocates in a
        way of its own, its attention has no static plan), goes on running eagerly.
        """
        prepared: list[StaticBatch] = []
        try:
            self._graphs = tuple(self._captured(prepared))[::-1]
        except Exception as error:  # a model's code and a driver may raise anything
            for static in prepared:
                self._ops.forget(static.attention)
            return f"{type(error).__name__}: {_first_line(error)}"
        return None

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_cache: KvCache) -> torch.Tensor:
        """As the model's own. The logits of a replayed step are valid until the next forward."""
        graph = None if batch.adapters is not None else self._graph_for(batch.attention)
        if graph is None or kv_cache is not self._kv_cache:
            return self._model.forward(batch, kv_cache)
        host, num_sequences = batch.attention.host, batch.attention.num_sequences
        assert host is not None
        address_checks.check_addresses(host, kv_cache.num_blocks, kv_cache.layout.block_size)
        graph.batch.load(batch.token_ids, host)
        graph.replay()
        # One row a sequence, so that sequence i is row i.
        everyone = len(batch.logit_rows) == num_sequences
        return graph.logits[:num_sequences] if everyone else graph.logits[batch.logit_rows]

    def _graph_for(self, batch: AttentionBatch) -> _Graph | None:
        index = bisect_left(self._graphs, batch.num_sequences, key=lambda graph: graph.batch.size)
        if index == len(self._graphs) or batch.host is None:
            return None
        graph = self._graphs[index]
        return graph if graph.batch.fits(batch) else None

    def _captured(self, prepared: list[StaticBatch]) -> Iterator[_Graph]:
        """Largest first: the smaller ones find its memory free, and take no more.

        prepared: gets each batch once the operations know it.
        """
        shapes = self._attention_shapes()
        partials = None
        for size in reversed(self.sizes):
            static = StaticBatch(
                size,
                self._max_blocks,
                self._kv_cache.layout.block_size,
                shapes,
                self._ops.planner,
                self._kv_cache.device,
                partials,
            )
            partials = static.partials
            self._ops.register(static.attention, static.plans)
            prepared.append(static)
            forward = self._forward_of(static)
            self._backend.warm_up(forward)
            yield _Graph(static, *self._backend.capture(forward))

    def _forward_of(self, static: StaticBatch) -> Callable[[], torch.Tensor]:
        rows = torch.arange(static.size, device=self._kv_cache.device)
        batch = ForwardBatch(static.token_ids, static.attention, rows)
        return lambda: self._model.forward(batch, self._kv_cache)

    def _attention_shapes(self) -> tuple[AttentionShape, ...]:
        """Found by a forward of padding alone. (On the current stream: the operations keep room from it.)"""
        padding = StaticBatch(
            1, 1, self._kv_cache.layout.block_size, (), self._ops.planner, self._kv_cache.device
        )
        self._forward_of(padding)()
        return self._ops.attention_shapes


def graph_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes worth a graph: padding costs at most seven rows up to 64, then an eighth."""
    sizes = [size for size in (1, 2, 4) if size <= largest]
    size = 8
    while size < largest:
        sizes.append(size)
        size += max(8, 1 << (size.bit_length() - 4))
    return tuple(dict.fromkeys((*sizes, largest)))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
