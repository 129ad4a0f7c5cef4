"""Each mistake that a graph would make silently shows as other bits, other memory, or a refusal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from support.decode_graphs import SIZES, ReplayedModel, build

from pageturner.kernels.cuda import static_batch
from pageturner.kernels.cuda.attention_plan import AttentionPlan
from pageturner.kernels.cuda.attention_planner import AttentionPlanner
from pageturner.kernels.cuda.device_plan import PlanCapacity, pack
from pageturner.kernels.cuda.static_batch import StaticBatch
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.layout import HostBatch
from pageturner.service.model.batch import ForwardBatch
from pageturner.service.model.decoder import Decoder
from pageturner.service.model.kv_cache import KvCache


def differs(pair: ReplayedModel, lengths: Sequence[int] = (150, 530, 40)) -> bool:
    """Whether any of a few steps of changing members is other than eager, or refused."""
    pair.graphs.capture()
    if pair.graphs.captured != pair.graphs.sizes:
        return True
    pair.pool[0] = math.nan  # whatever the capture wrote there
    with pair.running(lengths) as sequences:
        for others in (sequences[:1], sequences, sequences[1:], sequences[:1]):
            try:
                replayed, eager = pair.replayed_and_eager(others)
                pair.assert_equal(replayed, eager)
            except (AssertionError, KernelArgumentError):
                return True
    return False


def test_without_one_nothing_differs(tmp_path: Path) -> None:
    assert not differs(build(tmp_path))


def test_padding_writes_slot_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_batch, "PADDING_SLOT", 0)
    assert differs(build(tmp_path))


def test_the_grid_is_as_large_as_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured for the first plan that comes, instead of the largest."""
    monkeypatch.setattr(
        AttentionPlanner,
        "decode_capacity",
        lambda planner, count, longest, shape: PlanCapacity.of(
            planner.plan(np.arange(count + 1), np.full(count, 17), shape)
        ),
    )
    assert differs(build(tmp_path))


def test_counts_are_those_of_the_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_batch, "pack", _packed_once(pack))
    assert differs(build(tmp_path))


def test_a_buffer_is_allocated_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = StaticBatch.load

    def load(static: StaticBatch, token_ids: torch.Tensor, host: HostBatch) -> None:
        static._buffer = static._buffer.clone()
        plain(static, token_ids, host)

    monkeypatch.setattr(StaticBatch, "load", load)
    assert differs(build(tmp_path))


@pytest.mark.parametrize(
    "name", ["token_ids", "positions", "slot_mapping", "seq_lens", "block_tables", "plans"]
)
def test_an_input_keeps_what_it_held_at_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plain, held = StaticBatch.load, dict[tuple[int, int], torch.Tensor]()

    def load(static: StaticBatch, token_ids: torch.Tensor, host: HostBatch) -> None:
        plain(static, token_ids, host)
        inputs = {
            "token_ids": [static.token_ids],
            "plans": [plan.words for plan in static.plans.values()],
        }
        for index, tensor in enumerate(inputs.get(name) or [getattr(static.attention, name)]):
            tensor.copy_(held.setdefault((id(static), index), tensor.clone()))

    monkeypatch.setattr(StaticBatch, "load", load)
    assert differs(build(tmp_path))


def test_a_number_of_the_batch_is_read_by_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """max_seq_len, which a capture freezes at 1."""
    plain = Decoder.forward

    def forward(model: Decoder, batch: ForwardBatch, kv_cache: KvCache) -> torch.Tensor:
        return plain(model, batch, kv_cache) * batch.attention.max_seq_len

    monkeypatch.setattr(Decoder, "forward", forward)
    assert differs(build(tmp_path))


def test_partials_are_shared_with_a_graph_that_has_fewer(tmp_path: Path) -> None:
    """Captured smallest first: the larger graphs would write beyond the smallest one's partials."""
    pair = build(tmp_path)
    pair.graphs.sizes = SIZES[::-1]
    assert "partials" in (pair.graphs.capture() or "")


def _packed_once(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`pack` with the counts of the first call, for each capacity."""
    counts: dict[PlanCapacity, torch.Tensor] = {}

    def packed_once(plan: AttentionPlan, capacity: PlanCapacity, *, pinned: bool) -> torch.Tensor:
        packed = plain(plan, capacity, pinned=pinned)
        packed[:4] = counts.setdefault(capacity, packed[:4].clone())
        return packed

    return packed_once
