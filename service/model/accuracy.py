"""How near one forward's logits are to another's on a text, token by token as it stands (teacher forcing)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources

import torch

from pageturner.kernels.interface import PagedOps
from pageturner.kernels.layout import KvLayout
from pageturner.service.core.outputs import ScheduledSequence, SchedulerOutput
from pageturner.service.model.batch import ForwardBatch, build_batch
from pageturner.service.model.causal_model import CausalModel
from pageturner.service.model.kv_cache import KvCache

KL_BOUND = 0.01
"""Mean KL divergence, in nats a token, from which on a cheaper forward isn't taken for the same model."""

_BLOCK_SIZE = 16
_ROWS_AT_ONCE = 64
"""Of logits in comparison: bounds the float32 copies."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of one forward, beside a reference, over the same tokens.

    perplexity: of the text. mean_kl: KL(reference || this), in nats a token. top1_agreement: share of tokens
    after which both find the same one likeliest. Of no tokens, all three are NaN.
    """

    num_tokens: int
    perplexity: float
    mean_kl: float
    top1_agreement: float


def packaged_text() -> str:
    """English prose of a few thousand tokens: what this project says of itself, in its own words."""
    return (resources.files(__package__) / "texts" / "english.txt").read_text(encoding="utf-8")


def windows_of(tokens: Sequence[int], length: int) -> list[Sequence[int]]:
    """The tokens in pieces of `length`, without a rest."""
    return [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]


Logits = Callable[[Sequence[int]], torch.Tensor]
"""The tokens of a window -> logits [len(window), vocab_size] after each of them."""


def logits_of(model: CausalModel, ops: PagedOps) -> Logits:
    """A forward over a pool of its own."""

    @torch.inference_mode()
    def run(window: Sequence[int]) -> torch.Tensor:
        layout = KvLayout(
            model.num_layers, model.num_kv_heads, model.head_dim, _BLOCK_SIZE, model.kv_dtype, ops.key_order
        )
        num_blocks = -(-len(window) // _BLOCK_SIZE)
        kv_cache = KvCache(layout, num_blocks, 0, ops, model.device)
        return model.forward(_batch(window, num_blocks, model.device), kv_cache).float()

    return run


def measure_accuracy(
    reference: Logits,
    candidates: Mapping[str, Logits],
    windows: Sequence[Sequence[int]],
    on_window: Callable[[], object] = lambda: None,
) -> dict[str, Accuracy]:
    """Run all over all windows, each window from its own beginning. on_window: told after each."""
    totals = dict.fromkeys(candidates, _Sums())
    for window in windows:
        expected = reference(window)
        for name, logits in candidates.items():
            for wanted, found, after in _pieces(expected, logits(window), window):
                totals[name] = totals[name].add(wanted, found, after)
        on_window()
    return {name: total.mean() for name, total in totals.items()}


@dataclass(frozen=True, slots=True)
class _Sums:
    num_tokens: int = 0
    surprise: float = 0.0
    divergence: float = 0.0
    agreeing: int = 0

    def add(self, expected: torch.Tensor, found: torch.Tensor, after: torch.Tensor) -> _Sums:
        wanted, given = torch.log_softmax(expected, dim=-1), torch.log_softmax(found, dim=-1)
        divergence = (wanted.exp() * (wanted - given)).sum()
        surprise = -given.gather(1, after[:, None]).sum()
        agreeing = (wanted.argmax(dim=-1) == given.argmax(dim=-1)).sum()
        return _Sums(
            self.num_tokens + len(after),
            self.surprise + float(surprise),
            self.divergence + float(divergence),
            self.agreeing + int(agreeing),
        )

    def mean(self) -> Accuracy:
        count = self.num_tokens
        if not count:
            return Accuracy(0, math.nan, math.nan, math.nan)
        try:
            perplexity = math.exp(self.surprise / count)
        except OverflowError:
            perplexity = math.inf
        return Accuracy(count, perplexity, self.divergence / count, self.agreeing / count)


def _pieces(
    expected: torch.Tensor, found: torch.Tensor, window: Sequence[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Some rows at a time, with the token that follows each; the last row of a window has none."""
    after = torch.tensor(window[1:])
    for start in range(0, len(after), _ROWS_AT_ONCE):
        rows = slice(start, min(start + _ROWS_AT_ONCE, len(after)))
        yield expected[rows], found[rows], after[rows]


def _batch(window: Sequence[int], num_blocks: int, device: torch.device) -> ForwardBatch:
    sequence = ScheduledSequence(-1, "accuracy", 0, tuple(window), 0, 0, tuple(range(num_blocks)), ())
    batch = build_batch(SchedulerOutput(-1, (sequence,)), _BLOCK_SIZE, device, lambda _: 0)
    return replace(batch, logit_rows=torch.arange(len(window), device=device))
