"""A recording holds what was asked and how long steps took, tells what prompts share, and no text."""

from __future__ import annotations

import io
import json
from typing import Any

import structlog
from structlog.testing import capture_logs

from pageturner.policies import registry
from pageturner.policies.views import Rates
from pageturner.service.core.clock import ManualClock
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.outputs import SampledSequence, SampledToken, SchedulerOutput
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.errors import RequestAborted
from pageturner.service.flight.recording import RecordedEngine, Recorder, RecordingScheduler
from pageturner.service.simulator.simulation import NullStopCondition

ENGINE = RecordedEngine(
    "toy", CacheOptions(num_blocks=32, block_size=4), SchedulerOptions(max_model_len=64), 4096, Rates()
)


class Recording:
    """A scheduler that records, on a clock of its own; a step takes a second, the loop a quarter more."""

    def __init__(self, key: bytes = b"key", file: io.StringIO | None = None) -> None:
        self.file = io.StringIO() if file is None else file
        self.clock = ManualClock(100.0)
        recorder = Recorder(self.file, ENGINE, key, structlog.get_logger())
        self.scheduler = RecordingScheduler(
            ENGINE.scheduler,
            ENGINE.cache,
            registry.default_policies(),
            NullStopCondition(),
            Rates(),
            recorder=recorder,
            clock=self.clock,
        )

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
    recording.clock.advance(50.0)  # a rest is nobody's
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


class FullDisk(io.StringIO):
    is_full = False

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError("no space left")
        return super().write(text)


def test_a_full_disk_ends_the_recording_and_nothing_else() -> None:
    disk = FullDisk()
    recording = Recording(file=disk)
    recording.add("one", 1, 2, 3)
    disk.is_full = True
    with capture_logs() as logs:
        recording.step()
        recording.step()
    assert not recording.scheduler.has_work()
    assert [log["event"] for log in logs] == ["recording_ended"]
