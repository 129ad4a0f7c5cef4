"""Decode graphs: a replayed step gives what the eager one does, to the bit where the kernels are emulated."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pageturner.kernels.cuda import static_batch
from pageturner.kernels.cuda.device_plan import DevicePlan, PlanCapacity, pack
from pageturner.kernels.cuda.ops import CudaOps
from pageturner.kernels.cuda.plan import AttentionPlan, AttentionShape
from pageturner.kernels.cuda.planner import Planner
from pageturner.kernels.cuda.static_batch import StaticBatch
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.layout import AttentionBatch, HostBatch
from pageturner.service.core.outputs import SchedulerOutput
from pageturner.service.model.batch import ForwardBatch, build_batch
from pageturner.service.model.decoder import Decoder
from pageturner.service.model.graphs import DecodeGraphs, TorchGraphs, graph_sizes
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.model.runner import Runner
from pageturner.service.model.transformers_model import checked_model
from support.cuda_cases import RUNTIMES
from support.decode_graphs import BLOCK_SIZE, MAX_BLOCKS, SIZES, House, build, taped_graphs
from support.paged_sessions import PagedSequence, PagedSession
from support.random_models import VOCAB_SIZE, tiny_model
from support.tape_graphs import TapeGraphs


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)


@pytest.fixture(scope="module", params=RUNTIMES)
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> House:
    house = build(tmp_path_factory.mktemp("model"), on_gpu=request.param == "gpu")
    assert house.graphs.capture() is None
    assert house.graphs.captured == SIZES
    return house


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_capture_leaves_the_cache_alone(tmp_path: Path, runtime: str) -> None:
    house = build(tmp_path, sizes=(2,), on_gpu=runtime == "gpu")
    assert house.graphs.capture() is None
    assert house.graphs.captured == (2,)
    assert bool(house.pool.isnan().all())


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 5, 8])
def test_a_replayed_step_is_the_eager_one(house: House, num_sequences: int) -> None:
    """Contexts on both sides of the window, some of them split, and padding from none to three rows."""
    with house.running([17, 150, 530, 40, 41, 1, 16, 320][:num_sequences]) as sequences:
        for _ in range(3):
            replayed, eager = house.replayed_and_eager(sequences)
            assert not bool(replayed.isnan().any())
            house.assert_equal(replayed, eager)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(st.integers(1, 70), st.sampled_from([300, 511, 512, 600])), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(0, 1 << 20),
)
def test_any_decode_batch(house: House, lengths: list[int], num_steps: int, seed: int) -> None:
    """Batches of changing company: each step drops or keeps a sequence at random."""
    dice = random.Random(seed)
    with house.running(lengths, seed) as sequences:
        for _ in range(num_steps):
            company = dice.sample(sequences, dice.randint(1, len(sequences)))
            house.assert_equal(*house.replayed_and_eager(company))


def test_a_replay_runs_no_code_of_the_model(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("the model ran")

    with house.running([20, 30]) as sequences:
        output = house.session.output([(sequence, 1) for sequence in sequences])
        monkeypatch.setattr(Decoder, "forward", refuse)
        logits = Runner(house.model, house.session.kv_cache, house.graphs).forward(output)
        assert logits.shape == (2, VOCAB_SIZE)
        if isinstance(house.backend, TapeGraphs):
            assert all(tape.num_launches > 10 for tape in house.backend.tapes)


class TestWhatRunsEagerly:
    @pytest.fixture
    def forwards(self, house: House, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Numbers of rows that the model was asked for outside of the graphs."""
        asked: list[int] = []
        plain = Decoder.forward

        def forward(model: Decoder, batch: ForwardBatch, kv_cache: KvCache) -> torch.Tensor:
            asked.append(batch.num_rows)
            return plain(model, batch, kv_cache)

        monkeypatch.setattr(Decoder, "forward", forward)
        return asked

    def step(self, house: House, work: Sequence[tuple[PagedSequence, int]]) -> torch.Tensor:
        output = house.session.output(work)
        return Runner(house.model, house.session.kv_cache, house.graphs).forward(output)

    def test_more_than_one_row_of_a_sequence(self, house: House, forwards: list[int]) -> None:
        with house.running([20, 30]) as (first, second):
            forwards.clear()
            self.step(house, [(first, 1), (second, 2)])
            assert forwards == [3]

    def test_more_sequences_than_the_largest_size(self, house: House, forwards: list[int]) -> None:
        with house.running([20] * 9) as sequences:
            forwards.clear()
            self.step(house, [(sequence, 1) for sequence in sequences])
            assert forwards == [9]
            self.step(house, [(sequence, 1) for sequence in sequences[:8]])
            assert forwards == [9]

    def test_a_longer_block_table_than_was_captured(self, house: House, forwards: list[int]) -> None:
        with house.running([BLOCK_SIZE * MAX_BLOCKS]) as sequences:
            forwards.clear()
            self.step(house, [(sequences[0], 1)])
            assert forwards == [1]


def test_only_sequences_that_sample_have_logits(house: House) -> None:
    with house.running([20, 30, 50]) as sequences:
        output = house.session.output([(sequence, 1) for sequence in sequences])
        quiet = replace(output.scheduled[1], samples=())
        runner = Runner(house.model, house.session.kv_cache, house.graphs)
        every = runner.forward(output).clone()
        some = runner.forward(SchedulerOutput(0, (output.scheduled[0], quiet, output.scheduled[2])))
        house.assert_equal(some, every[[0, 2]])


def test_a_token_known_only_to_the_device_is_read_there(house: House) -> None:
    with house.running([20]) as (sequence,):
        batch = build_batch(house.session.output([(sequence, 1)]), BLOCK_SIZE, house.ops.device, lambda _: 0)
        expected = house.graphs.forward(batch, house.session.kv_cache).clone()
        other = replace(batch, token_ids=(batch.token_ids + 1) % VOCAB_SIZE)
        assert not torch.equal(house.graphs.forward(other, house.session.kv_cache), expected)
        house.assert_equal(house.graphs.forward(batch, house.session.kv_cache), expected)


def test_block_0_full_of_nan_and_owned_by_a_stranger_is_neither_read_nor_written(house: House) -> None:
    """Padding names block 0 in its tables. Whoever owns it, nobody may notice."""
    with house.running([20, 90, 35]) as sequences:
        house.pool[0] = math.nan
        replayed, eager = house.replayed_and_eager(sequences)
        assert bool(house.pool[0].isnan().all())
        assert not bool(replayed.isnan().any())
        house.assert_equal(replayed, eager)


def test_a_batch_that_leaves_the_pool_is_refused_before_anything_runs(house: House) -> None:
    with house.running([20, 30]) as sequences:
        output = house.session.output([(sequence, 1) for sequence in sequences])
        batch = build_batch(output, BLOCK_SIZE, house.ops.device, lambda _: 0)
        host = batch.attention.host
        assert host is not None
        slots = host.slot_mapping.copy()
        slots[1] = house.session.kv_cache.num_blocks * BLOCK_SIZE
        wrong = replace(batch, attention=replace(batch.attention, host=replace(host, slot_mapping=slots)))
        before = house.pool.clone()
        with pytest.raises(KernelArgumentError, match="slot_mapping"):
            house.graphs.forward(wrong, house.session.kv_cache)
        house.assert_equal(house.pool, before)


class TestRefusal:
    """A model that can't be captured is served all the same, and one line says why."""

    def test_a_model_that_reads_results_on_the_host(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        house = build(tmp_path)
        plain = Decoder.forward

        def forward(model: Decoder, batch: ForwardBatch, kv_cache: KvCache) -> torch.Tensor:
            logits = plain(model, batch, kv_cache)
            return logits if float(logits.abs().max()) < 1e30 else logits.clamp(-1e30, 1e30)

        monkeypatch.setattr(Decoder, "forward", forward)
        assert house.graphs.capture() == ("CaptureRefused: __float__ while capturing")
        assert house.graphs.captured == ()
        with house.running([20, 30]) as sequences:
            house.assert_equal(*house.replayed_and_eager(sequences))

    def test_a_kernel_that_is_loaded_late(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        house = build(tmp_path)
        monkeypatch.setattr(house.backend, "warm_up", lambda forward: None)
        monkeypatch.setattr(
            CudaOps, "attention_shapes", (AttentionShape(1, 2, 64), AttentionShape(1, 2, 64, window=40))
        )
        assert (house.graphs.capture() or "").startswith("CaptureRefused: loading")

    def test_a_group_of_heads_that_no_decode_item_holds(self, tmp_path: Path) -> None:
        house = build(tmp_path, num_attention_heads=17, hidden_size=17 * 64)
        assert house.graphs.capture() == "KernelArgumentError: group is 17; needed: at most 16"

    def test_nothing_is_left_behind(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Sizes captured before the failure go, with what they registered."""
        house = build(tmp_path)
        plain, captures = house.backend.capture, iter([True, True, False])
        known, forgotten = list[AttentionBatch](), list[AttentionBatch]()
        register, forget = house.ops.register, house.ops.forget

        def noted_register(batch: AttentionBatch, plans: Mapping[AttentionShape, DevicePlan]) -> None:
            known.append(batch)
            register(batch, plans)

        def noted_forget(batch: AttentionBatch) -> None:
            forgotten.append(batch)
            forget(batch)

        monkeypatch.setattr(house.ops, "register", noted_register)
        monkeypatch.setattr(house.ops, "forget", noted_forget)

        def capture(forward: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
            if not next(captures):
                raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")
            return plain(forward)

        monkeypatch.setattr(house.backend, "capture", capture)
        assert house.graphs.capture() == "OutOfMemoryError: CUDA out of memory."
        assert house.graphs.captured == ()
        assert len(known) == 3
        assert forgotten == known


class TestTorchGraphs:
    """Where there is no GPU: in which order torch is asked for what."""

    def test_a_warm_up_runs_beside_and_both_streams_wait(self) -> None:
        log: list[str] = []
        graphs = TorchGraphs(torch.device("cuda", 1), _FakeCuda(log))
        graphs.warm_up(lambda: _said(log, "forward"))
        assert log == [
            "pool",
            "side waits for current",
            "enter stream side",
            "forward",
            "leave stream side",
            "current waits for side",
        ]

    def test_all_captures_share_one_pool_on_their_device(self) -> None:
        log: list[str] = []
        graphs = TorchGraphs(torch.device("cuda", 1), _FakeCuda(log))
        for _ in range(2):
            log.clear()
            replay, result = graphs.capture(lambda: _said(log, "forward"))
            assert log == [
                "enter device cuda:1",
                "enter graph in the pool",
                "forward",
                "leave graph in the pool",
                "leave device cuda:1",
            ]
            replay()
            assert log[-1] == "replay"
            assert result.numel() == 0


def _said(log: list[str], word: str) -> torch.Tensor:
    log.append(word)
    return torch.empty(0)


class _FakeCuda:
    """What TorchGraphs asks of torch.cuda, written down."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def graph_pool_handle(self) -> str:
        self.log.append("pool")
        return "the pool"

    def Stream(self, device: torch.device) -> _FakeStream:  # noqa: N802 - torch's name
        return _FakeStream("side", self.log)

    def current_stream(self, device: torch.device) -> _FakeStream:
        return _FakeStream("current", self.log)

    def CUDAGraph(self) -> SimpleNamespace:  # noqa: N802 - torch's name
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    @contextmanager
    def _within(self, what: str) -> Iterator[None]:
        self.log.append(f"enter {what}")
        yield
        self.log.append(f"leave {what}")

    def stream(self, stream: _FakeStream) -> AbstractContextManager[None]:
        return self._within(f"stream {stream.name}")

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return self._within(f"device {device}")

    def graph(self, graph: object, *, pool: str) -> AbstractContextManager[None]:
        return self._within(f"graph in {pool}")


@dataclass
class _FakeStream:
    name: str
    log: list[str]

    def wait_stream(self, other: _FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


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


class TestPlantedBugs:
    """Each mistake that a graph would make silently shows as other bits, other memory, or a refusal."""

    def differs(self, house: House, lengths: Sequence[int] = (150, 530, 40)) -> bool:
        """Whether any of a few steps of changing company is other than eager, or refused."""
        house.graphs.capture()
        if house.graphs.captured != house.graphs.sizes:
            return True
        house.pool[0] = math.nan  # whatever the capture wrote there
        with house.running(lengths) as sequences:
            for company in (sequences[:1], sequences, sequences[1:], sequences[:1]):
                try:
                    replayed, eager = house.replayed_and_eager(company)
                    house.assert_equal(replayed, eager)
                except (AssertionError, KernelArgumentError):
                    return True
        return False

    def test_without_one_nothing_differs(self, tmp_path: Path) -> None:
        assert not self.differs(build(tmp_path))

    def test_padding_writes_slot_0(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(static_batch, "PADDING_SLOT", 0)
        assert self.differs(build(tmp_path))

    def test_the_grid_is_as_large_as_the_plan(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Captured for the first plan that comes, instead of the largest."""
        monkeypatch.setattr(
            Planner,
            "decode_capacity",
            lambda planner, count, longest, shape: PlanCapacity.of(
                planner.plan(np.arange(count + 1), np.full(count, 17), shape)
            ),
        )
        assert self.differs(build(tmp_path))

    def test_counts_are_those_of_the_capture(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(static_batch, "pack", _packed_once(pack))
        assert self.differs(build(tmp_path))

    def test_a_buffer_is_allocated_anew(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = StaticBatch.load

        def load(static: StaticBatch, token_ids: torch.Tensor, host: HostBatch) -> None:
            static._buffer = static._buffer.clone()
            plain(static, token_ids, host)

        monkeypatch.setattr(StaticBatch, "load", load)
        assert self.differs(build(tmp_path))

    @pytest.mark.parametrize(
        "name", ["token_ids", "positions", "slot_mapping", "seq_lens", "block_tables", "plans"]
    )
    def test_an_input_keeps_what_it_held_at_capture(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
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
        assert self.differs(build(tmp_path))

    def test_a_number_of_the_batch_is_read_by_the_model(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """max_seq_len, which a capture freezes at 1."""
        plain = Decoder.forward

        def forward(model: Decoder, batch: ForwardBatch, kv_cache: KvCache) -> torch.Tensor:
            return plain(model, batch, kv_cache) * batch.attention.max_seq_len

        monkeypatch.setattr(Decoder, "forward", forward)
        assert self.differs(build(tmp_path))

    def test_partials_are_shared_with_a_graph_that_has_fewer(self, tmp_path: Path) -> None:
        """Captured smallest first: the larger graphs would write beyond the smallest one's partials."""
        house = build(tmp_path)
        house.graphs.sizes = SIZES[::-1]
        assert "partials" in (house.graphs.capture() or "")


def _packed_once(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`pack` with the counts of the first call, for each capacity."""
    counts: dict[PlanCapacity, torch.Tensor] = {}

    def packed_once(plan: AttentionPlan, capacity: PlanCapacity, *, pinned: bool) -> torch.Tensor:
        packed = plain(plan, capacity, pinned=pinned)
        packed[:4] = counts.setdefault(capacity, packed[:4].clone())
        return packed

    return packed_once


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
