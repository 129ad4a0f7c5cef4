"""What every backend refuses, and that it then has written nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

import numpy as np
import pytest
import torch
from support.emulation import emulated_launcher
from support.ops import BACKENDS, cpu_library
from support.paged import PagedCase, assert_same, make_case

from pageturner.kernels.address_checks import BATCH_TENSORS, HOST_ARRAYS
from pageturner.kernels.cpu.ops import CpuOps
from pageturner.kernels.cuda.ops import CudaOps
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.interface import AttentionSpec, PagedOps
from pageturner.kernels.layout import AttentionBatch, HostBatch, KeyOrder, KvLayout
from pageturner.kernels.reference import ReferenceOps

ALL: dict[str, Callable[[], PagedOps]] = {
    "reference": ReferenceOps,
    **BACKENDS,
    "cuda-emulated": lambda: CudaOps(emulated_launcher()),
}
SPEC = AttentionSpec(scale=1.0)
DIM = 64


@pytest.fixture(params=ALL)
def ops(request: pytest.FixtureRequest) -> PagedOps:
    return ALL[request.param]()


@pytest.fixture
def dtype(ops: PagedOps) -> torch.dtype:
    """One that the backend takes."""
    return torch.bfloat16 if ops.name.startswith("cuda") else torch.float32


@pytest.fixture
def other(ops: PagedOps) -> torch.dtype:
    """Another one that it takes."""
    return torch.float16 if ops.name.startswith("cuda") else torch.bfloat16


@pytest.fixture
def case(ops: PagedOps, dtype: torch.dtype) -> PagedCase:
    """A decode row and a chunk of three, on 2 kv heads of 64; 7 blocks, 3 of them in no table."""
    layout = KvLayout(2, 2, DIM, 16, dtype, ops.key_order)
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
    "one length": ("seq_lens", lambda b: replace(b, seq_lens=b.seq_lens[0])),
    "one slot": ("slot_mapping", lambda b: replace(b, slot_mapping=b.slot_mapping[0])),
    "narrow slots": ("slot_mapping", lambda b: replace(b, slot_mapping=b.slot_mapping.int())),
    "wrong longest chunk": ("max_query_len", lambda b: replace(b, max_query_len=1)),
    "wrong longest sequence": ("max_seq_len", lambda b: replace(b, max_seq_len=29)),
}


@pytest.mark.parametrize("bad", BAD_BATCHES)
def test_a_bad_batch_is_refused_by_its_argument_and_writes_nothing(
    ops: PagedOps, case: PagedCase, dtype: torch.dtype, bad: str
) -> None:
    argument, spoil = BAD_BATCHES[bad]
    batch, before = spoil(case.batch), case.kv_layer.clone()
    rows = torch.zeros(4, 2, DIM, dtype=dtype)
    with pytest.raises(KernelArgumentError) as attention:
        ops.attention(case.query, case.kv_layer, batch, SPEC)
    with pytest.raises(KernelArgumentError) as write:
        ops.write_kv(rows, rows, case.kv_layer, batch)
    assert attention.value.argument == write.value.argument == argument
    assert_same(case.kv_layer, before)


@pytest.mark.parametrize(
    "shape",
    [(3, 4, DIM), (4, 3, DIM), (4, 0, DIM), (4, 4, 2 * DIM), (4, 4 * DIM)],
    ids=["rows", "heads", "no heads", "head_dim", "flat"],
)
def test_a_query_of_another_shape_is_refused(
    ops: PagedOps, case: PagedCase, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    with pytest.raises(KernelArgumentError, match="query is"):
        ops.attention(torch.zeros(shape, dtype=dtype), case.kv_layer, case.batch, SPEC)


def test_a_query_of_another_dtype_is_refused(ops: PagedOps, case: PagedCase, other: torch.dtype) -> None:
    with pytest.raises(KernelArgumentError, match="query is"):
        ops.attention(case.query.to(other), case.kv_layer, case.batch, SPEC)


def test_a_kv_layer_of_another_layout_is_refused(ops: PagedOps, case: PagedCase) -> None:
    for layer in (
        case.kv_layer[:, 0],
        case.kv_layer.double(),
        case.kv_layer[:, :, :0],
        case.kv_layer.transpose(3, 4).contiguous().transpose(3, 4),
    ):
        with pytest.raises(KernelArgumentError, match="kv_layer is"):
            ops.attention(case.query, layer, case.batch, SPEC)
    if ops.key_order is KeyOrder.TILED16:
        with pytest.raises(KernelArgumentError, match="multiple of 16"):
            ops.attention(case.query, case.kv_layer[..., :8, :].contiguous(), case.batch, SPEC)


def test_sinks_of_another_shape_or_dtype_are_refused(ops: PagedOps, case: PagedCase) -> None:
    for sinks in (torch.zeros(3), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, 1)):
        with pytest.raises(KernelArgumentError, match="sinks is"):
            ops.attention(case.query, case.kv_layer, case.batch, replace(SPEC, sinks=sinks))


def test_bad_keys_and_rope_tables_are_refused_and_write_nothing(
    ops: PagedOps, case: PagedCase, dtype: torch.dtype, other: torch.dtype
) -> None:
    rows, table = torch.zeros(4, 2, DIM, dtype=dtype), torch.zeros(4, DIM)
    before = case.kv_layer.clone()
    for key, value, cos, sin in (
        (rows[:3], rows, table, table),
        (rows, rows[:, :1], table, table),
        (rows, rows.to(other), table, table),
        (rows, rows, table[:3], table),
        (rows, rows, table, table[:, :8]),
        (rows, rows, table.bfloat16(), table),
        (rows, rows, table.double(), table.double()),
    ):
        with pytest.raises(KernelArgumentError):
            ops.rope_and_write_kv(case.query, key, value, cos, sin, case.kv_layer, case.batch)
    assert_same(case.kv_layer, before)


def test_rows_of_another_shape_or_dtype_are_refused(
    ops: PagedOps, dtype: torch.dtype, other: torch.dtype
) -> None:
    hidden, weights = torch.zeros(2, 8, dtype=dtype), torch.zeros(8, dtype=dtype)
    for weight, residual in (
        (weights[:7], None),
        (weights, hidden[:1]),
        (weights, hidden.to(other)),
        (weights.to(other), None),
    ):
        with pytest.raises(KernelArgumentError):
            ops.rms_norm(hidden, weight, 1e-5, residual)
    with pytest.raises(KernelArgumentError, match="hidden is"):
        ops.rms_norm(hidden[:, :0], weights[:0], 1e-5)
    for gate_up in (hidden[:, :7], hidden[0], hidden.double()):
        with pytest.raises(KernelArgumentError, match="gate_up is"):
            ops.silu_and_mul(gate_up)


def test_copies_out_of_bounds_or_twice_to_a_block_are_refused(ops: PagedOps) -> None:
    pool, host = torch.arange(16.0).view(4, 4), torch.zeros(2, 4)
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
        (pool[1:], [(0, 1)]),
    ):
        with pytest.raises(KernelArgumentError):
            ops.transfer_blocks(pool, destination, pairs)
    for flat in (pool[0], pool[0, 0]):
        with pytest.raises(KernelArgumentError, match=r"pool is .*; needed: \[num_blocks"):
            ops.copy_blocks(flat, [])
        with pytest.raises(KernelArgumentError, match="source is"):
            ops.transfer_blocks(flat, host, [])
        with pytest.raises(KernelArgumentError, match="destination is"):
            ops.transfer_blocks(host, flat, [])
    ops.transfer_blocks(pool[2:], pool[:2], [(0, 0)])  # beside each other
    assert torch.equal(pool[0], before[2])
    pool[0] = before[0]
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
        ReferenceOps(KeyOrder.TILED16).write_kv(
            torch.zeros(4, 2, 16), torch.zeros(4, 2, 16), case.kv_layer, elsewhere
        )
    with pytest.raises(KernelArgumentError, match="on the CPU"):
        CpuOps(cpu_library()).silu_and_mul(torch.zeros(2, 8, device="meta"))


@pytest.mark.parametrize("bound", [0, -1, math.nan])
@pytest.mark.parametrize("field", ["sliding_window", "chunk", "logit_softcap"])
def test_specs_that_mean_nothing(field: str, bound: float) -> None:
    with pytest.raises(KernelArgumentError, match=f"{field} is {bound}; needed: .*, or None"):
        replace(SPEC, **{field: bound})  # type: ignore[arg-type]  # the field is not known here


@pytest.mark.parametrize("bound", [2**31, 2**32 + 1, 10**30, 21.0, math.inf])
@pytest.mark.parametrize("field", ["sliding_window", "chunk"])
def test_bounds_that_an_int32_does_not_hold(field: str, bound: float) -> None:
    """A kernel would be passed the lower half of their bits."""
    with pytest.raises(KernelArgumentError, match="needed: 1 to 2147483647, or None"):
        replace(SPEC, **{field: bound})  # type: ignore[arg-type]  # the field is not known here


@pytest.mark.parametrize("field", ["sliding_window", "chunk"])
def test_the_widest_bounds_hide_nothing(ops: PagedOps, case: PagedCase, field: str) -> None:
    expected = ops.attention(case.query, case.kv_layer, case.batch, SPEC)
    spec = replace(SPEC, **{field: 2**31 - 1})  # type: ignore[arg-type]  # the field is not known here
    assert_same(ops.attention(case.query, case.kv_layer, case.batch, spec), expected)


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.int8])
@pytest.mark.parametrize("name", HOST_ARRAYS)
def test_addresses_on_the_host_have_the_dtypes_of_their_tensors(
    cuda: CudaOps, cuda_case: PagedCase, name: str, dtype: type[np.generic]
) -> None:
    batch = cuda_case.batch
    host = HostBatch(*(getattr(batch, name).numpy() for name in HOST_ARRAYS))
    if getattr(host, name).dtype == dtype:
        dtype = np.int32
    wrong = replace(host, **{name: getattr(host, name).astype(dtype)})
    with pytest.raises(KernelArgumentError, match=rf"host\.{name} is {dtype.__name__}\["):
        cuda.attention(cuda_case.query, cuda_case.kv_layer, replace(batch, host=wrong), SPEC)


def test_a_batch_that_could_not_be_read_whole_is_read_again(
    cuda: CudaOps, cuda_case: PagedCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device out of memory, in the middle: the step before is not taken for it."""
    case, other = cuda_case, make_case([(4, 9)], layout=KvLayout(2, 2, DIM, 16, torch.bfloat16), num_heads=4)
    expected = cuda.attention(case.query, case.kv_layer, case.batch, SPEC)
    cuda.attention(other.query, other.kv_layer, other.batch, SPEC)
    batch = replace(case.batch, block_tables=case.batch.block_tables.repeat_interleave(2, 1)[:, ::2])
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "contiguous", lambda tensor: fail())
        with pytest.raises(torch.OutOfMemoryError):
            cuda.attention(case.query, case.kv_layer, batch, SPEC)
    assert_same(cuda.attention(case.query, case.kv_layer, batch, SPEC), expected)


def fail() -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture
def cuda() -> CudaOps:
    return CudaOps(emulated_launcher())


@pytest.fixture
def cuda_case() -> PagedCase:
    return make_case([(1, 20), (3, 30)], layout=KvLayout(2, 2, DIM, 16, torch.bfloat16), num_heads=4)


def refused(cuda: CudaOps, case: PagedCase, kv_layer: torch.Tensor, message: str) -> None:
    """By attention and by writes, which then have written nothing."""
    before = kv_layer.clone()
    rows = torch.zeros(4, 2, kv_layer.shape[-1], dtype=kv_layer.dtype)
    with pytest.raises(KernelArgumentError, match=message):
        cuda.attention(rows.repeat(1, 2, 1), kv_layer, case.batch, SPEC)
    with pytest.raises(KernelArgumentError, match=message):
        cuda.write_kv(rows, rows, kv_layer, case.batch)
    assert_same(kv_layer, before)


def test_cuda_names_the_dtypes_that_it_takes(cuda: CudaOps, cuda_case: PagedCase) -> None:
    refused(
        cuda, cuda_case, cuda_case.kv_layer.float(), r"kv_layer is float32\[.*\]; needed: bfloat16 or float16"
    )
    rows = torch.zeros(2, 8)
    with pytest.raises(KernelArgumentError, match=r"hidden is float32\[2, 8\]; needed: bfloat16 or float16"):
        cuda.rms_norm(rows, rows[0], 1e-5)
    with pytest.raises(KernelArgumentError, match=r"gate_up is float32\[2, 8\]; needed: bfloat16 or float16"):
        cuda.silu_and_mul(rows)


def test_cuda_refuses_tensors_elsewhere(cuda: CudaOps, cuda_case: PagedCase) -> None:
    """Each one by its name, its device and the one that is needed."""
    case, meta = cuda_case, torch.device("meta")
    rows, table = torch.zeros(4, 2, DIM, dtype=torch.bfloat16), torch.zeros(4, DIM)
    hidden, weight = rows[:, 0], rows[0, 0]
    sinks = replace(SPEC, sinks=torch.zeros(4, device=meta))
    batch = replace(case.batch, **{name: getattr(case.batch, name).to(meta) for name in BATCH_TENSORS})
    calls: dict[str, Callable[[], object]] = {
        "query": lambda: cuda.attention(case.query.to(meta), case.kv_layer, case.batch, SPEC),
        "kv_layer": lambda: cuda.attention(case.query, case.kv_layer.to(meta), case.batch, SPEC),
        "sinks": lambda: cuda.attention(case.query, case.kv_layer, case.batch, sinks),
        "query_start_loc": lambda: cuda.attention(case.query, case.kv_layer, batch, SPEC),
        "key": lambda: cuda.write_kv(rows.to(meta), rows, case.kv_layer, case.batch),
        "value": lambda: cuda.write_kv(rows, rows.to(meta), case.kv_layer, case.batch),
        "cos": lambda: cuda.rope_and_write_kv(
            case.query, rows, rows, table.to(meta), table, case.kv_layer, case.batch
        ),
        "hidden": lambda: cuda.rms_norm(hidden.to(meta), weight, 1e-5),
        "weight": lambda: cuda.rms_norm(hidden, weight.to(meta), 1e-5),
        "residual": lambda: cuda.rms_norm(hidden, weight, 1e-5, hidden.to(meta)),
        "gate_up": lambda: cuda.silu_and_mul(hidden.to(meta)),
        "pool": lambda: cuda.copy_blocks(case.kv_layer.to(meta), [(0, 1)]),
    }
    before = case.kv_layer.clone()
    for name, call in calls.items():
        with pytest.raises(KernelArgumentError, match=f"{name} is on meta; needed: on cpu"):
            call()
    assert_same(case.kv_layer, before)


def test_cuda_refuses_pools_that_kernels_cannot_address(cuda: CudaOps, cuda_case: PagedCase) -> None:
    """A copy would not do: the pool is written."""
    layer = cuda_case.kv_layer
    padded = torch.zeros(*layer.shape[:2], 2 * 16 * DIM + 4, dtype=layer.dtype)
    odd_strides = padded[..., :-4].view(layer.shape)
    shifted = torch.zeros(layer.numel() + 4, dtype=layer.dtype)[4:].view(layer.shape)
    for wrong in (odd_strides, shifted):
        refused(cuda, cuda_case, wrong, r"kv_layer is strided .* multiples of 16 bytes")
    for block_size in (8, 48):
        resized = torch.zeros(9, 2, 2, block_size, DIM, dtype=layer.dtype)
        message = f"kv_layer is of block_size {block_size}; needed: a power of two from 16"
        refused(cuda, cuda_case, resized, message)
    narrow = torch.zeros(9, 2, 2, 16, 20, dtype=layer.dtype)
    refused(cuda, cuda_case, narrow, "kv_layer is of head_dim 20; needed: a multiple of 8")
    wide = layer.new_empty(4096).as_strided((1, 2, 2, 16, DIM), (2**31, 2048, 1024, DIM, 1))
    with pytest.raises(KernelArgumentError, match="of blocks 2147483648 elements apart; needed: below 2"):
        cuda.attention(cuda_case.query, wide, cuda_case.batch, SPEC)


@pytest.mark.parametrize("head_dim", [16, 80, 512])
def test_cuda_attention_is_for_some_head_dims(cuda: CudaOps, head_dim: int) -> None:
    case = make_case([(1, 20)], layout=KvLayout(1, 1, head_dim, 16, torch.float16), num_heads=2)
    with pytest.raises(KernelArgumentError, match=f"query is of head_dim {head_dim}; needed: one of"):
        cuda.attention(case.query, case.kv_layer, case.batch, SPEC)


def test_cuda_rotates_whole_vectors(cuda: CudaOps) -> None:
    case = make_case([(1, 20)], layout=KvLayout(1, 1, 24, 16, torch.float16), num_heads=1)
    before, table = case.kv_layer.clone(), torch.zeros(1, 24)
    with pytest.raises(KernelArgumentError, match="needed: head_dim a multiple of 16"):
        cuda.rope_and_write_kv(case.query, case.query, case.query, table, table, case.kv_layer, case.batch)
    assert_same(case.kv_layer, before)


def test_cuda_copies_whole_vectors_of_adjacent_blocks(cuda: CudaOps) -> None:
    for pool in (torch.zeros(4, 3), torch.zeros(4, 8)[:, :4], torch.zeros(20)[1:17].view(4, 4)):
        with pytest.raises(KernelArgumentError, match="needed: contiguous, aligned blocks"):
            cuda.copy_blocks(pool, [(0, 1)])


def test_a_refused_batch_is_refused_again(cuda: CudaOps, cuda_case: PagedCase) -> None:
    """It is checked once: when it was found right."""
    case = cuda_case
    elsewhere = replace(case.batch, positions=case.batch.positions.to("meta"))
    for _ in range(2):
        with pytest.raises(KernelArgumentError, match="positions is on meta"):
            cuda.attention(case.query, case.kv_layer, elsewhere, SPEC)
    cuda.attention(case.query, case.kv_layer, case.batch, SPEC)
    with pytest.raises(KernelArgumentError, match="block_tables is"):
        cuda.attention(case.query, case.kv_layer[:1], case.batch, SPEC)
