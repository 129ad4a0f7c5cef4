"""Each bug is planted in a copy of the launching code, and the named check catches it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.emulation import emulated_launcher
from support.kernel_checks import check_attention, check_copies, check_rope
from support.paged import assert_near, make_case
from support.planting import plant

from pageturner.kernels.cuda import ops as cuda_ops
from pageturner.kernels.cuda import steps
from pageturner.kernels.cuda.ops import CudaOps
from pageturner.kernels.errors import KernelFault
from pageturner.kernels.interface import AttentionSpec, PagedOps
from pageturner.kernels.layout import KvLayout
from pageturner.kernels.reference import ReferenceOps

LAYOUT = KvLayout(2, 2, 64, 32, torch.bfloat16)
SPLIT = 16


def mixed(ops: PagedOps) -> None:
    """Twice: the second batch is not the first."""
    for last in (30, 31):
        check_attention(ops, LAYOUT, [(1, 53), (20, 53), (1, last)], 3, AttentionSpec(scale=0.3))


def chunk(ops: PagedOps) -> None:
    check_attention(ops, LAYOUT, [(1, 70), (30, 70)], 3, AttentionSpec(scale=0.3, chunk=24))


def speculative(ops: PagedOps) -> None:
    check_attention(ops, LAYOUT, [(4, 90), (2, 40)], 3, AttentionSpec(scale=0.3))


def strided(ops: PagedOps) -> None:
    """A slice of a merged projection, and every other sink."""
    case = make_case([(1, 53), (20, 53)], layout=LAYOUT, num_heads=6)
    query = torch.cat((case.query, case.query[:, :4]), dim=1)[:, :6]
    spec = AttentionSpec(scale=0.3, sinks=torch.linspace(-3, 9, 12)[::2])
    result = ops.attention(query, case.kv_layer, case.batch, spec)
    assert_near(result, ReferenceOps().attention(query, case.kv_layer, case.batch, spec))


def rope(ops: PagedOps) -> None:
    check_rope(ops, torch.bfloat16, torch.float32)


def rows(ops: PagedOps) -> None:
    hidden = torch.randn(3, 6, 64).bfloat16()[:, 1:4]
    weight = torch.randn(64).bfloat16()
    assert_near(ops.rms_norm(hidden, weight, 1e-5)[0], ReferenceOps().rms_norm(hidden, weight, 1e-5)[0])
    gate_up = torch.randn(3, 200).bfloat16()[:, :128]
    assert_near(ops.silu_and_mul(gate_up), ReferenceOps().silu_and_mul(gate_up))


def copies(ops: PagedOps) -> None:
    check_copies(ops, [(0, 1), (1, 2), (2, 0), (2, 4), (5, 3)], 6)


CHECKS = (mixed, chunk, speculative, strided, rope, rows, copies)

BUGS: dict[str, tuple[str, str, Callable[[PagedOps], None]]] = {
    "values are read where keys are": ("values=keys + half * kv_layer.element_size()", "values=keys", mixed),
    "blocks have 16 tokens": ("kv_layer.shape[3].bit_length() - 1", "4", mixed),
    "tables are read one entry apart": (
        "table_stride=step.block_tables.shape[1]", "table_stride=step.block_tables.shape[1] - 1", mixed,
    ),
    "a chunk is not planned for": ("spec.chunk or 0)", "0)", chunk),
    "a chunk is not masked": ("bool(shape.window or shape.chunk)", "bool(shape.window)", chunk),
    "only the first row of a sequence is merged": ("batch.max_query_len * group)", "group)", speculative),
    "sinks are read as if dense": ("spec.sinks.contiguous()", "spec.sinks", strided),
    "the query is read as if dense": (
        "query_stride=query.stride(0),\n            table_stride",
        "query_stride=query.shape[1] * query.shape[2],\n            table_stride",
        strided,
    ),
    "sines are cosines": ("sin=sin.data_ptr()", "sin=cos.data_ptr()", rope),
    "a row's value is its key": (
        "value=value.data_ptr(),\n            query", "value=key.data_ptr(),\n            query", rope,
    ),
    "rows of a norm are read as if dense": (
        "outer_stride=rows.stride(0)", "outer_stride=rows.shape[1] * rows.shape[2]", rows,
    ),
    "rows of the gate are read as if dense": (
        "gate_up_stride=gate_up.stride(0)", "gate_up_stride=gate_up.shape[1]", rows,
    ),
    "chains begin one move late": (
        "words.data_ptr() + moves.nbytes", "words.data_ptr() + moves.nbytes + 4", copies,
    ),
}  # fmt: skip


def test_without_a_bug_every_check_passes() -> None:
    for check in CHECKS:
        check(CudaOps(emulated_launcher(), split=SPLIT))


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_caught(name: str) -> None:
    right, wrong, check = BUGS[name]
    planted = plant(cuda_ops, right, wrong)
    with pytest.raises((AssertionError, KernelFault)):
        check(planted.CudaOps(emulated_launcher(), split=SPLIT))


def test_a_stale_plan_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = plant(steps, "_current = Step(batch, self", "_current = self._current or Step(batch, self")
    monkeypatch.setattr(cuda_ops, "Steps", planted.Steps)
    with pytest.raises((AssertionError, KernelFault)):
        mixed(CudaOps(emulated_launcher(), split=SPLIT))
