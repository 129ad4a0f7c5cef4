"""The CUDA operations against the definition: the very same cases on the emulator and on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_kernels import AttentionCase
from support.cuda_cases import (
    BATCHES,
    BF16,
    FACTORS,
    FP16,
    INSTANCES,
    LAUNCHERS,
    PAIRWISE,
    RUNTIMES,
    attention_case,
    check_cuda_attention,
    cuda_ops,
    describe,
)
from support.emulation import emulated_launcher
from support.kernel_checks import (
    check_batch_mates,
    check_blocks_behind_a_window,
    check_copies,
    check_non_finite_token,
    check_rope,
    check_shared_blocks,
    check_step_without_rows,
)
from support.paged import PagedCase, assert_near, assert_same, make_case

from pageturner.kernels.address_checks import BATCH_TENSORS, HOST_ARRAYS
from pageturner.kernels.cuda.attention_plan import AttentionShape
from pageturner.kernels.cuda.ops import CudaOps
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.errors import KernelArgumentError, KernelFault
from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.layout import CODE_DTYPES, HostBatch, KvLayout
from pageturner.kernels.reference import ReferenceOps

LAYOUT = KvLayout(2, 2, 64, 16, BF16)
PLAIN = AttentionSpec(scale=0.2)


@pytest.fixture(params=RUNTIMES)
def launcher(request: pytest.FixtureRequest) -> Launcher:
    return LAUNCHERS[request.param]()


@pytest.fixture
def emulated() -> CudaOps:
    return CudaOps(emulated_launcher())


@pytest.fixture
def case() -> PagedCase:
    """A decode row and a chunk that is prefilled."""
    return make_case([(1, 40), (9, 20)], layout=LAYOUT, num_heads=4, layer=1)


@pytest.mark.parametrize("case", PAIRWISE, ids=describe)
def test_attention_pairwise(launcher: Launcher, case: dict[str, Any]) -> None:
    check_cuda_attention(launcher, attention_case(**case))


def product_cases() -> list[dict[str, Any]]:
    """Every instance by batch by group, with the other choices in turn."""
    instances = product((BF16, FP16), sorted({instance[1] for instance in INSTANCES}), *2 * [(False, True)])
    cases = []
    for number, (instance, batch, group) in enumerate(product(instances, BATCHES, FACTORS["group"])):
        case = {"instance": instance, "batch": batch, "group": group}
        for step, name in enumerate(("block_size", "mask", "sinks", "split"), start=1):
            case[name] = FACTORS[name][number // step % len(FACTORS[name])]
        cases.append(case)
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("case", product_cases(), ids=describe)
def test_attention_product(launcher: Launcher, case: dict[str, Any]) -> None:
    check_cuda_attention(launcher, attention_case(**case))


@st.composite
def attention_cases(draw: st.DrawFn) -> AttentionCase:
    """Any shape of the compiled instances."""
    lengths = st.integers(1, 90).flatmap(lambda n: st.tuples(st.integers(0, min(n, 40)), st.just(n)))
    drawn: dict[str, Any] = {
        name: draw(st.sampled_from(FACTORS[name])) for name in ("instance", "block_size", "mask", "sinks")
    }
    case = attention_case(
        batch="decode",
        group=draw(st.integers(1, 16)),
        split=draw(st.none() | st.integers(1, 5).map(lambda length: 16 * length)),
        **drawn,
    )
    bounds: dict[str, Any] = {
        name: draw(st.integers(1, 100)) for name in ("window", "chunk") if getattr(case, name)
    }
    sequences = draw(st.lists(lengths, min_size=1, max_size=3))
    return replace(case, sequences=tuple(sequences), **bounds)


@settings(max_examples=15, deadline=None)
@given(case=attention_cases(), seed=st.integers(0, 1000))
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_attention_of_any_shape(runtime: str, case: AttentionCase, seed: int) -> None:
    check_cuda_attention(LAUNCHERS[runtime](), case, seed)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(case=attention_cases(), seed=st.integers(0, 1000))
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_attention_of_very_many_shapes(runtime: str, case: AttentionCase, seed: int) -> None:
    check_cuda_attention(LAUNCHERS[runtime](), case, seed)


def test_with_a_fixed_split_a_row_has_the_same_bits_in_every_batch(launcher: Launcher) -> None:
    """Without one, the split depends on what else there is."""
    sequences = [(1, 200), (9, 70), (1, 90), (1, 3), (3, 40)]
    check_batch_mates(cuda_ops(launcher, split=32), LAYOUT, sequences, 2, AttentionSpec(scale=0.2))


@pytest.mark.parametrize(("dtype", "table_dtype"), [(BF16, torch.float32), (BF16, BF16), (FP16, FP16)])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_rope_and_write(
    launcher: Launcher, dtype: torch.dtype, table_dtype: torch.dtype, head_dim: int
) -> None:
    check_rope(cuda_ops(launcher), dtype, table_dtype, head_dim)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_write_kv(launcher: Launcher, dtype: torch.dtype) -> None:
    case = make_case([(4, 33), (1, 16)], layout=replace(LAYOUT, dtype=dtype), num_heads=2, layer=1)
    case.batch.slot_mapping[1] = -1
    key, value = torch.randn(2, 5, 2, 64).to(dtype)
    expected = case.kv_layer.clone()
    ReferenceOps().write_kv(key, value, expected, case.batch)
    cuda_ops(launcher).write_kv(key, value, case.kv_layer, case.batch)
    assert_same(case.kv_layer, expected)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shape", [(1, 576), (3, 100), (5, 4, 64)])
def test_rms_norm(launcher: Launcher, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    hidden, residual = torch.randn(2, *shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    for added in (None, residual):
        normed, summed = cuda_ops(launcher).rms_norm(hidden, weight, 1e-5, added)
        expected_normed, expected_sum = ReferenceOps().rms_norm(hidden, weight, 1e-5, added)
        assert torch.equal(summed, expected_sum)
        assert_near(normed, expected_normed)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shape", [(9, 3072), (3, 50)])
def test_silu_and_mul(launcher: Launcher, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate_up = (torch.randn(shape) * 4).to(dtype)
    assert_near(cuda_ops(launcher).silu_and_mul(gate_up), ReferenceOps().silu_and_mul(gate_up))


@given(seed=st.integers(0, 10_000), count=st.integers(0, 6))
@settings(max_examples=20, deadline=None)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_block_copies_and_transfers(runtime: str, seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    destinations = torch.randperm(6, generator=generator)[:count].tolist()
    sources = torch.randint(6, (count,), generator=generator).tolist()
    ops = cuda_ops(LAUNCHERS[runtime]())
    check_copies(ops, list(zip(sources, destinations, strict=True)), num_blocks=6)


def test_a_step_without_rows(launcher: Launcher) -> None:
    check_step_without_rows(cuda_ops(launcher), LAYOUT)


def test_arguments_that_kernels_cannot_read_as_they_lie(launcher: Launcher, case: PagedCase) -> None:
    """Every other entry, rows that begin at odd addresses, rows repeated."""
    ops, spec = cuda_ops(launcher), replace(PLAIN, sinks=torch.linspace(-1, 1, 4))
    expected = ops.attention(case.query, case.kv_layer, case.batch, spec)
    assert spec.sinks is not None

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat_interleave(2, dim=-1)[..., ::2]

    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.flatten(1)
        return torch.cat((rows[:, :3], rows), dim=1)[:, 3:].view(tensor.shape)

    batch = replace(case.batch, **{name: spread(getattr(case.batch, name)) for name in BATCH_TENSORS})  # type: ignore[arg-type]  # tensors all
    strided = replace(spec, sinks=spread(spec.sinks))
    for view in (spread, shifted):
        assert_same(ops.attention(view(case.query), case.kv_layer, batch, strided), expected)

    key, value = torch.randn(2, 10, 2, 64).to(BF16)
    table = torch.randn(10, 64)
    turned = ops.rope_and_write_kv(case.query, key, value, table, table, case.kv_layer, case.batch)
    written = case.kv_layer.clone()
    for view in (spread, shifted):
        q, k, v = map(view, (case.query, key, value))
        again = ops.rope_and_write_kv(q, k, v, spread(table), spread(table), case.kv_layer, batch)
        assert_same(again, turned)
        assert_same(case.kv_layer, written)
    row = case.query[:1].expand(10, -1, -1)
    assert_same(
        ops.attention(row, case.kv_layer, case.batch, spec),
        ops.attention(row.contiguous(), case.kv_layer, case.batch, spec),
    )


@pytest.mark.parametrize("spec", [PLAIN, replace(PLAIN, logit_softcap=3.0)], ids=["plain", "capped"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_a_non_finite_token_changes_its_own_sequence_alone(
    launcher: Launcher, part: int, poison: float, spec: AttentionSpec
) -> None:
    check_non_finite_token(cuda_ops(launcher), replace(LAYOUT, num_kv_heads=1), part, poison, spec)


def test_sequences_may_share_blocks(launcher: Launcher) -> None:
    check_shared_blocks(cuda_ops(launcher, split=16), LAYOUT)


@pytest.mark.parametrize("dtype", [LAYOUT.dtype, *CODE_DTYPES])
def test_blocks_behind_a_window_may_be_anothers(launcher: Launcher, dtype: torch.dtype) -> None:
    check_blocks_behind_a_window(cuda_ops(launcher, split=16), replace(LAYOUT, dtype=dtype), BF16)


def test_a_batch_is_planned_once_for_each_mask(emulated: CudaOps, case: PagedCase) -> None:
    window = replace(PLAIN, sliding_window=7)
    for spec in (PLAIN, window, PLAIN, window):
        result = emulated.attention(case.query, case.kv_layer, case.batch, spec)
        assert_near(result, ReferenceOps().attention(case.query, case.kv_layer, case.batch, spec))
    assert emulated.attention_shapes == (AttentionShape(2, 2, 64), AttentionShape(2, 2, 64, window=7))


def test_a_batch_brings_its_addresses_on_the_host(emulated: CudaOps, case: PagedCase) -> None:
    """They are what is planned by; the tensors are what the kernels read."""
    host = HostBatch(*(getattr(case.batch, name).numpy() for name in HOST_ARRAYS))
    result = emulated.attention(case.query, case.kv_layer, replace(case.batch, host=host), PLAIN)
    assert_same(result, emulated.attention(case.query, case.kv_layer, case.batch, PLAIN))
    beyond = replace(host, seq_lens=host.seq_lens + 90)
    with pytest.raises(KernelArgumentError, match="seq_lens is 130 at 0"):
        emulated.attention(case.query, case.kv_layer, replace(case.batch, host=beyond), PLAIN)
    short = replace(host, seq_lens=host.seq_lens[:1])
    with pytest.raises(KernelArgumentError, match=r"host.seq_lens is int32\[1\]; needed: int32\[2\]"):
        emulated.attention(case.query, case.kv_layer, replace(case.batch, host=short), PLAIN)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (AttentionSpec(scale=0.0), "scale"),
        (AttentionSpec(scale=-0.125), "scale"),
        (AttentionSpec(scale=1e-40), "scale"),
        (AttentionSpec(scale=1e7), "scale"),
        (AttentionSpec(scale=math.nan), "scale"),
        (AttentionSpec(scale=math.inf, logit_softcap=3.0), "scale"),
        (AttentionSpec(scale=0.1, logit_softcap=math.inf), "logit_softcap"),
        (AttentionSpec(scale=0.1, logit_softcap=1e-40), "logit_softcap"),
    ],
)
def test_factors_that_the_kernels_cannot_scale_scores_by(
    emulated: CudaOps, case: PagedCase, spec: AttentionSpec, name: str
) -> None:
    with pytest.raises(KernelArgumentError, match=f"^{name} is "):
        emulated.attention(case.query, case.kv_layer, case.batch, spec)


@pytest.mark.parametrize("scale", [1e-15, 1e6])
def test_scales_at_the_ends_of_what_is_taken(launcher: Launcher, case: PagedCase, scale: float) -> None:
    """At 1e6 only the highest score counts."""
    spec = AttentionSpec(scale=scale)
    result = cuda_ops(launcher).attention(case.query, case.kv_layer, case.batch, spec)
    assert_near(result, ReferenceOps().attention(case.query, case.kv_layer, case.batch, spec))


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_under_a_cap_the_scale_may_have_any_sign(launcher: Launcher, case: PagedCase, scale: float) -> None:
    spec = AttentionSpec(scale=scale, logit_softcap=2.5)
    result = cuda_ops(launcher).attention(case.query, case.kv_layer, case.batch, spec)
    assert_near(result, ReferenceOps().attention(case.query, case.kv_layer, case.batch, spec))


@pytest.mark.parametrize("sink", [-math.inf, -200.0, 200.0])
def test_sinks_that_weigh_nothing_or_outweigh_all(launcher: Launcher, case: PagedCase, sink: float) -> None:
    spec = replace(PLAIN, sinks=torch.full((4,), sink))
    result = cuda_ops(launcher).attention(case.query, case.kv_layer, case.batch, spec)
    assert_near(result, ReferenceOps().attention(case.query, case.kv_layer, case.batch, spec))


@pytest.mark.parametrize("wrong", [10**6, -1])
def test_bounds_checks_of_the_kernels(emulated: CudaOps, case: PagedCase, wrong: int) -> None:
    """An id that was right when it was checked. Emulated only: a trap ends a process's use of its GPU."""
    key, value = torch.zeros(2, 10, 2, 64, dtype=BF16)
    emulated.attention(case.query, case.kv_layer, case.batch, PLAIN)
    for sequence in (0, 1):  # decoded, prefilled
        kept = int(case.batch.block_tables[sequence, 0])
        case.batch.block_tables[sequence, 0] = wrong
        with pytest.raises(KernelFault, match="bounds check"):
            emulated.attention(case.query, case.kv_layer, case.batch, PLAIN)
        case.batch.block_tables[sequence, 0] = kept
    case.batch.slot_mapping[3] = 10**6
    with pytest.raises(KernelFault, match="bounds check"):
        emulated.write_kv(key, value, case.kv_layer, case.batch)
