"""Decode graphs: a replayed step gives what the eager one does, to the bit where the kernels are emulated."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cuda_cases import RUNTIMES
from support.decode_graphs import BLOCK_SIZE, MAX_BLOCKS, SIZES, ReplayedModel, build, taped_graphs
from support.paged_sessions import PagedSequence, PagedSession
from support.random_models import VOCAB_SIZE, tiny_model
from support.tape_graphs import TapeGraphs

from pageturner.kernels.cuda.attention_plan import AttentionShape
from pageturner.kernels.cuda.device_plan import DevicePlan
from pageturner.kernels.cuda.ops import CudaOps
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.layout import AttentionBatch
from pageturner.service.core.outputs import SchedulerOutput
from pageturner.service.model.batch import ForwardBatch, build_batch
from pageturner.service.model.decoder import Decoder
from pageturner.service.model.graphs import DecodeGraphs, graph_sizes
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.model.runner import Runner
from pageturner.service.model.transformers_model import checked_model


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)


@pytest.fixture(scope="module", params=RUNTIMES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ReplayedModel:
    pair = build(tmp_path_factory.mktemp("model"), on_gpu=request.param == "gpu")
    assert pair.graphs.capture() is None
    assert pair.graphs.captured == SIZES
    return pair


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_capture_leaves_the_cache_alone(tmp_path: Path, runtime: str) -> None:
    pair = build(tmp_path, sizes=(2,), on_gpu=runtime == "gpu")
    assert pair.graphs.capture() is None
    assert pair.graphs.captured == (2,)
    assert bool(pair.pool.isnan().all())


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 5, 8])
def test_a_replayed_step_is_the_eager_one(pair: ReplayedModel, num_sequences: int) -> None:
    """Contexts on both sides of the window, some of them split, and padding from none to three rows."""
    with pair.running([17, 150, 530, 40, 41, 1, 16, 320][:num_sequences]) as sequences:
        for _ in range(3):
            replayed, eager = pair.replayed_and_eager(sequences)
            assert not bool(replayed.isnan().any())
            pair.assert_equal(replayed, eager)


@settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.one_of(st.integers(1, 70), st.sampled_from([300, 511, 512, 600])), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(0, 1 << 20),
)
def test_any_decode_batch(pair: ReplayedModel, lengths: list[int], num_steps: int, seed: int) -> None:
    """Batches of changing members: each step drops or keeps a sequence at random."""
    dice = random.Random(seed)
    with pair.running(lengths, seed) as sequences:
        for _ in range(num_steps):
            members = dice.sample(sequences, dice.randint(1, len(sequences)))
            pair.assert_equal(*pair.replayed_and_eager(members))


def test_a_replay_runs_no_code_of_the_model(pair: ReplayedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("the model ran")

    with pair.running([20, 30]) as sequences:
        output = pair.session.output([(sequence, 1) for sequence in sequences])
        monkeypatch.setattr(Decoder, "forward", refuse)
        logits = Runner(pair.model, pair.session.kv_cache, pair.graphs).forward(output)
        assert logits.shape == (2, VOCAB_SIZE)
        if isinstance(pair.backend, TapeGraphs):
            assert all(tape.num_launches > 10 for tape in pair.backend.tapes)


class TestWhatRunsEagerly:
    @pytest.fixture
    def forwards(self, pair: ReplayedModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Numbers of rows that the model was asked for outside of the graphs."""
        asked: list[int] = []
        plain = Decoder.forward

        def forward(model: Decoder, batch: ForwardBatch, kv_cache: KvCache) -> torch.Tensor:
            asked.append(batch.num_rows)
            return plain(model, batch, kv_cache)

        monkeypatch.setattr(Decoder, "forward", forward)
        return asked

    def step(self, pair: ReplayedModel, work: Sequence[tuple[PagedSequence, int]]) -> torch.Tensor:
        output = pair.session.output(work)
        return Runner(pair.model, pair.session.kv_cache, pair.graphs).forward(output)

    def test_more_than_one_row_of_a_sequence(self, pair: ReplayedModel, forwards: list[int]) -> None:
        with pair.running([20, 30]) as (first, second):
            forwards.clear()
            self.step(pair, [(first, 1), (second, 2)])
            assert forwards == [3]

    def test_more_sequences_than_the_largest_size(self, pair: ReplayedModel, forwards: list[int]) -> None:
        with pair.running([20] * 9) as sequences:
            forwards.clear()
            self.step(pair, [(sequence, 1) for sequence in sequences])
            assert forwards == [9]
            self.step(pair, [(sequence, 1) for sequence in sequences[:8]])
            assert forwards == [9]

    def test_a_longer_block_table_than_was_captured(self, pair: ReplayedModel, forwards: list[int]) -> None:
        with pair.running([BLOCK_SIZE * MAX_BLOCKS]) as sequences:
            forwards.clear()
            self.step(pair, [(sequences[0], 1)])
            assert forwards == [1]


def test_only_sequences_that_sample_have_logits(pair: ReplayedModel) -> None:
    with pair.running([20, 30, 50]) as sequences:
        output = pair.session.output([(sequence, 1) for sequence in sequences])
        quiet = replace(output.scheduled[1], samples=())
        runner = Runner(pair.model, pair.session.kv_cache, pair.graphs)
        every = runner.forward(output).clone()
        some = runner.forward(SchedulerOutput(0, (output.scheduled[0], quiet, output.scheduled[2])))
        pair.assert_equal(some, every[[0, 2]])


def test_a_token_known_only_to_the_device_is_read_there(pair: ReplayedModel) -> None:
    with pair.running([20]) as (sequence,):
        batch = build_batch(pair.session.output([(sequence, 1)]), BLOCK_SIZE, pair.ops.device, lambda _: 0)
        expected = pair.graphs.forward(batch, pair.session.kv_cache).clone()
        other = replace(batch, token_ids=(batch.token_ids + 1) % VOCAB_SIZE)
        assert not torch.equal(pair.graphs.forward(other, pair.session.kv_cache), expected)
        pair.assert_equal(pair.graphs.forward(batch, pair.session.kv_cache), expected)


def test_padded_rows_neither_read_nor_write_block_0_of_another_sequence(pair: ReplayedModel) -> None:
    """Padding names block 0 in its tables, which may be any sequence's."""
    with pair.running([20, 90, 35]) as sequences:
        pair.pool[0] = math.nan
        replayed, eager = pair.replayed_and_eager(sequences)
        assert bool(pair.pool[0].isnan().all())
        assert not bool(replayed.isnan().any())
        pair.assert_equal(replayed, eager)


def test_a_batch_that_leaves_the_pool_is_refused_before_anything_runs(pair: ReplayedModel) -> None:
    with pair.running([20, 30]) as sequences:
        output = pair.session.output([(sequence, 1) for sequence in sequences])
        batch = build_batch(output, BLOCK_SIZE, pair.ops.device, lambda _: 0)
        host = batch.attention.host
        assert host is not None
        slots = host.slot_mapping.copy()
        slots[1] = pair.session.kv_cache.num_blocks * BLOCK_SIZE
        wrong = replace(batch, attention=replace(batch.attention, host=replace(host, slot_mapping=slots)))
        before = pair.pool.clone()
        with pytest.raises(KernelArgumentError, match="slot_mapping"):
            pair.graphs.forward(wrong, pair.session.kv_cache)
        pair.assert_equal(pair.pool, before)


class TestRefusal:
    """A model that can't be captured is served all the same, and one line says why."""

    def test_a_model_that_reads_results_on_the_host(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pair = build(tmp_path)
        plain = Decoder.forward

        def forward(model: Decoder, batch: ForwardBatch, kv_cache: KvCache) -> torch.Tensor:
            logits = plain(model, batch, kv_cache)
            return logits if float(logits.abs().max()) < 1e30 else logits.clamp(-1e30, 1e30)

        monkeypatch.setattr(Decoder, "forward", forward)
        assert pair.graphs.capture() == ("CaptureRefused: __float__ while capturing")
        assert pair.graphs.captured == ()
        with pair.running([20, 30]) as sequences:
            pair.assert_equal(*pair.replayed_and_eager(sequences))

    def test_a_kernel_that_is_loaded_late(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pair = build(tmp_path)
        monkeypatch.setattr(pair.backend, "warm_up", lambda forward: None)
        monkeypatch.setattr(
            CudaOps, "attention_shapes", (AttentionShape(1, 2, 64), AttentionShape(1, 2, 64, window=40))
        )
        assert (pair.graphs.capture() or "").startswith("CaptureRefused: loading")

    def test_a_group_of_heads_that_no_decode_item_holds(self, tmp_path: Path) -> None:
        pair = build(tmp_path, num_attention_heads=17, hidden_size=17 * 64)
        assert pair.graphs.capture() == "KernelArgumentError: group is 17; needed: at most 16"

    def test_nothing_is_left_behind(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Sizes captured before the failure go, with what they registered."""
        pair = build(tmp_path)
        plain, captures = pair.backend.capture, iter([True, True, False])
        known, forgotten = list[AttentionBatch](), list[AttentionBatch]()
        register, forget = pair.ops.register, pair.ops.forget

        def noted_register(batch: AttentionBatch, plans: Mapping[AttentionShape, DevicePlan]) -> None:
            known.append(batch)
            register(batch, plans)

        def noted_forget(batch: AttentionBatch) -> None:
            forgotten.append(batch)
            forget(batch)

        monkeypatch.setattr(pair.ops, "register", noted_register)
        monkeypatch.setattr(pair.ops, "forget", noted_forget)

        def capture(forward: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
            if not next(captures):
                raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")
            return plain(forward)

        monkeypatch.setattr(pair.backend, "capture", capture)
        assert pair.graphs.capture() == "OutOfMemoryError: CUDA out of memory."
        assert pair.graphs.captured == ()
        assert len(known) == 3
        assert forgotten == known


_MORE_FAMILIES = ("mixtral", "qwen3_moe", "llama4", "gpt_oss", "phi", "cohere2")


class TestTransformers:
    @pytest.mark.parametrize(
        "family",
        ["llama", "gemma2", *(pytest.param(name, marks=pytest.mark.slow) for name in _MORE_FAMILIES)],
    )
    def test_a_model_of_transformers_is_captured_too(self, family: str) -> None:
        launcher, tapes = taped_graphs()
        ops = CudaOps(launcher)
        _, plain = tiny_model(family, 3, head_dim=64)
        model = checked_model(torch.nn.Module.to(plain, torch.bfloat16), lambda heads: ops)
        session = PagedSession(model, ops, block_size=BLOCK_SIZE)
        graphs = DecodeGraphs(model, session.kv_cache, ops, tapes, (1, 2, 4), MAX_BLOCKS)
        assert graphs.capture() is None
        sequences = [session.add([7 * i % VOCAB_SIZE for i in range(40)]) for _ in range(3)]
        session.step([(sequence, 20) for sequence in sequences])
        output = session.output([(sequence, 1) for sequence in sequences])
        replayed = Runner(model, session.kv_cache, graphs).forward(output).clone()
        assert_same_bits(replayed, Runner(model, session.kv_cache).forward(output))


@pytest.mark.parametrize("largest", [1, 2, 3, 4, 7, 8, 9, 64, 100, 256, 1000])
def test_sizes_waste_little(largest: int) -> None:
    sizes = graph_sizes(largest)
    assert sizes[0] == 1
    assert sizes[-1] == largest
    assert list(sizes) == sorted(set(sizes))
    for count in range(1, largest + 1):
        padding = next(size for size in sizes if size >= count) - count
        assert padding <= max(7, count // 8)
    assert len(sizes) < 50  # each takes a moment at start-up
