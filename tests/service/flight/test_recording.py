"""A recording holds what was asked and how long steps took, tells what prompts share, and no text."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from pageturner.policies import registry
from pageturner.policies.views import Rates
from pageturner.service.core.clock import ManualClock
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.outputs import SampledSequence, SampledToken, SchedulerOutput
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.errors import RequestAborted
from pageturner.service.flight import recording as recording_module
from pageturner.service.flight.recorder import FlightRecorder
from pageturner.service.flight.recording import LineFile, RecordedEngine, WorkloadRecorder
from pageturner.service.flight.records import Setting
from pageturner.service.simulator.null_model import NullStopCondition

ENGINE = RecordedEngine(
    "toy", CacheOptions(num_blocks=32, block_size=4), SchedulerOptions(max_model_len=64), 4096, Rates()
)


class Recording:
    """A scheduler that records, on a clock of its own; a step takes a second, the loop a quarter more."""

    def __init__(
        self, key: bytes = b"key", file: io.StringIO | None = None, *, caches_prefixes: bool = True
    ) -> None:
        self.file = io.StringIO() if file is None else file
        self.line_file = LineFile(self.file, structlog.get_logger())
        self.clock = ManualClock(100.0)
        self.scheduler = Scheduler(
            ENGINE.scheduler,
            replace(ENGINE.cache, enable_prefix_caching=caches_prefixes),
            registry.default_policies(),
            NullStopCondition(),
            Rates(),
            hash_key=key,
        )
        WorkloadRecorder(self.scheduler, self.line_file, ENGINE, key, self.clock)

    def add(self, name: str, *prompt: int, output_tokens: int = 2, **fields: Any) -> None:
        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        self.scheduler.add_request(NewRequest(name, prompt, params, 0, self.clock.now(), **fields))

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule(self.clock.now())
        self.clock.advance(1.0)
        rows = [row for part in output.scheduled for row in part.samples]
        sampled = tuple(SampledSequence(row.seq_id, row.epoch, (SampledToken(5),)) for row in rows)
        self.scheduler.update(output, sampled, self.clock.now())
        self.clock.advance(0.25)
        return output

    def lines(self, key: str) -> list[dict[str, Any]]:
        self.line_file.flush()
        return [line for line in map(json.loads, self.file.getvalue().splitlines()) if key in line]


def test_the_first_line_describes_the_engine() -> None:
    (header,) = Recording().lines("pageturner_recording")
    assert (header["name"], header["block_size"], header["block_bytes"]) == ("toy", 4, 4096)
    assert CacheOptions(**header["cache"]) == ENGINE.cache
    assert SchedulerOptions(**header["scheduler"]) == ENGINE.scheduler


def test_a_request_is_written_when_it_ends() -> None:
    recording = Recording()
    recording.add("one", *range(9), tenant="alice", priority=3, deadline=130.0)
    recording.clock.advance(0.5)
    recording.add("two", *range(8), 77)
    recording.step()
    assert recording.lines("input_length") == []
    recording.step()  # two has waited for the blocks that one computed
    recording.step()
    one, two = recording.lines("input_length")
    assert (one["timestamp"], one["input_length"], one["output_length"]) == (0, 9, 2)
    assert (one["tenant"], one["priority"], one["deadline_seconds"], one["outcome"]) == (
        "alice",
        3,
        30.0,
        "ok",
    )
    assert two["timestamp"] == 500
    assert two["hash_ids"] == one["hash_ids"]
    assert len(one["hash_ids"]) == 2  # full blocks only


def test_an_aborted_request_counts_as_far_as_it_came() -> None:
    recording = Recording()
    recording.add("one", 1, 2, 3, output_tokens=9)
    recording.add("never ran", 1, 2, 3)
    recording.step()
    recording.scheduler.abort_request("one", RequestAborted("enough"))
    recording.scheduler.abort_request("one", RequestAborted("again"))
    (line,) = recording.lines("input_length")
    assert (line["output_length"], line["max_tokens"], line["outcome"]) == (1, 9, "RequestAborted")


def test_a_step_that_follows_another_owns_the_time_between() -> None:
    recording = Recording()
    recording.add("one", 1, 2, 3)
    recording.step()
    recording.step()
    recording.clock.advance(50.0)  # a rest counts for no step
    recording.add("two", 4, 5, 6, output_tokens=1)
    recording.step()
    assert [line["seconds"] for line in recording.lines("step")] == [1.0, 1.25, 1.0]
    assert [line["step"][:4] for line in recording.lines("step")] == [
        [1, 1, 3, 1],
        [1, 1, 1, 1],
        [1, 1, 3, 1],
    ]


def test_digests_say_nothing_under_another_key_and_tokens_are_not_written() -> None:
    ids = []
    for key in (b"one", b"other"):
        recording = Recording(key)
        recording.add("request", 31337, 31338, 31339, 31340, output_tokens=1)
        recording.step()
        ids.append(recording.lines("input_length")[0]["hash_ids"])
        assert "31337" not in recording.file.getvalue().replace(str(ids[-1][0]), "")
    assert ids[0] != ids[1]


def test_prompts_that_may_not_share_do_not_seem_to() -> None:
    recording = Recording()
    for salt in ("", "tenant's own"):
        recording.add(f"salted {salt}", 1, 2, 3, 4, output_tokens=1, cache_salt=salt)
    recording.step()
    one, two = recording.lines("input_length")
    assert one["hash_ids"] != two["hash_ids"]


@pytest.mark.parametrize("caches_prefixes", [True, False])
def test_equal_prompts_have_equal_hash_ids_whether_or_not_prefixes_are_cached(caches_prefixes: bool) -> None:
    recording = Recording(caches_prefixes=caches_prefixes)
    for name, last in (("one", 8), ("two", 8), ("three", 9)):
        recording.add(name, 1, 2, 3, 4, 5, 6, 7, last, output_tokens=1)
    while recording.scheduler.has_work():
        recording.step()
    ids = {tuple(line["hash_ids"]) for line in recording.lines("input_length")}
    assert len(ids) == 2
    assert len({first for first, _ in ids}) == 1


def test_a_block_is_hashed_once_for_the_scheduler_and_its_listeners() -> None:
    recording = Recording()
    setting = Setting("test", ENGINE.scheduler, ENGINE.cache, Rates(), depth=0)
    FlightRecorder(recording.scheduler, setting, 256)
    hasher = recording.scheduler.manager.hasher
    assert hasher is not None
    hashed: list[tuple[int, ...]] = []
    extend = hasher.extend

    def counted(parent: bytes, token_ids: Sequence[int]) -> bytes:
        hashed.append(tuple(token_ids))
        return extend(parent, token_ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hasher, "extend", counted)
        recording.add("one", *range(20), output_tokens=2)
        recording.step()
        recording.step()
        (line,) = recording.lines("input_length")
    assert len(line["hash_ids"]) == 5
    assert len(hashed) == len(set(hashed)) == 5


class FullDisk(io.StringIO):
    is_full = False

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError("no space left")
        return super().write(text)


@pytest.mark.fault("N")
def test_a_full_disk_ends_the_recording_in_one_log_line_and_its_lines_are_counted() -> None:
    disk = FullDisk()
    recording = Recording(file=disk)
    recording.add("one", 1, 2, 3)
    recording.line_file.flush()
    disk.is_full = True
    with capture_logs() as logs:
        recording.step()
        recording.line_file.flush()
        recording.step()
        recording.line_file.close()
    assert not recording.scheduler.has_work()
    assert [log["event"] for log in logs] == ["recording_ended", "recording_incomplete"]
    assert logs[1]["num_lines_dropped"] == 2  # a step and the request; the line that failed was logged


@pytest.mark.fault("N")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_recording_to_dev_full_is_one_log_line_and_closes_without_an_error() -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as file, capture_logs() as logs:
        line_file = LineFile(file, structlog.get_logger())
        line_file.write({"a": 1})
        line_file.flush()
        line_file.close()
        line_file.close()
    assert [log["event"] for log in logs] == ["recording_ended"]


class StuckDisk(io.StringIO):
    """Takes nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def write(self, text: str) -> int:
        self.let_go.wait()
        return super().write(text)


@pytest.mark.fault("N")
def test_a_disk_that_takes_nothing_delays_no_step_and_lines_beyond_the_bound_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recording_module, "MAX_LINES_WAITING", 3)
    disk = StuckDisk()
    with capture_logs() as logs:
        recording = Recording(file=disk)
        recording.add("one", 1, 2, 3, output_tokens=20)
        for _ in range(20):
            recording.step()
        assert not recording.scheduler.has_work()
        assert recording.line_file.num_dropped >= 16
        disk.let_go.set()
        recording.line_file.flush()
        recording.line_file.close()
    assert [log["event"] for log in logs] == ["recording_incomplete"]
