"""A GPU for a torch without one: tensors that say `cuda:0` and live on the CPU, held to a GPU's rules.

Inside `FakeCuda` every call of torch's Python interface is looked at:

- tensors of the CPU and of the GPU in one operation raise, as they would (but for scalars of the CPU);
- what makes the host wait for the GPU is counted: results read back, shapes that depend on values (nonzero,
  boolean masks), and copies to the device that are not asynchronous from pinned memory;
- the operation itself is run on the CPU.

What an operation does inside of torch is not seen: the rules are those of its interface.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda", 0)

_READS = {"item", "tolist", "equal", "allclose"} | {
    f"__{kind}__" for kind in ("bool", "int", "float", "index")
}
"""Values that come to the host."""
_SHAPES = {"nonzero", "masked_select", "unique", "unique_consecutive", "repeat_interleave", "bincount"}
"""Results whose shape depends on values."""
_MOVES = {"to", "cpu", "cuda"}


class FakeCudaTensor(torch.Tensor):
    """A tensor of the fake GPU; `memory` is what it holds."""

    memory: torch.Tensor

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> FakeCudaTensor:
        made: FakeCudaTensor = torch.Tensor._make_wrapper_subclass(
            cls, memory.shape, strides=memory.stride(), dtype=memory.dtype, device=CUDA
        )
        made.memory = memory
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        raise AssertionError(f"{func} on a fake tensor, outside of FakeCuda")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # the stub forgets the class
        cls, func: object, *_: object, **__: object
    ) -> Any:
        raise AssertionError(f"{func} got past FakeCuda")


class FakeCuda(TorchFunctionMode):
    """A machine with one GPU, while it is entered. syncs: how often, and by what, the host waited for it."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs: Counter[str] = Counter()
        self._pinned: dict[int, torch.Tensor] = {}
        self.registered: set[int] = set()

    @property
    def num_syncs(self) -> int:
        return self.syncs.total()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._call(func, args, dict(kwargs or {}))

    def _call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            return self._attribute(func, args[0])
        if kwargs.pop("pin_memory", False) or name == "pin_memory":
            return self._pin(args[0] if name == "pin_memory" else func(*args, **kwargs))
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        on_gpu = [tensor for tensor in tensors if isinstance(tensor, FakeCudaTensor)]
        if name == "_has_compatible_shallow_copy_type":  # nn.Module.to asks: may parameters change in place?
            return False
        if name in _MOVES:
            return self._move(name, args, kwargs)
        wants_gpu = _is_cuda(kwargs.get("device"))
        if wants_gpu:
            kwargs["device"] = "cpu"
        if not on_gpu and not wants_gpu:
            return func(*args, **kwargs)
        if wants_gpu and not on_gpu:
            if name in ("tensor", "as_tensor"):
                self.syncs["upload by torch.tensor"] += 1
            return FakeCudaTensor(func(*args, **kwargs))
        self._check(name, args, kwargs, tensors)
        return self._run(func, args, kwargs)

    def _run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """On the memory; a result that is one of the arguments stays the same tensor."""
        leaves = tree_flatten((args, kwargs))[0]
        known = {id(leaf.memory): leaf for leaf in leaves if isinstance(leaf, FakeCudaTensor)}
        inner_args, inner_kwargs = tree_map(_memory, (tuple(args), dict(kwargs)))
        result = func(*inner_args, **inner_kwargs)

        def outer(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return known[id(leaf)] if id(leaf) in known else FakeCudaTensor(leaf)

        return tree_map(outer, result)

    def _attribute(self, func: Callable[..., Any], tensor: torch.Tensor) -> Any:
        name = func.__self__.__name__  # type: ignore[attr-defined] # a getter's descriptor
        if isinstance(tensor, FakeCudaTensor):
            if name == "device":
                return CUDA
            if name == "is_cuda":
                return True
            return self._run(func, (tensor,), {})
        return func(tensor)

    def _check(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Raise for devices that do not go together, and count what waits."""
        elsewhere = [t for t in tensors if not isinstance(t, FakeCudaTensor) and t.dim()]
        if name == "copy_":
            self._count_copy(args[0], args[1], kwargs.get("non_blocking", len(args) > 2 and args[2]))
            return
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            for part in index:
                if isinstance(part, torch.Tensor) and _memory(part).dtype is torch.bool:
                    self.syncs[f"{name} by a mask"] += 1
                elif isinstance(part, (list, range)) or (
                    isinstance(part, torch.Tensor) and not isinstance(part, FakeCudaTensor)
                ):
                    self.syncs[f"{name} by ids of the host"] += 1
            indices = {id(part) for part in index}
            elsewhere = [tensor for tensor in elsewhere if id(tensor) not in indices]
        if elsewhere:
            raise RuntimeError(f"{name}: expected all tensors on one device, found cuda:0 and cpu")
        if name == "numpy":
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if name == "repeat_interleave" and "output_size" in kwargs:
            return
        if name in _READS or name in _SHAPES or (name == "where" and len(args) == 1):
            self.syncs[name] += 1

    def _move(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`to` in all its forms, `cpu` and `cuda`."""
        tensor, *rest = args
        target = CUDA if isinstance(tensor, FakeCudaTensor) else torch.device("cpu")
        dtype = _memory(tensor).dtype
        if name != "to":
            target = torch.device(name)
        for part in (*rest, kwargs.get("device"), kwargs.get("dtype")):
            if isinstance(part, torch.Tensor):
                target, dtype = _device_of(part), _memory(part).dtype
            elif isinstance(part, torch.dtype):
                dtype = part
            elif isinstance(part, (torch.device, str)):
                target = torch.device(part)
        moves = _device_of(tensor).type != target.type
        inner = _memory(tensor).to(dtype, copy=moves or kwargs.get("copy", False))
        if inner is _memory(tensor):
            return tensor
        result = FakeCudaTensor(inner) if target.type == "cuda" else inner
        if moves:
            self._count_copy(result, tensor, kwargs.get("non_blocking", False))
        return result

    def _count_copy(self, destination: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        to_gpu, from_gpu = (isinstance(t, FakeCudaTensor) for t in (destination, source))
        if to_gpu == from_gpu or not _memory(source).numel():
            return
        host = source if to_gpu else destination
        address = host.untyped_storage().data_ptr()
        if not (non_blocking and (address in self._pinned or address in self.registered)):
            self.syncs["upload" if to_gpu else "download"] += 1

    def __enter__(self) -> FakeCuda:
        self._patch = mock.patch.object(torch.cuda, "cudart", return_value=self)
        self._patch.start()
        super().__enter__()  # type: ignore[no-untyped-call] # torch leaves it so
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call] # torch leaves it so
        self._patch.stop()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        self.registered.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        self.registered.remove(address)
        return 0

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        # Kept, so that its address stays its own.
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor


def _memory(leaf: Any) -> Any:
    return leaf.memory if isinstance(leaf, FakeCudaTensor) else leaf


def _device_of(tensor: torch.Tensor) -> torch.device:
    return CUDA if isinstance(tensor, FakeCudaTensor) else torch.device("cpu")


def _is_cuda(value: object) -> bool:
    return isinstance(value, (torch.device, str)) and torch.device(value).type == "cuda"


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, for a test to look at."""
    found: torch.Tensor = _memory(tensor)
    return found
