"""Does a `transformers` model run right over the paged cache? Found out by trying, before it serves.

Three questions, in this order; the first No refuses the model by type and reason:

1. Does every layer's attention come to us, once a forward, of one shape, asking for no more than we can
   give, and seeing the keys that the model's own mask would show it? (`examine`)
2. Do the logits of ragged, chunked, decoded batches in scattered blocks, among slots of NaN, equal those of
   the plain model?
3. Do they stay the same beside a row far along? (Some RoPE variants look at the largest position of all.)

The second uses short prompts; that longer ones go right rests on the first: windows and chunks of any size
are compared with the mask at the positions where they begin to matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from pageturner.kernels.interface import AttentionSpec, PagedOps
from pageturner.kernels.layout import KvLayout
from pageturner.kernels.reference import first_key
from pageturner.service.core.outputs import ScheduledSequence, SchedulerOutput
from pageturner.service.errors import ModelError, RankLost
from pageturner.service.model.batch import ForwardBatch, build_batch
from pageturner.service.model.causal_model import CausalModel
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.model.transformers_attention import (
    IMPLEMENTATION,
    AttentionCall,
    MaskFunction,
    attention_by,
    set_implementation,
)
from pageturner.service.model.windows import widest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BLOCK_SIZE = 16
_LENGTHS = (37, 1, 18, 5)
# (prompt, first position, end) of each part, step by step: whole, in chunks, token by token.
_STEPS = (
    ((0, 0, 37), (2, 0, 3)),
    ((1, 0, 1), (2, 3, 16), (3, 0, 4)),
    ((2, 16, 17), (3, 4, 5)),
    ((2, 17, 18),),
)
# Of the rows' relative errors this quantile may be so large; what a wrong mask or position does is of order
# 1. In the halves some rows are far off in right models too, where a router's choice of experts was close.
_TOLERANCE = {torch.float32: (1.0, 1e-3), torch.bfloat16: (0.5, 0.2), torch.float16: (0.5, 0.05)}


class ProbedModel(CausalModel, Protocol):
    """A `transformers` model over the paged cache, as the probe drives it."""

    @property
    def model_type(self) -> str:
        """As its configuration names it, for messages."""
        ...

    @property
    def ops(self) -> PagedOps:
        """The operations that it was built with."""
        ...

    def kv_layout(self, block_size: int) -> KvLayout:
        """The layout that a cache for this model must have."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionShapes:
    """layers: id of each attention module -> its place. head_dim: the wider of keys and values. window: as
    `CausalModel` says."""

    layers: Mapping[int, int]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None


def examine(model: PreTrainedModel) -> AttentionShapes:
    """Let the model look up our attention from now on, run it once, and see what arrives.

    Raises ModelError for a model that does not come to us, or asks for what we can't give.
    """
    recorder = _Recorder(model.device)
    with _refusing(model.config.model_type):
        set_implementation(model, IMPLEMENTATION)
        with torch.inference_mode(), attention_by(recorder):
            model(input_ids=torch.zeros(1, 3, dtype=torch.long, device=model.device), use_cache=False)
        return recorder.shapes(model.config.get_text_config().num_hidden_layers)


class _Recorder:
    """Stands in for attention (answers zeros) and writes down who asks for what."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._masks: list[tuple[torch.Tensor, MaskFunction]] = []
        self._calls: list[AttentionCall] = []
        self._agreed: set[tuple[MaskFunction, int | None, int | None]] = set()

    def mask(self, mask_function: MaskFunction) -> torch.Tensor:
        marker = torch.zeros(1, 1, 3, 3, device=self._device)
        self._masks.append((marker, mask_function))
        return marker

    def attend(self, call: AttentionCall) -> torch.Tensor:
        spec = call.spec()
        if call.mask is not None:
            function = self._function_of(call.mask)
            if (function, spec.sliding_window, spec.chunk) not in self._agreed:
                _check_same_keys(spec, function, call.query.device)
                self._agreed.add((function, spec.sliding_window, spec.chunk))
        self._calls.append(call)
        return torch.zeros_like(call.query[..., :1]).expand(-1, -1, call.value.shape[-1]).contiguous()

    def _function_of(self, mask: torch.Tensor) -> MaskFunction:
        for marker, function in self._masks:
            if mask.untyped_storage().data_ptr() == marker.untyped_storage().data_ptr():
                return function
        raise ModelError("a layer brings an attention mask of its own")

    def shapes(self, num_layers: int) -> AttentionShapes:
        modules = {id(call.module): place for place, call in enumerate(self._calls)}
        if len(modules) != num_layers or len(self._calls) != num_layers:
            called = f"{len(modules)} called for attention, {len(self._calls)} times in all"
            raise ModelError(f"of {num_layers} layers, {called}")
        shapes = {(c.query.shape[1], c.key.shape[1], c.key.shape[2], c.value.shape[2]) for c in self._calls}
        if len(shapes) != 1:
            raise ModelError(f"layers differ in heads or their width: {sorted(shapes)}")
        num_heads, num_kv_heads, key_width, value_width = shapes.pop()
        # A chunk begins at most so many keys before a position; both bounds may hold.
        bounds = [(spec.sliding_window, spec.chunk) for spec in (call.spec() for call in self._calls)]
        window = widest(min((b for b in bound if b is not None), default=None) for bound in bounds)
        return AttentionShapes(modules, num_heads, num_kv_heads, max(key_width, value_width), window)


def _check_same_keys(spec: AttentionSpec, mask_function: MaskFunction, device: torch.device) -> None:
    """Compare the keys that `spec` shows with those of the model's mask, around each border there is."""
    borders = [1, 2, 3, *(size * n for size in (spec.sliding_window, spec.chunk) if size for n in (1, 2))]
    # Doubling lengths find a window that the mask knows and the layer keeps to itself.
    borders += [2**power for power in range(2, 25)]
    places = sorted({place + i for place in borders for i in (-1, 0, 1) if place + i >= 0})
    keys = torch.tensor(places, device=device)
    for query in places:
        seen = mask_function(0, 0, torch.tensor(query, device=device), keys)
        for key, is_seen in zip(places, seen.expand(len(places)).tolist(), strict=True):
            if is_seen != (first_key(query, spec) <= key <= query):
                shown = "shows" if is_seen else "hides"
                raise ModelError(
                    f"the model's mask {shown} key {key} at position {query}, its layer's keywords "
                    f"(sliding_window={spec.sliding_window}, chunk={spec.chunk}) say otherwise"
                )


def probe_prompts(vocab_size: int, max_position: int) -> list[list[int]]:
    """Random token ids, several prompts of different lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, max_position) for length in _LENGTHS]
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def plain_logits(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """float32 [length, vocab_size] for each prompt, by `transformers`' eager attention.

    The model looks up our attention again afterwards. Raises ModelError.
    """
    with _refusing(model.config.model_type), torch.inference_mode():
        set_implementation(model, "eager")
        try:
            return [
                model(input_ids=torch.tensor([prompt], device=model.device), use_cache=False)
                .logits[0]
                .float()
                for prompt in prompts
            ]
        finally:
            set_implementation(model, IMPLEMENTATION)


def check_paged_model(
    model: ProbedModel,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[torch.Tensor],
    *,
    deterministic: bool = False,
) -> None:
    """Raise ModelError unless the prompts' logits are as expected, however they are batched.

    expected: float32 [length, vocab_size] for each prompt, of the plain model. deterministic: a row's
    logits must have the same bits in every batch, too.
    """
    far = model.max_position - 1
    with _refusing(model.model_type), torch.inference_mode():
        batched = _paged_logits(model, prompts, _STEPS)
        _compare(batched, expected, model.dtype, "logits differ from the plain model's")
        alone = [_paged_logits(model, [prompt], (((0, 0, len(prompt)),),), far)[0] for prompt in prompts]
        _compare(
            alone,
            expected,
            model.dtype,
            f"a row's logits change beside a row at position {far}; RoPE that switches by length is right "
            "only with model.max_position at or below its original length",
        )
        if deterministic and not all(map(torch.equal, batched, alone)):
            raise ModelError("deterministic: a row's bits depend on what shares its batch")


def _compare(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], dtype: torch.dtype, reason: str
) -> None:
    rows, wanted = torch.cat(list(found)), torch.cat(list(expected))
    spread = wanted - wanted.mean(-1, keepdim=True)
    quantile, tolerance = _TOLERANCE[dtype]
    error = float(((rows - wanted).norm(dim=-1) / spread.norm(dim=-1)).quantile(quantile))
    if not error <= tolerance:  # NaN fails too
        raise ModelError(f"{reason} (relative error {error:.2g})")


def _paged_logits(
    model: ProbedModel,
    prompts: Sequence[Sequence[int]],
    steps: Sequence[Sequence[tuple[int, int, int]]],
    far_position: int | None = None,
) -> list[torch.Tensor]:
    """float32 [length, vocab_size] for each prompt, computed step by step in a cache full of NaN.

    steps: (prompt, first position, end) of the parts that run together; ends beyond a prompt are cut.
    far_position: beside each step a sequence of one row is said to stand there.
    """
    needs = [-(-len(prompt) // _BLOCK_SIZE) for prompt in prompts]
    cache = KvCache(model.kv_layout(_BLOCK_SIZE), sum(needs) + 2, 0, model.ops, model.device)
    cache.pool.fill_(torch.nan)
    deck = torch.randperm(cache.num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    tables = [tuple(deck.pop() for _ in range(need)) for need in needs]
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in steps:
        cuts = [(i, start, min(end, len(prompts[i]))) for i, start, end in step if start < len(prompts[i])]
        rows = [_part(i, tuple(prompts[i][start:end]), start, tables[i]) for i, start, end in cuts]
        if far_position is not None:
            rows.append(_part(len(prompts), (0,), 0, (deck[0],)))
        batch = build_batch(SchedulerOutput(0, tuple(rows)), _BLOCK_SIZE, model.device, lambda _: 0)
        logits = model.forward(_all_rows(batch, far_position), cache).float()
        counts = [len(row.token_ids) for row in rows]
        for (i, _, _), part in zip(cuts, torch.split(logits, counts), strict=False):
            parts[i].append(part)
    return [torch.cat(part) for part in parts]


def _part(
    number: int, token_ids: tuple[int, ...], start: int, block_table: tuple[int, ...]
) -> ScheduledSequence:
    return ScheduledSequence(number, str(number), 0, token_ids, start, start, block_table, ())


def _all_rows(batch: ForwardBatch, far_position: int | None) -> ForwardBatch:
    """Ask for every row's logits, and move the last row far along (its attention stays where it is)."""
    attention = batch.attention
    if far_position is not None:
        positions = attention.positions.clone()
        positions[-1] = far_position
        attention = replace(attention, positions=positions)
    return replace(
        batch, attention=attention, logit_rows=torch.arange(batch.num_rows, device=batch.token_ids.device)
    )


@contextmanager
def _refusing(model_type: str) -> Iterator[None]:
    """Whatever goes wrong inside is a reason not to run this type of model."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{model_type}: {error}") from error
    except RankLost:  # says nothing of the model
        raise
    except Exception as error:
        # A model's own code, called in a way that its authors may not have tried, can raise anything.
        raise ModelError(f"{model_type}: its forward fails: {type(error).__name__}: {error}") from error
