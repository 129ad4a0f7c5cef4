"""A decoder's forward as one call has the bits of its operations one by one, whatever shares a step."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from support.grouped import KINDS, grouped_weight
from support.ops import cpu_cache_dir, cpu_library
from support.paged import assert_same, empty_pool, make_batch, make_case
from support.planting import BuggyLibrary, ExpressionBug

from pageturner.kernels.cpu.build import NATIVE
from pageturner.kernels.cpu.forward import STRUCTURES, CpuDecoder, DecoderWeights, LayerWeights
from pageturner.kernels.cpu.ops import CpuOps
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.known_tokens import KnownTokens
from pageturner.kernels.layout import CODE_DTYPES, AttentionBatch, KeyOrder, KvLayout
from pageturner.kernels.packed import PackedWeight, pack, rows_of
from pageturner.kernels.reference import ReferenceQuantisedOps
from pageturner.kernels.reference_scores import bound_of, token_scores

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB, BLOCK = 96, 160, 6, 2, 32, 50, 16
EPS = 1e-5
LAYOUT = KvLayout(3, KV_HEADS, DIM, BLOCK, torch.bfloat16, KeyOrder.TILED16)


def some(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def product(kind: str, out_features: int, in_features: int, seed: int, *, bias: bool) -> PackedWeight:
    weight = grouped_weight(KINDS[kind], out_features, in_features, seed)
    return pack(weight, some(out_features, seed=seed) if bias else None)


def make_weights(
    kind: str = "Q4_1", *, bias: bool = False, head_norms: bool = False, spec: AttentionSpec | None = None
) -> DecoderWeights:
    """Three layers: the second does not rotate; `spec` is that of the last."""

    def layer(index: int) -> LayerWeights:
        seed, size = 10 * index, (HEADS + 2 * KV_HEADS) * DIM
        return LayerWeights(
            attention_norm=some(HIDDEN, seed=seed),
            qkv=product(kind, size, HIDDEN, seed + 1, bias=bias),
            q_norm=some(DIM, seed=seed + 2) if head_norms else None,
            k_norm=some(DIM, seed=seed + 3) if head_norms else None,
            rotated=index != 1,
            attention=spec if spec is not None and index == 2 else AttentionSpec(scale=0.2),
            out=product(kind, HIDDEN, HEADS * DIM, seed + 4, bias=bias),
            mlp_norm=some(HIDDEN, seed=seed + 5),
            gate_up=product(kind, 2 * INNER, HIDDEN, seed + 6, bias=bias),
            down=product(kind, HIDDEN, INNER, seed + 7, bias=bias),
        )

    embedding = product("Q8_0", VOCAB, HIDDEN, 100, bias=False)
    angles = some(64, DIM // 2, seed=101).repeat(1, 2)
    return DecoderWeights(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        eps=EPS,
        embedding=embedding,
        layers=tuple(layer(index) for index in range(LAYOUT.num_layers)),
        norm=some(HIDDEN, seed=102),
        head=embedding,
        cos=angles.cos(),
        sin=angles.sin(),
    )


@dataclass(frozen=True)
class Step:
    token_ids: torch.Tensor
    batch: AttentionBatch
    logit_rows: torch.Tensor


def make_step(sequences: list[tuple[int, int]], tables: list[list[int]], seed: int = 0) -> Step:
    """sequences: (rows, length); the last row of each wants logits."""
    batch = make_batch(sequences, tables, BLOCK)
    token_ids = torch.randint(
        0, VOCAB, batch.slot_mapping.shape, generator=torch.Generator().manual_seed(seed)
    )
    return Step(token_ids, batch, batch.query_start_loc[1:].long() - 1)


def make_pool(num_blocks: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return empty_pool(replace(LAYOUT, dtype=dtype), num_blocks)


def op_by_op(weights: DecoderWeights, step: Step, pool: torch.Tensor) -> torch.Tensor:
    """The flow of service/model/decoder.py; products as they are defined."""
    ops, products = CpuOps(cpu_library()), ReferenceQuantisedOps()
    rows = len(step.token_ids)
    sizes = [heads * weights.head_dim for heads in (HEADS, KV_HEADS, KV_HEADS)]
    cos, sin = weights.cos[step.batch.positions], weights.sin[step.batch.positions]
    hidden, residual = rows_of(weights.embedding, step.token_ids), None
    for index, layer in enumerate(weights.layers):
        normed, residual = ops.rms_norm(hidden, layer.attention_norm, EPS, residual)
        query, key, value = (
            part.view(rows, -1, DIM)
            for part in torch.split(products.linear(normed, layer.qkv), sizes, dim=-1)
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = ops.rms_norm(query, layer.q_norm, EPS)[0], ops.rms_norm(key, layer.k_norm, EPS)[0]
        if layer.rotated:
            query = ops.rope_and_write_kv(query, key, value, cos, sin, pool[:, index], step.batch)
        else:
            ops.write_kv(key, value, pool[:, index], step.batch)
        attended = ops.attention(query, pool[:, index], step.batch, layer.attention).flatten(1)
        normed, residual = ops.rms_norm(products.linear(attended, layer.out), layer.mlp_norm, EPS, residual)
        gated = ops.silu_and_mul(products.linear(normed, layer.gate_up))
        hidden = products.linear(gated, layer.down)
    assert residual is not None
    picked = step.logit_rows
    return products.linear(ops.rms_norm(hidden[picked], weights.norm, EPS, residual[picked])[0], weights.head)


def forward(weights: DecoderWeights, step: Step, pool: torch.Tensor, num_threads: int = 3) -> torch.Tensor:
    decoder = CpuDecoder(cpu_library(), weights, num_threads)
    return decoder.forward(step.token_ids, step.batch, step.logit_rows, pool)


def check(weights: DecoderWeights, dtype: torch.dtype = torch.bfloat16) -> None:
    """Two steps over one pool: prompts and a chunk of one, then decodes beside the chunk's rest."""
    tables = [[3, 0], [1], [2, 5]]
    steps = (
        make_step([(20, 20), (7, 7), (9, 9)], tables),
        make_step([(1, 21), (1, 8), (14, 23)], tables, seed=1),
    )
    pool, expected_pool = make_pool(6, dtype), make_pool(6, dtype)
    decoder = CpuDecoder(cpu_library(), weights, 3)
    for step in steps:
        expected = op_by_op(weights, step, expected_pool)
        result = decoder.forward(step.token_ids, step.batch, step.logit_rows, pool)
        assert torch.isfinite(expected).all()
        assert_same(result, expected)
        assert_same(pool.view(torch.uint8), expected_pool.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_one_call_has_the_bits_of_its_operations(kind: str) -> None:
    check(make_weights(kind))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *CODE_DTYPES])
def test_biases_and_norms_of_heads_keep_the_bits(dtype: torch.dtype) -> None:
    check(make_weights(bias=True, head_norms=True), dtype)


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(scale=0.2, sliding_window=9),
        AttentionSpec(scale=0.2, chunk=8),
        AttentionSpec(scale=0.2, logit_softcap=2.0, sinks=torch.linspace(-1, 1, HEADS)),
    ],
    ids=["window", "chunk", "softcap and sinks"],
)
def test_what_attention_may_differ_in_keeps_the_bits(spec: AttentionSpec) -> None:
    check(make_weights(spec=spec))


def test_neither_threads_nor_what_shares_the_step_change_a_bit() -> None:
    weights = make_weights()
    sequences = [(1 + 5 * index % 17, 1 + 5 * index % 17) for index in range(12)]
    tables = [[2 * index, 2 * index + 1] for index in range(12)]
    together = make_step(sequences, tables)
    logits = {threads: forward(weights, together, make_pool(24), threads) for threads in (1, 2, 5)}
    assert_same(logits[2], logits[1])
    assert_same(logits[5], logits[1])
    begin = 0
    for index, (rows, length) in enumerate(sequences):
        alone = make_step([(rows, length)], [tables[index]])
        alone = replace(alone, token_ids=together.token_ids[begin : begin + rows])
        assert_same(forward(weights, alone, make_pool(24)), logits[1][index : index + 1])
        begin += rows


@pytest.mark.parametrize("rows", [[27, 0, 19, 19], [26, 36], [5], list(range(37))])
def test_any_rows_may_want_logits_in_any_order(rows: list[int]) -> None:
    """They alone go through the last layer's products; the keys and values of the others are written."""
    weights = make_weights(spec=AttentionSpec(scale=0.2, sliding_window=9))
    step = replace(
        make_step([(20, 20), (7, 9), (10, 23)], [[3, 0], [1], [2, 5]]), logit_rows=torch.tensor(rows)
    )
    pool, expected_pool = make_pool(6), make_pool(6)
    for block, before in ((1, 0.5), (2, 0.25)):  # what the second and the third hold from steps before
        pool[block] = expected_pool[block] = before
    expected = op_by_op(weights, step, expected_pool)
    assert torch.isfinite(expected).all()
    assert_same(forward(weights, step, pool), expected)
    assert_same(pool, expected_pool)


def test_steps_that_want_no_logits_or_have_no_rows() -> None:
    weights, pool = make_weights(), make_pool(6)
    step = make_step([(20, 20)], [[3, 0]])
    expected_pool = make_pool(6)
    op_by_op(weights, step, expected_pool)
    silent = replace(step, logit_rows=torch.zeros(0, dtype=torch.int64))
    assert forward(weights, silent, pool).shape == (0, VOCAB)
    assert_same(pool, expected_pool)

    none = torch.zeros(0, dtype=torch.int64)
    batch = AttentionBatch(
        query_start_loc=torch.zeros(1, dtype=torch.int32),
        seq_lens=torch.zeros(0, dtype=torch.int32),
        block_tables=torch.zeros(0, 1, dtype=torch.int32),
        slot_mapping=none,
        positions=none,
        max_query_len=0,
        max_seq_len=0,
    )
    assert forward(weights, Step(none, batch, none), pool).shape == (0, VOCAB)
    assert_same(pool, expected_pool)


def test_a_step_outside_the_model_is_refused_and_writes_nothing() -> None:
    weights, pool = make_weights(), make_pool(6)
    decoder = CpuDecoder(cpu_library(), weights, 1)
    step = make_step([(20, 20)], [[3, 0]])
    for wrong, name in (
        (replace(step, token_ids=step.token_ids + VOCAB), "token_ids"),
        (replace(step, token_ids=step.token_ids - VOCAB), "token_ids"),
        (replace(step, token_ids=step.token_ids[1:]), "token_ids"),
        (replace(step, logit_rows=step.logit_rows + 1), "logit_rows"),
        (replace(step, batch=replace(step.batch, positions=step.batch.positions + 64)), "positions"),
        (replace(step, batch=replace(step.batch, block_tables=step.batch.block_tables + 6)), "block_tables"),
    ):
        with pytest.raises(KernelArgumentError, match=name):
            decoder.forward(wrong.token_ids, wrong.batch, wrong.logit_rows, pool)
    for wrong_pool in (pool[:, :2], pool.double(), pool[..., :16], pool[:, :, :1]):
        with pytest.raises(KernelArgumentError, match=r"pool|kv_layer"):
            decoder.forward(step.token_ids, step.batch, step.logit_rows, wrong_pool)
    assert torch.isnan(pool).all()


@pytest.mark.parametrize("num_top", [0, 3])
def test_rows_that_score_have_the_bits_of_one_by_one(num_top: int) -> None:
    """Rows of all kinds side by side: a prompt's, a fork's, and those that are sampled from."""
    weights, step = make_weights(), make_step([(20, 20), (7, 7), (10, 10)], [[3, 0], [1], [2]])
    rows = torch.tensor([36, 19, 0, 5, 19, 21])  # two that are sampled from, four that score
    known = KnownTokens(
        torch.tensor([0, 1, 2, 5, 6]).int(), torch.tensor([1, 49, 0, 8, 8, 30]).int(), num_top
    )
    decoder = CpuDecoder(cpu_library(), weights, 3)
    every = decoder.forward(step.token_ids, step.batch, rows, make_pool(6))
    logits, scores = decoder.forward_scored(step.token_ids, step.batch, rows, known, make_pool(6))
    assert_same(logits, every[:2])
    wanted = token_scores(every[2:], known)
    assert ((scores.logprobs - wanted.logprobs).abs() <= bound_of(wanted.logprobs)).all()
    assert torch.equal(scores.top_ids, wanted.top_ids)
    for index in range(4):
        alone = decoder.forward_scored(
            step.token_ids, step.batch, rows[2 + index :][:1], known.of_rows(index, index + 1), make_pool(6)
        )
        assert_same(alone[0], every[:0])
        assert_same(alone[1].logprobs, scores.logprobs[known.rows() == index])
        assert_same(alone[1].top_logprobs, scores.top_logprobs[index : index + 1])


@pytest.mark.parametrize(
    "known",
    [
        KnownTokens(torch.tensor([0, 1, 2, 3, 4]).int(), torch.tensor([1, 2, 3, 4]).int()),
        KnownTokens(torch.tensor([0, 1]).int(), torch.tensor([VOCAB]).int()),
        KnownTokens(torch.tensor([0, 1]).int(), torch.tensor([-1]).int()),
        KnownTokens(torch.tensor([0, 2]).int(), torch.tensor([1]).int()),
        KnownTokens(torch.tensor([0, 2, 1]).int(), torch.tensor([1]).int()),
        KnownTokens(torch.tensor([0, 1]).int(), torch.tensor([1]).int(), -1),
        KnownTokens(torch.tensor([0, 1]), torch.tensor([1]).int()),
    ],
    ids=["more rows", "past the vocabulary", "negative", "too few", "descending", "num_top", "dtype"],
)
def test_known_tokens_that_do_not_fit_are_refused(known: KnownTokens) -> None:
    weights, step = make_weights(), make_step([(20, 20), (7, 7)], [[3, 0], [1]])
    decoder = CpuDecoder(cpu_library(), weights, 1)
    with pytest.raises(KernelArgumentError):
        decoder.forward_scored(step.token_ids, step.batch, torch.tensor([3, 4, 5]), known, make_pool(6))


def test_weights_that_do_not_fit_each_other_are_refused() -> None:
    weights = make_weights()
    first, *others = weights.layers
    small = product("Q4_1", HIDDEN, HIDDEN, 0, bias=False)
    for wrong in (
        replace(weights, layers=()),
        replace(weights, num_kv_heads=4),
        replace(weights, head_dim=40),
        replace(weights, norm=weights.norm[1:]),
        replace(weights, norm=weights.norm.double()),
        replace(weights, sin=weights.sin[1:]),
        replace(weights, cos=weights.cos.t().contiguous().t()),
        replace(weights, head=small),
        replace(weights, layers=(replace(first, qkv=small), *others)),
        replace(weights, layers=(replace(first, down=small), *others)),
        replace(weights, layers=(replace(first, q_norm=torch.ones(DIM)), *others)),
    ):
        with pytest.raises(KernelArgumentError):
            CpuDecoder(cpu_library(), wrong, 1)


def test_the_profile_tells_every_phase_of_a_step() -> None:
    weights, step = make_weights(), make_step([(20, 20)], [[3, 0]])
    decoder = CpuDecoder(cpu_library(), weights, 2)
    assert not any(decoder.profile().values())
    decoder.forward(step.token_ids, step.batch, step.logit_rows, make_pool(6))
    assert {phase for phase, seconds in decoder.profile().items() if not seconds} == {"host"}
    assert not any(decoder.profile().values())


ENDS_AMID_A_STEP = """
import threading, time
from kernels.cpu.test_forward import CpuDecoder, cpu_library, make_pool, make_step, make_weights
decoder, pool = CpuDecoder(cpu_library(), make_weights(), 3), make_pool(2000)
step = make_step([(16, 16)] * 2000, [[block] for block in range(2000)])  # seconds of work
begun = threading.Event()

def go_on() -> None:
    begun.set()
    decoder.forward(step.token_ids, step.batch, step.logit_rows, pool)

threading.Thread(target=go_on, daemon=True).start()
begun.wait()
time.sleep(0.1)  # between the event and the step there is nothing to wait for
"""
"""Inside the step, not between two: torch ends a process that ends while a daemon thread calls it."""


def test_a_process_may_end_amid_a_step() -> None:
    tests = Path(__file__).parents[2]
    command = [
        sys.executable,
        "-P",
        "-c",
        f"import sys; sys.path.insert(0, {str(tests)!r})\n{ENDS_AMID_A_STEP}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


PIECE = ExpressionBug("team.h", "memory.size() < floats", "throw std::bad_alloc(), true")
STEP = ExpressionBug("buffer.h", "size > capacity", "throw std::bad_alloc(), true")
MODEL = ExpressionBug(
    "forward.cpp", "new DecoderForward(*model, num_threads)", "throw std::bad_alloc(), nullptr"
)


@pytest.fixture(scope="module")
def lacking(tmp_path_factory: pytest.TempPathFactory) -> BuggyLibrary:
    folder, quickly = tmp_path_factory.mktemp("lacking"), (*NATIVE, "-O0")
    return BuggyLibrary((PIECE, STEP, MODEL), folder, cpu_cache_dir(), machine=quickly)


def test_an_operation_without_memory_raises_and_the_next_one_goes_well(lacking: BuggyLibrary) -> None:
    ops = CpuOps(lacking.library)
    case = make_case([(1, 40), (60, 60)], layout=LAYOUT, num_heads=HEADS)
    arguments = (case.query, case.kv_layer, case.batch, AttentionSpec(scale=0.2))
    before = ops.attention(*arguments)
    lacking.switch_on(PIECE)
    with pytest.raises(MemoryError, match="no memory for attention_bfloat16_bfloat16"):
        ops.attention(*arguments)
    lacking.switch_off()
    assert_same(ops.attention(*arguments), before)


@pytest.mark.parametrize("bug", [PIECE, STEP], ids=["in a piece", "for the step"])
def test_a_step_without_memory_raises_and_the_next_one_goes_well(
    lacking: BuggyLibrary, bug: ExpressionBug
) -> None:
    weights, pool = make_weights(), make_pool(6)
    decoder = CpuDecoder(lacking.library, weights, 3)
    step = make_step([(20, 20), (7, 7)], [[3, 0], [1]])
    arguments = (step.token_ids, step.batch, step.logit_rows, pool)
    before = decoder.forward(*arguments)
    lacking.switch_on(bug)
    with pytest.raises(MemoryError, match="no memory for decoder_forward_bfloat16"):
        decoder.forward(*arguments)
    lacking.switch_off()
    assert_same(decoder.forward(*arguments), before)


def test_a_model_without_memory_is_not_made(lacking: BuggyLibrary) -> None:
    lacking.switch_on(MODEL)
    with pytest.raises(MemoryError, match="no memory for decoder_create"):
        CpuDecoder(lacking.library, make_weights(), 2)
    lacking.switch_off()


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_have_the_size_that_cpp_gives_them(name: str) -> None:
    size = getattr(cpu_library(), f"sizeof_{name}_args")
    size.restype = ctypes.c_int64
    assert size() == ctypes.sizeof(STRUCTURES[name])
