"""Where a model computes, and what hangs on that choice: its operations, its queues, its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from pageturner.service.errors import ConfigError
from pageturner.service.model.memory import CudaMemoryMeter, MemoryMeter
from pageturner.service.model.streams import Streams, streams_of

if TYPE_CHECKING:
    from pageturner.kernels.interface import PagedOps
    from pageturner.kernels.selection import QuantisedKernels
    from pageturner.service.model.graphs import GraphBackend
    from pageturner.service.model.options import ModelOptions


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What of a model's attention decides which kernels fit."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


ChooseOps = Callable[[HeadShape, torch.dtype], "PagedOps"]


def _nothing() -> None:
    """The CPU has finished when it returns, and is any thread's."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A device, and the way to use it.

    choose_ops: the operations for a shape of heads in a dtype. streams: its queues. synchronize: returns
    when all that was enqueued on the device is done. adopt_thread: makes it the current device of the
    calling thread. quantised: what computes with quantised weights, None where nothing does. meter: of the
    device's own memory, None where that is the machine's. graphs: what captures decode steps, if anything
    does.
    """

    device: torch.device
    choose_ops: ChooseOps
    streams: Streams
    synchronize: Callable[[], None] = field(default=_nothing)
    adopt_thread: Callable[[], None] = field(default=_nothing)
    quantised: QuantisedKernels | None = None
    meter: MemoryMeter | None = None
    graphs: GraphBackend | None = None


def backend_of(
    device: torch.device, choose_ops: ChooseOps, quantised: QuantisedKernels | None = None
) -> Backend:
    """The backend of a device as torch has it, which is the calling thread's current one from now on.

    (CUDA keeps a current device for each thread, the first by default, and makes a context on it, half a
    gigabyte, when a thread comes back to it: where that GPU is full, every launch on ours would fail.)
    """
    if device.type != "cuda":
        return Backend(device, choose_ops, streams_of(device), quantised=quantised)
    # Here, not above: serving on the CPU has no use for it.
    from pageturner.service.model.graphs import TorchGraphs

    adopt_thread = partial(torch.cuda.set_device, device)
    adopt_thread()
    return Backend(
        device,
        choose_ops,
        streams_of(device),
        synchronize=partial(torch.cuda.synchronize, device),
        adopt_thread=adopt_thread,
        meter=CudaMemoryMeter(device),
        graphs=TorchGraphs(device),
    )


def choose_device(
    options: ModelOptions, trouble_of: Callable[[int], str | None] | None = None
) -> tuple[torch.device, str | None]:
    """(device, why it is not the GPU that was looked for) as `options` want and this machine has it.

    trouble_of: why the GPU of a number cannot be used, None if it can; asked of torch by default. Raises
    ConfigError for a GPU that was asked for and cannot be used, unless options.allow_fallback, and for a
    dtype that only a GPU has where the model runs on the CPU.
    """
    device, trouble = torch.device("cpu"), None
    if options.device != "cpu":
        index = 0 if options.device == "auto" else torch.device(options.device).index or 0
        wanted = torch.device("cuda", index)
        trouble = (trouble_of or gpu_trouble)(index)
        if trouble is None:
            return wanted, None
        if options.device != "auto" and not options.allow_fallback:
            raise ConfigError(
                "model.device",
                f"{wanted} cannot be used: {trouble}; model.allow_fallback = true serves on the CPU instead",
            )
    if options.dtype == "float16":
        reason = "" if trouble is None else f", since no GPU can be used: {trouble}"
        raise ConfigError("model.dtype", f"float16 is for GPUs, and the model runs on the CPU{reason}")
    return device, trouble


def gpu_trouble(index: int) -> str | None:
    """Why torch cannot compute on this GPU: no CUDA in torch, no driver or one too old, no such GPU, or one
    that this build of torch has no code for. None if it can."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call] # torch leaves it so
        count = torch.cuda.device_count()
        if index >= count:
            return f"the machine has {count} of them"
        torch.zeros(1, device=torch.device("cuda", index)).add_(1).item()
    except (AssertionError, RuntimeError, torch.cuda.DeferredCudaCallError) as error:
        # torch says in the first sentence what is missing, and in the others where to get it.
        return str(error).strip().partition("\n")[0].partition(". ")[0] or type(error).__name__
    return None
