"""float32 rows over a bfloat16 pool: what a model with float32 activations keeps of its keys and values.

How they attend is in test_attention_machines.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.ops import cpu_library
from support.paged import PagedCase, assert_same, make_case

from pageturner.kernels.cpu.ops import CpuOps
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.layout import KeyOrder, KvLayout
from pageturner.kernels.reference import ReferenceOps

REFERENCE = ReferenceOps(KeyOrder.TILED16)


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuOps(cpu_library())


def wide_case(sequences: list[tuple[int, int]], head_dim: int = 64) -> PagedCase:
    layout = KvLayout(2, 3, head_dim, 16, torch.bfloat16, KeyOrder.TILED16)
    case = make_case(sequences, layout=layout, num_heads=9, layer=1)
    query = torch.randn(case.query.shape, generator=torch.Generator().manual_seed(2))
    return replace(case, query=query)


@pytest.mark.parametrize("head_dim", [64, 48])
def test_rope_is_float32_and_what_is_stored_is_rounded_once(ops: CpuOps, head_dim: int) -> None:
    case = wide_case([(1, 33), (20, 37), (1, 1)], head_dim)
    case.batch.slot_mapping[3] = -1
    generator = torch.Generator().manual_seed(1)
    key, value = torch.randn(2, 22, 3, head_dim, generator=generator)
    angles = torch.randn(22, head_dim // 2, generator=generator).repeat(1, 2)
    rows = (case.query, key, value, angles.cos(), angles.sin())
    expected_layer, written = case.kv_layer.clone(), case.kv_layer.clone()
    expected = REFERENCE.rope_and_write_kv(*rows, expected_layer, case.batch)
    assert_same(ops.rope_and_write_kv(*rows, written, case.batch), expected)
    assert_same(written, expected_layer)

    ops.write_kv(key, value, written, case.batch)
    REFERENCE.write_kv(key, value, expected_layer, case.batch)
    assert_same(written, expected_layer)


def test_rows_of_two_dtypes_are_refused_and_write_nothing(ops: CpuOps) -> None:
    case = wide_case([(2, 5)])
    rows, table = torch.zeros(2, 3, 64), torch.zeros(2, 64)
    before = case.kv_layer.clone()
    for key, value in ((rows.bfloat16(), rows), (rows, rows.bfloat16()), (rows.double(), rows.double())):
        with pytest.raises(KernelArgumentError):
            ops.rope_and_write_kv(case.query, key, value, table, table, case.kv_layer, case.batch)
        with pytest.raises(KernelArgumentError):
            ops.write_kv(key.double(), value, case.kv_layer, case.batch)
    assert_same(case.kv_layer, before)
