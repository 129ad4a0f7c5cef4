"""The engine over a recorded scheduler: a file on a failed step and on its death, bytes on demand."""

from __future__ import annotations

import asyncio
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
from pageturner.service.engine.commands import Submit
from pageturner.service.engine.engine import Engine
from pageturner.service.engine.options import EngineOptions
from pageturner.service.engine.text_output import TextOutput
from pageturner.service.errors import EngineDead, NotRecorded
from pageturner.service.flight import flight_file
from pageturner.service.flight.flight_dumps import MAX_DUMPS, FlightDumps
from pageturner.service.flight.recorded_scheduler import RecordedScheduler, recorded_scheduler
from pageturner.service.flight.records import Failed, FlightRecord, Setting
from pageturner.service.flight.replay import replay
from pageturner.service.metrics import Metrics

OPTIONS = SchedulerOptions(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16)
CACHE = CacheOptions(num_blocks=16, block_size=4, num_host_blocks=4)


class House:
    """A recorded scheduler and the engine over it, with a scripted model."""

    def __init__(self, directory: Path, options: EngineOptions | None = None) -> None:
        scheduler = Scheduler(OPTIONS, CACHE, registry.default_policies(), TextOutput(None), Rates())
        setting = Setting("test", OPTIONS, CACHE, Rates(), depth=0)
        self.scheduler: RecordedScheduler = recorded_scheduler(
            scheduler, setting, name_key=b"names", num_steps=256
        )
        self.logger, self.entries = recording_logger()
        self.dumps = FlightDumps(self.scheduler.recorder, directory, "flight-test", self.logger)
        self.model = ScriptedModel()
        self.clock = ManualClock(1.0)
        self.engine = Engine(
            self.scheduler,
            self.model,
            self.model,
            self.model,
            clock=self.clock,
            options=options or EngineOptions(),
            metrics=Metrics(),
            logger=self.logger,
            on_fault=self.dumps.on_fault,
        )

    def submit(self, request_id: str) -> None:
        params = SamplingParams(max_tokens=4)
        self.engine.apply(Submit(NewRequest(request_id, (5, 6, 7), params, 0, self.clock.now())))


def records(directory: Path) -> list[FlightRecord]:
    return [flight_file.load(path.read_bytes()) for path in sorted(directory.iterdir())]


def test_a_failed_step_leaves_a_file_that_replays(tmp_path: Path) -> None:
    house = House(tmp_path / "flight")
    house.submit("a")
    house.engine.step()
    house.model.fail_in["forward"] = RuntimeError("a prompt said so")
    house.engine.step()
    house.dumps.join()
    (record,) = records(tmp_path / "flight")
    assert record.reason == "a step failed of RuntimeError"
    assert isinstance(record.entries[-1], Failed)
    assert replay(record).difference is None
    assert "a prompt said so" not in "\n".join(flight_file.lines(record))


def test_steps_that_fail_in_a_row_leave_one_file_and_a_process_a_few(tmp_path: Path) -> None:
    house = House(tmp_path)
    for number in range(MAX_DUMPS + 2):
        house.submit(f"request {number}")
        house.submit(f"another {number}")
        house.model.fail_in["forward"] = RuntimeError("again")
        house.engine.step()
        house.engine.step()
        house.dumps.join()
        assert len(records(tmp_path)) == min(number + 1, MAX_DUMPS)
        house.model.fail_in.clear()
        for _ in range(12):
            house.engine.step()


def test_a_disk_that_takes_nothing_is_logged_and_harms_nobody(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    house = House(in_the_way)
    house.submit("a")
    house.model.fail_in["forward"] = RuntimeError("once")
    house.engine.step()
    house.dumps.join()
    assert [entry["event"] for entry in house.entries] == ["step_failed", "flight_record_lost"]


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


def async_engine(house: House, flight: FlightDumps | None) -> AsyncEngine:
    return AsyncEngine(
        house.engine,
        None,
        model=MODEL,
        server_info=SERVER,
        scheduler_options=SchedulerOptions(max_n=4),
        options=EngineOptions(),
        clock=MonotonicClock(),
        random=Random(0),
        logger=house.logger,
        flight=flight,
    )


async def ask(engine: AsyncEngine) -> None:
    async for _ in await engine.submit(GenerationRequest((5, 6, 7), SamplingParams(max_tokens=4))):
        pass


def test_the_death_of_the_engine_leaves_a_file(tmp_path: Path) -> None:
    house = House(tmp_path, EngineOptions(max_consecutive_failures=1))
    house.model.fail_in["apply"] = RuntimeError("for ever")

    async def scene() -> None:
        engine = async_engine(house, house.dumps)
        await engine.start()
        ends = await asyncio.gather(*(ask(engine) for _ in range(4)), return_exceptions=True)
        assert any(isinstance(end, EngineDead) for end in ends)
        assert engine.health is EngineHealth.DEAD
        content = await engine.flight_record()
        assert flight_file.load(content).reason == "asked for"
        await engine.aclose()

    asyncio.run(scene())
    house.dumps.join()
    reasons = [record.reason for record in records(tmp_path)]
    assert reasons[-1] == "the engine died of EngineDead"
    assert all(replay(record).difference is None for record in records(tmp_path))


def test_an_engine_that_records_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotRecorded, match="flight_recorder_steps"):
        asyncio.run(async_engine(House(tmp_path), None).flight_record())
