"""`pageturner bench accuracy`: how near each kind of product is to float32, on a packaged text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pageturner.service.errors import ConfigError, ModelError
from pageturner.service.model.accuracy import KL_BOUND, Accuracy, measure_accuracy, windows_of
from pageturner.service.model.backend import Backend
from pageturner.service.model.candidate_forwards import DENSE, CandidateForwards, candidate_forwards
from pageturner.service.model.cpu_features import has_bfloat16, read_cpuinfo
from pageturner.service.model.loader import is_gguf
from pageturner.service.model.options import ModelOptions
from pageturner.service.startup.container import machine_memory

REFERENCE = "float32"
CODES = ("int8", "fp8")
"""What a KV cache may be kept in beside the default."""


@dataclass(frozen=True, slots=True)
class AccuracyReport:
    """text_tokens: that were read, in windows of so many. results: by candidate, the reference among them."""

    model: str
    text_tokens: int
    window: int
    kl_bound: float
    results: Mapping[str, Accuracy]


def candidates_for(source: str) -> tuple[str, ...]:
    """What is compared unless named: what `auto` chooses among, the other schemes of quantisation, and the
    first of those with its KV in codes."""
    own = ["file"] if is_gguf(source) else []
    dense = ["bfloat16"] if has_bfloat16(read_cpuinfo()) else []
    schemes = [*own, "int8", "int4"]
    return (*dense, *schemes, *(f"{schemes[0]}/{codes}" for codes in CODES))


def measure_accuracies(
    options: ModelOptions,
    backend: Backend,
    cache_dir: Path,
    names: Sequence[str],
    num_tokens: int | None,
    window: int,
    begin: Callable[[int], Callable[[], object]],
) -> AccuracyReport:
    """names: of the candidates, see CandidateForwards.logits. num_tokens: of the text, None for all. begin:
    is told how many windows there will be, and gives what to call after each.

    Raises ModelError for a model without a tokenizer or that can't be quantised, ConfigError where nothing
    here computes with quantised weights, or the text has not one window.
    """
    if backend.quantised is None:
        raise ConfigError("model.device", "products of quantised weights are for a CPU with a compiler")
    forwards = candidate_forwards(options, cache_dir, backend.choose_ops, backend.quantised.ops)
    if forwards.artifacts.tokenizer is None:
        raise ModelError(f"{forwards.artifacts.name} has no tokenizer, and so no text")
    windows = windows_of(forwards.text_tokens(num_tokens), min(window, forwards.config.max_position))
    if not windows:
        raise ConfigError("--tokens", f"not one window of {window} tokens")
    on_window = begin(len(windows))
    reference = forwards.logits(REFERENCE, streamed=_is_large(forwards))
    logits = {name: forwards.logits(name, streamed=_is_large(forwards)) for name in names}
    results = measure_accuracy(reference, {REFERENCE: reference} | logits, windows, on_window)
    return AccuracyReport(forwards.artifacts.name, sum(map(len, windows)), len(windows[0]), KL_BOUND, results)


def _is_large(forwards: CandidateForwards) -> bool:
    """Whether plain weights of all candidates at once would be too much for the machine's memory."""
    scheme = "file" if forwards.artifacts.gguf is not None else "int8"
    return forwards.products(scheme).num_parameters * 4 * len(DENSE) > machine_memory() // 2
