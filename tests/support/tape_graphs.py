"""CUDA graphs without a GPU: what runs during a capture is taped, and a replay runs the tape, not the code.

As in a real graph, everything that Python decided is frozen at capture: which operations ran, on which
tensors at which addresses, with which numbers, grids and argument bytes. Reading a tensor's values on the
host, or bringing host values to the device, is refused as a capturing stream refuses it. Only what lies
in memory that both runs share can differ from one replay to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pageturner.kernels.cuda.runtime import Dim3, Kernel, Runtime, Struct
from pageturner.kernels.cuda.variants import Variant

# What would wait for the device, or copy from pageable memory: CUDA refuses both while a stream captures.
_REFUSED_CALLS = frozenset(
    {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.nonzero, torch.nonzero}
    | {torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__}
    | {torch.tensor, torch.as_tensor, torch.from_numpy, torch.Tensor.cpu}
)
_REFUSED_OPERATIONS = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"})


class CaptureRefused(RuntimeError):
    """What CUDA calls `operation not permitted when stream is capturing`."""


class Tape:
    """Closures in the order in which they ran. Holds every tensor it names, as a graph's pool does."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], object]] = []
        self.num_launches = 0
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        for step in self.steps:
            step()


class TapeGraphs:
    """A `GraphBackend`. The operations whose launches shall be taped are to be given its `runtime`."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = TapedRuntime(runtime, self)
        self.recording: Tape | None = None
        self.tapes: list[Tape] = []

    def warm_up(self, forward: Callable[[], torch.Tensor]) -> None:
        forward()

    def capture(self, forward: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        tape = Tape()
        self.recording = tape
        try:
            with ExitStack() as stack:
                # transformers leaves checks of values out while a stream captures.
                stack.enter_context(patch.object(torch.cuda, "is_current_stream_capturing", lambda: True))
                stack.enter_context(_RefuseHostReads())
                stack.enter_context(_TapeOperations(tape))
                output = forward()
        finally:
            self.recording = None
        self.tapes.append(tape)
        return tape.replay, output


class TapedRuntime:
    """A `Runtime` whose kernels are taped while a capture is on."""

    def __init__(self, runtime: Runtime, graphs: TapeGraphs) -> None:
        self._runtime, self._graphs = runtime, graphs
        self.name, self.device = runtime.name, runtime.device
        self.num_multiprocessors = runtime.num_multiprocessors

    def load(self, variants: Sequence[Variant]) -> Mapping[Variant, Kernel]:
        if self._graphs.recording is not None:
            raise CaptureRefused(f"loading {variants[0].expression} while capturing")
        kernels = self._runtime.load(variants)
        return {variant: _TapedKernel(kernel, self._graphs) for variant, kernel in kernels.items()}


class _TapedKernel:
    def __init__(self, kernel: Kernel, graphs: TapeGraphs) -> None:
        self._kernel, self._graphs = kernel, graphs

    def __call__(self, grid: Dim3, block: Dim3, args: tuple[Struct, ...], *, shared_mem: int) -> None:
        if (tape := self._graphs.recording) is not None:
            frozen = tuple(argument.copy() for argument in args)
            tape.steps.append(lambda: self._kernel(grid, block, frozen, shared_mem=shared_mem))
            tape.num_launches += 1
        self._kernel(grid, block, args, shared_mem=shared_mem)


class _RefuseHostReads(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _REFUSED_CALLS:
            raise CaptureRefused(f"{func.__name__} while capturing")
        return func(*args, **(kwargs or {}))


class _TapeOperations(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch has it untyped
    """Runs every operation, and notes how to run it again into the very tensors that it gave."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch has it untyped
        self._tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func.name().split(".")[0] in _REFUSED_OPERATIONS:
            raise CaptureRefused(f"{func.name()} while capturing")
        result = func(*args, **named)
        given = {_storage(leaf) for leaf in tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        fresh = [tensor for tensor in made if _storage(tensor) not in given]
        if "empty" in func.name():
            for tensor in fresh:
                _poison(tensor)
        elif fresh:
            self._tape.steps.append(lambda: _run_into(fresh, made, func, args, named))
        elif func._schema.is_mutable:
            self._tape.steps.append(lambda: func(*args, **named))
        self._tape.steps.append(lambda: made)  # keeps views, and so their memory, alive
        return result


def _run_into(
    fresh: list[torch.Tensor],
    made: list[torch.Tensor],
    func: Any,
    args: tuple[Any, ...],
    named: dict[str, Any],
) -> None:
    again = [leaf for leaf in tree_leaves(func(*args, **named)) if isinstance(leaf, torch.Tensor)]
    for tensor, value in zip(made, again, strict=True):
        if any(tensor is one for one in fresh):
            tensor.copy_(value)


def _storage(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory. (Empty ones share none; oneDNN's packed weights hide theirs.)"""
    if tensor.is_mkldnn or not tensor.numel():
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def _poison(tensor: torch.Tensor) -> None:
    """Memory that was not written holds NaN, as the worst that a pool may hand out."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
