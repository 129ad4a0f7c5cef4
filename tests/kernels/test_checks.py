"""What every backend refuses, and that it then has written nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from pageturner.kernels.cpu.ops import CpuOps
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.layout import AttentionBatch, KeyPage, KvLayout
from pageturner.kernels.ops import AttentionSpec, PagedOps
from pageturner.kernels.reference import ReferenceOps
from support.ops import BACKENDS, cpu_library
from support.paged import PagedCase, assert_same, make_case

ALL = {"reference": ReferenceOps, **BACKENDS}
SPEC = AttentionSpec(scale=1.0)


@pytest.fixture(params=ALL)
def ops(request: pytest.FixtureRequest) -> PagedOps:
    return ALL[request.param]()


@pytest.fixture
def case(ops: PagedOps) -> PagedCase:
    """A decode row and a chunk of three, on 2 kv heads of 16; 7 blocks, 3 of them nobody's."""
    layout = KvLayout(2, 2, 16, 16, torch.float32, ops.key_page)
    return make_case([(1, 20), (3, 30)], layout=layout, num_heads=4, layer=1)


BAD_BATCHES: dict[str, tuple[str, Callable[[AttentionBatch], AttentionBatch]]] = {
    "block id too large": ("block_tables", lambda b: replace(b, block_tables=b.block_tables + 7)),
    "block id negative": ("block_tables", lambda b: replace(b, block_tables=-1 - b.block_tables)),
    "length beyond the table": ("seq_lens", lambda b: replace(b, seq_lens=b.seq_lens + 10, max_seq_len=40)),
    "fewer keys than rows": ("seq_lens", lambda b: replace(b, seq_lens=b.seq_lens * 0 + 2, max_seq_len=2)),
    "rows left over": ("query_start_loc", lambda b: replace(b, query_start_loc=b.query_start_loc // 2)),
    "rows run backwards": (
        "query_start_loc",
        lambda b: replace(b, query_start_loc=torch.tensor([0, 5, 4], dtype=torch.int32)),
    ),
    "slot too large": ("slot_mapping", lambda b: replace(b, slot_mapping=b.slot_mapping + 7 * 16)),
    "slot below -1": ("slot_mapping", lambda b: replace(b, slot_mapping=b.slot_mapping * 0 - 2)),
    "wide lengths": ("seq_lens", lambda b: replace(b, seq_lens=b.seq_lens.long())),
    "wide table": ("block_tables", lambda b: replace(b, block_tables=b.block_tables.long())),
    "narrow slots": ("slot_mapping", lambda b: replace(b, slot_mapping=b.slot_mapping.int())),
    "wrong longest chunk": ("max_query_len", lambda b: replace(b, max_query_len=1)),
    "wrong longest sequence": ("max_seq_len", lambda b: replace(b, max_seq_len=29)),
}


@pytest.mark.parametrize("bad", BAD_BATCHES)
def test_bad_batches(ops: PagedOps, case: PagedCase, bad: str) -> None:
    argument, spoil = BAD_BATCHES[bad]
    batch, before = spoil(case.batch), case.kv_layer.clone()
    rows = torch.zeros(4, 2, 16)
    with pytest.raises(KernelArgumentError) as attention:
        ops.attention(case.query, case.kv_layer, batch, SPEC)
    with pytest.raises(KernelArgumentError) as write:
        ops.write_kv(rows, rows, case.kv_layer, batch)
    assert attention.value.argument == write.value.argument == argument
    assert_same(case.kv_layer, before)


@pytest.mark.parametrize(
    "query",
    [
        torch.zeros(3, 4, 16),
        torch.zeros(4, 3, 16),
        torch.zeros(4, 0, 16),
        torch.zeros(4, 4, 32),
        torch.zeros(4, 64),
        torch.zeros(4, 4, 16, dtype=torch.bfloat16),
    ],
    ids=["rows", "heads", "no heads", "head_dim", "flat", "dtype"],
)
def test_bad_queries(ops: PagedOps, case: PagedCase, query: torch.Tensor) -> None:
    with pytest.raises(KernelArgumentError, match="query is"):
        ops.attention(query, case.kv_layer, case.batch, SPEC)


def test_bad_pages(ops: PagedOps, case: PagedCase) -> None:
    for layer in (
        case.kv_layer[:, 0],
        case.kv_layer.double(),
        case.kv_layer.transpose(3, 4).contiguous().transpose(3, 4),
    ):
        with pytest.raises(KernelArgumentError, match="kv_layer is"):
            ops.attention(case.query, layer, case.batch, SPEC)
    if ops.key_page is KeyPage.TILED16:
        with pytest.raises(KernelArgumentError, match="multiple of 16"):
            ops.attention(case.query, case.kv_layer[..., :8, :].contiguous(), case.batch, SPEC)


def test_bad_sinks(ops: PagedOps, case: PagedCase) -> None:
    for sinks in (torch.zeros(3), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, 1)):
        with pytest.raises(KernelArgumentError, match="sinks is"):
            ops.attention(case.query, case.kv_layer, case.batch, replace(SPEC, sinks=sinks))


def test_bad_keys_and_tables(ops: PagedOps, case: PagedCase) -> None:
    rows, table, before = torch.zeros(4, 2, 16), torch.zeros(4, 16), case.kv_layer.clone()
    for key, value, cos, sin in (
        (rows[:3], rows, table, table),
        (rows, rows[:, :1], table, table),
        (rows, rows.bfloat16(), table, table),
        (rows, rows, table[:3], table),
        (rows, rows, table, table[:, :8]),
        (rows, rows, table.bfloat16(), table),
        (rows, rows, table.half(), table.half()),
    ):
        with pytest.raises(KernelArgumentError):
            ops.rope_and_write_kv(case.query, key, value, cos, sin, case.kv_layer, case.batch)
    assert_same(case.kv_layer, before)


def test_bad_rows(ops: PagedOps) -> None:
    hidden = torch.zeros(2, 8)
    for weight, residual in (
        (torch.zeros(7), None),
        (torch.zeros(8), torch.zeros(1, 8)),
        (torch.zeros(8), hidden.bfloat16()),
        (torch.zeros(8).bfloat16(), None),
    ):
        with pytest.raises(KernelArgumentError):
            ops.rms_norm(hidden, weight, 1e-5, residual)
    for gate_up in (torch.zeros(2, 7), torch.zeros(8), torch.zeros(2, 8).double()):
        with pytest.raises(KernelArgumentError, match="gate_up is"):
            ops.silu_and_mul(gate_up)


def test_bad_copies(ops: PagedOps) -> None:
    pool, host = torch.arange(12.0).view(4, 3), torch.zeros(2, 3)
    before = pool.clone()
    for pairs in ([(0, 4)], [(-1, 0)], [(0, 1), (2, 1)]):
        with pytest.raises(KernelArgumentError, match="pairs is"):
            ops.copy_blocks(pool, pairs)
    for destination, pairs in (
        (host, [(0, 2)]),
        (host, [(0, 1), (1, 1)]),
        (host[:, :2], [(0, 0)]),
        (host.double(), [(0, 0)]),
        (pool, [(0, 1)]),
    ):
        with pytest.raises(KernelArgumentError):
            ops.transfer_blocks(pool, destination, pairs)
    assert torch.equal(pool, before)
    assert not host.any()


def test_the_table_is_only_checked_as_far_as_it_is_read(ops: PagedOps, case: PagedCase) -> None:
    """Entries past a sequence's length are padding and may be anything."""
    tables = torch.cat((case.batch.block_tables, torch.full((2, 1), 99, dtype=torch.int32)), dim=1)
    batch = replace(case.batch, block_tables=tables)
    result = ops.attention(case.query, case.kv_layer, batch, SPEC)
    assert torch.isfinite(result).all()


def test_tensors_elsewhere_are_refused(case: PagedCase) -> None:
    """A batch is on one device; what C++ follows by pointer is on the CPU."""
    elsewhere = replace(case.batch, seq_lens=case.batch.seq_lens.to("meta"))
    with pytest.raises(KernelArgumentError, match="on one device"):
        ReferenceOps(KeyPage.TILED16).write_kv(
            torch.zeros(4, 2, 16), torch.zeros(4, 2, 16), case.kv_layer, elsewhere
        )
    with pytest.raises(KernelArgumentError, match="on the CPU"):
        CpuOps(cpu_library()).silu_and_mul(torch.zeros(2, 8, device="meta"))


@pytest.mark.parametrize("field", ["sliding_window", "chunk", "logit_softcap"])
@pytest.mark.parametrize("bound", [0, -1, math.nan])
def test_specs_that_mean_nothing(field: str, bound: float) -> None:
    with pytest.raises(KernelArgumentError, match="above 0"):
        replace(SPEC, **{field: bound})  # type: ignore[arg-type]  # the field is not known here
