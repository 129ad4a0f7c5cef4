"""The engine over a recorded scheduler: a file on a failed step and on its death, bytes on demand."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from random import Random

import pytest
from support.scripted import ScriptedModel, recording_logger

from pageturner.policies import registry
from pageturner.policies.views import Rates
from pageturner.service.core.clock import ManualClock, MonotonicClock
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.engine.api import EngineHealth, GenerationRequest, ModelInfo, ServerInfo
from pageturner.service.engine.async_engine import AsyncEngine
from pageturner.service.engine.engine import Engine
from pageturner.service.engine.metrics import Metrics
from pageturner.service.engine.options import EngineOptions
from pageturner.service.engine.step_computation import DirectSteps
from pageturner.service.engine.text_output import TextOutput
from pageturner.service.engine.thread_messages import Submit
from pageturner.service.errors import EngineDead, NotRecorded
from pageturner.service.flight import flight_file
from pageturner.service.flight.dumps import MAX_DUMPS, MAX_REST_SECONDS, REST, FlightDumps
from pageturner.service.flight.recorder import FlightRecorder
from pageturner.service.flight.records import Expired, Failed, FlightRecord, Setting
from pageturner.service.flight.replay import replay

OPTIONS = SchedulerOptions(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16)
CACHE = CacheOptions(num_blocks=16, block_size=4, num_host_blocks=4)


SETTING = Setting("test", OPTIONS, CACHE, Rates(), depth=0)


class Bench:
    """A recorded scheduler and the engine over it, with a scripted model."""

    def __init__(self, directory: Path, options: EngineOptions | None = None) -> None:
        self.scheduler = Scheduler(OPTIONS, CACHE, registry.default_policies(), TextOutput(None), Rates())
        self.logger, self.entries = recording_logger()
        self.clock = ManualClock(1.0)
        self.num_records = 0
        self.seconds_a_file = 0.25
        self.is_begun = asyncio.Event()
        self.rests: list[float] = []
        self.recorder = FlightRecorder(self.scheduler, SETTING, 256)
        self.dumps = FlightDumps(
            self._record, directory, "flight-test", self.clock, self.logger, sleep=self._sleep
        )
        self.model = ScriptedModel()
        self.engine = Engine(
            self.scheduler,
            DirectSteps(self.model, self.model, self.model),
            clock=self.clock,
            options=options or EngineOptions(),
            metrics=Metrics(),
            logger=self.logger,
            on_fault=self.dumps.on_fault,
        )

    def _record(self, reason: str) -> FlightRecord:
        self.num_records += 1
        self.is_begun.set()
        self.clock.advance(self.seconds_a_file)
        return self.recorder.record(reason)

    async def _sleep(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.clock.advance(seconds)
        await asyncio.sleep(0)

    def submit(self, request_id: str) -> None:
        params = SamplingParams(max_tokens=4)
        self.engine.apply(Submit(NewRequest(request_id, (5, 6, 7), params, 0, self.clock.now())))


def records(directory: Path) -> list[FlightRecord]:
    return [flight_file.load(path.read_bytes()) for path in sorted(directory.iterdir())]


def test_a_failed_step_leaves_a_file_that_replays(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "flight")
    bench.submit("a")
    bench.engine.step()
    bench.model.fail_in["forward"] = RuntimeError("a prompt said so")
    bench.engine.step()
    bench.dumps.join()
    (record,) = records(tmp_path / "flight")
    assert record.reason == "a step failed of RuntimeError"
    assert isinstance(record.entries[-1], Failed)
    assert replay(record).difference is None
    assert "a prompt said so" not in "\n".join(flight_file.lines(record))


def test_steps_that_fail_in_a_row_leave_one_file_and_a_process_a_few(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for number in range(MAX_DUMPS + 2):
        bench.submit(f"request {number}")
        bench.submit(f"another {number}")
        bench.model.fail_in["forward"] = RuntimeError("again")
        bench.engine.step()
        bench.engine.step()
        bench.dumps.join()
        assert len(records(tmp_path)) == min(number + 1, MAX_DUMPS)
        bench.model.fail_in.clear()
        for _ in range(12):
            bench.engine.step()


def test_a_dump_to_an_unwritable_folder_is_logged_counted_and_fails_no_request(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    bench = Bench(in_the_way)
    bench.submit("a")
    bench.model.fail_in["forward"] = RuntimeError("once")
    bench.engine.step()
    bench.dumps.join()
    assert [entry["event"] for entry in bench.entries] == ["step_failed", "flight_record_lost"]
    assert bench.dumps.num_lost == 1


@pytest.mark.fault("N")
def test_a_file_that_a_full_disk_cut_is_removed_logged_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_bytes(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    bench = Bench(tmp_path)
    for number in range(2):
        bench.dumps.on_fault(f"fault {number}")
        bench.dumps.join()
    assert list(tmp_path.iterdir()) == []
    assert [entry["num_lost"] for entry in bench.entries] == [1, 2]
    assert "No space left" in bench.entries[0]["reason"]


@pytest.mark.fault("N")
def test_where_no_thread_can_be_started_the_dump_is_lost_and_the_engine_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    bench = Bench(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        bench.dumps.on_fault("a fault")
    assert [entry["event"] for entry in bench.entries] == ["flight_record_lost"]


@pytest.mark.fault("R")
async def test_callers_at_once_share_one_file_and_one_is_made_at_a_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    contents = await asyncio.gather(*(bench.dumps.content() for _ in range(8)))
    assert bench.num_records == 1
    assert len(set(map(id, contents))) == 1
    assert flight_file.load(contents[0]).reason == "asked for"


@pytest.mark.fault("R")
async def test_callers_in_a_loop_have_files_made_a_tenth_of_the_time_at_most(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def loop() -> None:
        for _ in range(4):
            await bench.dumps.content()

    began = bench.clock.now()
    await asyncio.gather(*(loop() for _ in range(8)))
    seconds_at_work = bench.num_records * bench.seconds_a_file
    assert bench.num_records <= 5, "32 answers are of four files, or of five where callers drift apart"
    rest = REST * bench.seconds_a_file
    assert bench.rests == [0.0, *[rest] * (bench.num_records - 1)]
    assert seconds_at_work <= (bench.clock.now() - began + rest) / (1 + REST)


@pytest.mark.fault("R")
async def test_the_rest_after_a_file_that_took_long_is_bounded(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.seconds_a_file = 60.0
    await bench.dumps.content()
    await bench.dumps.content()
    assert bench.rests == [0.0, MAX_REST_SECONDS]


@pytest.mark.fault("R")
async def test_a_file_shows_what_happened_before_it_was_asked_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    early = asyncio.create_task(bench.dumps.content())
    await bench.is_begun.wait()
    bench.submit("late")  # after the first file was begun
    content = await bench.dumps.content()
    assert flight_file.load(await early).entries == ()
    assert len(flight_file.load(content).entries) == 1
    assert bench.num_records == 2


@pytest.mark.fault("R")
async def test_a_caller_that_goes_away_takes_the_file_from_no_other(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first, second = (asyncio.create_task(bench.dumps.content()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert flight_file.load(await second).reason == "asked for"
    assert first.cancelled()


@pytest.mark.fault("R")
def test_making_a_file_lets_go_of_the_interpreter_after_every_few_lines() -> None:
    record = FlightRecord("test", SETTING, None, 0, tuple(Expired(float(i)) for i in range(1000)))
    pauses: list[None] = []
    content = flight_file.dump(record, lambda: pauses.append(None))
    assert len(pauses) >= 1000 // flight_file.LINES_A_PAUSE
    assert flight_file.load(content) == record


MODEL = ModelInfo(
    name="scripted",
    source="nowhere",
    architecture="none",
    backend="fake",
    dtype="float32",
    deterministic=True,
    vocab_size=100,
    max_model_len=64,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    num_parameters=1,
    eos_token_ids=(),
    has_chat_template=False,
)
SERVER = ServerInfo("test", 0.0, 0.0, 4, 16, 4, 1, 4, 16, "none", Rates(), {})


def async_engine(bench: Bench, flight: FlightDumps | None) -> AsyncEngine:
    return AsyncEngine(
        bench.engine,
        None,
        model=MODEL,
        server_info=SERVER,
        scheduler_options=SchedulerOptions(max_n=4),
        options=EngineOptions(),
        clock=MonotonicClock(),
        random=Random(0),
        logger=bench.logger,
        flight=flight,
    )


async def ask(engine: AsyncEngine) -> None:
    async for _ in await engine.submit(GenerationRequest((5, 6, 7), SamplingParams(max_tokens=4))):
        pass


def test_the_death_of_the_engine_leaves_a_file(tmp_path: Path) -> None:
    bench = Bench(tmp_path, EngineOptions(max_consecutive_failures=1))
    bench.model.fail_in["apply"] = RuntimeError("for ever")

    async def scene() -> None:
        engine = async_engine(bench, bench.dumps)
        await engine.start()
        ends = await asyncio.gather(*(ask(engine) for _ in range(4)), return_exceptions=True)
        assert any(isinstance(end, EngineDead) for end in ends)
        assert engine.health is EngineHealth.DEAD
        content = await engine.flight_record()
        assert flight_file.load(content).reason == "asked for"
        await engine.aclose()

    asyncio.run(scene())
    bench.dumps.join()
    reasons = [record.reason for record in records(tmp_path)]
    assert reasons[-1] == "the engine died of EngineDead"
    assert all(replay(record).difference is None for record in records(tmp_path))


def test_an_engine_that_records_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotRecorded, match="flight_recorder_steps"):
        asyncio.run(async_engine(Bench(tmp_path), None).flight_record())
