"""How much KV cache does a model need? Exact arithmetic in bytes, before anything is bought or loaded.

One token leaves a key and a value in every layer for every KV head:

    bytes a token = 2 x num_layers x num_kv_heads x (head_dim x dtype_bytes + scale_bytes)

where codes of a byte, int8 and fp8, have a scale of two bytes for each token and head, and other dtypes none.
Reserving contiguous memory means max_model_len tokens for each request, since it may get so long; paging
means its tokens rounded up to whole blocks. Where every layer has a sliding window, blocks behind it are
given back: a request holds the window's and those of one step at most, however long it gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from rich.table import Table

from pageturner.service.core.memory.window import SlidingWindow
from pageturner.service.errors import ConfigError

DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "fp32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8": 1,
    "int8": 1,
}
_SCALED = frozenset({"int8", "fp8", "float8_e4m3fn"})
_SCALE_BYTES = 2
_PLAIN_BYTES = 2  # of bfloat16, which capacity is compared with

MAX_NUMBER = 2**63 - 1
"""Of each number given; so the product of them all is within what a float holds."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides the size of its KV. Raises ConfigError unless all are positive.

    scale_bytes: beside each token's key in a head, and beside its value.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    scale_bytes: int = 0

    def __post_init__(self) -> None:
        _check_positive(self, "num_layers", "num_kv_heads", "head_dim", "dtype_bytes")

    @property
    def bytes_per_token(self) -> int:
        """A key and a value in every layer and KV head."""
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim * self.dtype_bytes + self.scale_bytes)

    @property
    def capacity_over_bfloat16(self) -> float:
        """How many times as many tokens fit in a budget as in bfloat16."""
        return self.head_dim * _PLAIN_BYTES / (self.head_dim * self.dtype_bytes + self.scale_bytes)


@dataclass(frozen=True, slots=True)
class KvPlan:
    """`batch` requests of `request_tokens` tokens each, prompt and output together.

    max_model_len: what contiguous reservation must set aside for each; request_tokens if not given.
    budget_bytes: memory for KV, if how many requests fit is asked for. window: keys that a position sees at
    most in every layer, None where one sees everything. step_tokens: that a step computes of one request at
    most (scheduler.max_num_batched_tokens); only a window asks. Raises ConfigError on nonsense.
    """

    shape: ModelShape
    request_tokens: int
    batch: int = 1
    block_size: int = 16
    max_model_len: int | None = None
    budget_bytes: int | None = None
    window: int | None = None
    step_tokens: int = 512

    def __post_init__(self) -> None:
        _check_positive(self, "request_tokens", "batch", "block_size", "step_tokens")
        if self.window is not None:
            _check_positive(self, "window")
        if self.max_model_len is not None and self.max_model_len < self.request_tokens:
            raise ConfigError(
                "max_model_len",
                f"{self.max_model_len} is less than a request of {self.request_tokens} tokens",
            )
        if self.budget_bytes is not None and self.budget_bytes < 0:
            raise ConfigError("budget_bytes", f"must not be negative, not {self.budget_bytes}")

    @property
    def bytes_per_token(self) -> int:
        """As the shape has it."""
        return self.shape.bytes_per_token

    @property
    def bytes_per_block(self) -> int:
        """A key and a value in every layer and KV head, for each token of a block."""
        return self.block_size * self.bytes_per_token

    @property
    def bytes_per_request(self) -> int:
        """Of the tokens themselves, whatever holds them."""
        return self.request_tokens * self.bytes_per_token

    @property
    def bytes_per_batch(self) -> int:
        """Of all requests that run at once."""
        return self.batch * self.bytes_per_request

    @property
    def reserved_tokens(self) -> int:
        """Tokens that contiguous reservation sets aside for a request."""
        return self.max_model_len or self.request_tokens

    @property
    def blocks_per_request(self) -> int:
        """Blocks that paging takes for a request when it has most: its last one may be part empty, and those
        before a window are given back."""
        total = -(-self.request_tokens // self.block_size)
        if self.window is None:
            return total
        return min(total, SlidingWindow(self.window, self.block_size).most_blocks(self.step_tokens))

    @property
    def seen_tokens(self) -> int:
        """Tokens of a request whose KV may be read again when it is longest."""
        return self.request_tokens if self.window is None else min(self.request_tokens, self.window)

    @property
    def contiguous_bytes_per_request(self) -> int:
        """What contiguous reservation sets aside for a request."""
        return self.reserved_tokens * self.bytes_per_token

    @property
    def paged_bytes_per_request(self) -> int:
        """A request's blocks, whole."""
        return self.blocks_per_request * self.bytes_per_block

    @property
    def contiguous_waste(self) -> float:
        """Share of what is reserved for a request that holds no token it can see, in [0, 1)."""
        return (self.reserved_tokens - self.seen_tokens) / self.reserved_tokens

    @property
    def paged_waste(self) -> float:
        """Share of a request's blocks that holds no token it can see, in [0, 1)."""
        num_slots = self.blocks_per_request * self.block_size
        return (num_slots - self.seen_tokens) / num_slots

    @property
    def num_blocks(self) -> int | None:
        """Whole blocks in the budget, or None without one."""
        return None if self.budget_bytes is None else self.budget_bytes // self.bytes_per_block

    @property
    def contiguous_requests(self) -> int | None:
        """Requests at once in the budget by contiguous reservation, or None without a budget."""
        return None if self.budget_bytes is None else self.budget_bytes // self.contiguous_bytes_per_request

    @property
    def paged_requests(self) -> int | None:
        """Requests at once in the budget by paging, or None without a budget."""
        return None if self.num_blocks is None else self.num_blocks // self.blocks_per_request


def plan_from_config(config: Mapping[str, object], dtype: str | None = None) -> ModelShape:
    """The shape of the model that a Hugging Face config.json describes.

    dtype: of the KV cache, if it is not the one that the weights are stored in. Raises ConfigError
    naming the key that is missing or makes no sense.
    """
    nested = config.get("text_config")
    if isinstance(nested, Mapping):  # a multimodal model: the language model is a part of it
        config = {**config, **cast(Mapping[str, object], nested)}
    if config.get("kv_lora_rank"):
        raise ConfigError("kv_lora_rank", "the plan knows no latent attention, whose keys and values differ")
    num_heads = _integer(config, "num_attention_heads", "n_head", "num_heads", "n_heads")
    return shape_in(
        dtype or _dtype(config),
        num_layers=_integer(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers"),
        num_kv_heads=_num_kv_heads(config, num_heads),
        head_dim=_head_dim(config, num_heads),
    )


def shape_in(dtype: str, *, num_layers: int, num_kv_heads: int, head_dim: int) -> ModelShape:
    """A shape whose KV is kept in a dtype by name. Raises ConfigError for one that is not known."""
    name = dtype.removeprefix("torch.")
    size = DTYPE_BYTES.get(name)
    if size is None:
        raise ConfigError("dtype", f"{dtype!r} is not known; there are {', '.join(DTYPE_BYTES)}")
    return ModelShape(num_layers, num_kv_heads, head_dim, size, _SCALE_BYTES if name in _SCALED else 0)


def to_json(plan: KvPlan) -> dict[str, Any]:
    """Every number of the plan, exact, by name; those that need a budget are None without one."""
    shape = plan.shape
    return {
        "num_layers": shape.num_layers,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "dtype_bytes": shape.dtype_bytes,
        "scale_bytes": shape.scale_bytes,
        "capacity_over_bfloat16": shape.capacity_over_bfloat16,
        "request_tokens": plan.request_tokens,
        "batch": plan.batch,
        "block_size": plan.block_size,
        "max_model_len": plan.reserved_tokens,
        "budget_bytes": plan.budget_bytes,
        "window": plan.window,
        "max_num_batched_tokens": plan.step_tokens,
        "bytes_per_token": plan.bytes_per_token,
        "bytes_per_block": plan.bytes_per_block,
        "bytes_per_request": plan.bytes_per_request,
        "bytes_per_batch": plan.bytes_per_batch,
        "contiguous_bytes_per_request": plan.contiguous_bytes_per_request,
        "paged_bytes_per_request": plan.paged_bytes_per_request,
        "contiguous_waste": plan.contiguous_waste,
        "paged_waste": plan.paged_waste,
        "blocks_per_request": plan.blocks_per_request,
        "num_blocks": plan.num_blocks,
        "contiguous_requests": plan.contiguous_requests,
        "paged_requests": plan.paged_requests,
    }


def render(plan: KvPlan) -> Table:
    """The plan as a table: what the tokens take, then contiguous reservation beside paging."""
    shape = plan.shape
    title = f"{shape.num_layers} layers x {shape.num_kv_heads} KV heads x {shape.head_dim}, "
    title += "1 byte a value" if shape.dtype_bytes == 1 else f"{shape.dtype_bytes} bytes a value"
    if shape.scale_bytes:
        capacity = shape.capacity_over_bfloat16
        title += f" and {shape.scale_bytes} a scale: {capacity:.2f} x the tokens of bfloat16"
    if plan.window is not None:
        title += f"\na window of {plan.window:,} keys, steps of {plan.step_tokens:,} tokens"
    table = Table("KV cache", title=title)
    table.add_column(f"contiguous,\n{plan.reserved_tokens:,} tokens each", justify="right")
    table.add_column(f"paged,\nblocks of {plan.block_size}", justify="right")
    table.add_row("a token", _bytes(plan.bytes_per_token), _bytes(plan.bytes_per_token))
    table.add_row("a block", "", _bytes(plan.bytes_per_block))
    table.add_row(
        f"a request of {plan.request_tokens:,} tokens",
        _bytes(plan.contiguous_bytes_per_request),
        _bytes(plan.paged_bytes_per_request),
    )
    table.add_row("  of which wasted", f"{plan.contiguous_waste:.1%}", f"{plan.paged_waste:.1%}")
    table.add_row(
        f"{plan.batch:,} at once",
        _bytes(plan.batch * plan.contiguous_bytes_per_request),
        _bytes(plan.batch * plan.paged_bytes_per_request),
    )
    if plan.budget_bytes is not None:
        table.add_row(
            f"requests in {_rounded(plan.budget_bytes)}",
            f"{plan.contiguous_requests:,}",
            f"{plan.paged_requests:,}",
        )
    return table


def _check_positive(record: object, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if value <= 0:
            raise ConfigError(name, f"must be positive, not {value}")
        if value > MAX_NUMBER:
            raise ConfigError(name, f"must be at most {MAX_NUMBER}")


def _integer(config: Mapping[str, object], *names: str) -> int:
    """The first of these keys that is there; configurations name the same thing differently."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigError(name, f"must be a positive whole number, not {value!r}")
        return value
    raise ConfigError(names[0], "is missing from the model's configuration")


def _num_kv_heads(config: Mapping[str, object], num_heads: int) -> int:
    named = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
    if any(config.get(name) is not None for name in named):
        return _integer(config, *named)
    return 1 if config.get("multi_query") else num_heads


def _head_dim(config: Mapping[str, object], num_heads: int) -> int:
    if config.get("head_dim") is not None:
        return _integer(config, "head_dim")
    hidden_size = _integer(config, "hidden_size", "n_embd", "d_model")
    if hidden_size % num_heads:
        raise ConfigError("hidden_size", f"{hidden_size} does not divide by {num_heads} attention heads")
    return hidden_size // num_heads


def _dtype(config: Mapping[str, object]) -> str:
    value = config.get("dtype") or config.get("torch_dtype") or "float32"  # as transformers reads none
    if not isinstance(value, str):
        raise ConfigError("dtype", f"must be a name, not {value!r}")
    return value


def _bytes(num_bytes: int) -> str:
    """1,048,576 (1.00 MiB): exact first, since plans are compared by it."""
    return f"{num_bytes:,}" if num_bytes < 1024 else f"{num_bytes:,} ({_rounded(num_bytes)})"


def _rounded(num_bytes: int) -> str:
    """1.00 MiB."""
    size, unit = float(num_bytes), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            break
        size, unit = size / 1024, bigger
    return f"{num_bytes} B" if unit == "B" else f"{size:.2f} {unit}"
