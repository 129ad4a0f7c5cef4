"""`pageturner replay` and `explain` on files: what they print, and how they refuse."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.core_harness import CoreHarness
from support.flight import record_of, recorded

from pageturner.policies import registry
from pageturner.service.cli import main
from pageturner.service.client import DEFAULT_TARGET, Credentials
from pageturner.service.commands import explain, flight
from pageturner.service.flight import flight_file
from pageturner.service.flight.records import FlightRecord, Scheduled


def some_record(num_steps: int = 256) -> FlightRecord:
    scene = CoreHarness(registry.default_policies(), num_blocks=8, block_size=2)
    recorded(scene, num_steps)
    scene.submit((0, 1, 2), max_tokens=4)
    scene.run_to_end()
    return record_of(scene)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "flight.jsonl.gz"
    path.write_bytes(flight_file.dump(some_record()))
    return path


def test_a_replay_that_is_equal(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(file)]) == 0
    assert capsys.readouterr().out == "test, from the start of the engine: 4 steps replayed, all equal\n"


def test_a_replay_as_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["is_equal"], document["num_steps"], document["difference"]) == (True, 4, None)


def test_a_replay_of_plain_lines(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_bytes(gzip.decompress(file.read_bytes()))
    assert main(["replay", str(file)]) == 0
    assert "all equal" in capsys.readouterr().out


def test_a_replay_that_differs_shows_where(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = some_record()
    index = next(i for i, entry in enumerate(record.entries) if isinstance(entry, Scheduled))
    entry = record.entries[index]
    assert isinstance(entry, Scheduled)
    planted = replace(entry, decisions=entry.decisions[:1])
    entries = (*record.entries[:index], planted, *record.entries[index + 1 :])
    file.write_bytes(flight_file.dump(replace(record, entries=entries)))
    assert main(["replay", str(file)]) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == "test, from the start of the engine: entry 2, at step 1, differs:"
    assert second.startswith("  + Admitted(request_id='r0', by='guarded request'")
    assert last == "(- recorded, + replayed)"


def test_explain_prints_lines_and_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "r0", "--file", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].strip() == "4.000 s  finished: 4 output tokens, 1.000 s in the queue"
    assert main(["explain", "r0", "--file", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["lines"][-1] == {
        "seconds": 4.0,
        "text": "finished: 4 output tokens, 1.000 s in the queue",
        "count": 1,
    }


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["explain", "unknown", "--file", "{file}"], "no request 'unknown' in this record"),
        (["replay", "{file}.gone"], "No such file"),
        (["replay", __file__], "not a pageturner flight record"),
    ],
)
def test_a_user_error_is_one_line(
    words: list[str], complaint: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.replace("{file}", str(file)) for word in words]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("words", [["flight", "dump"], ["explain", "r0"]], ids=" ".join)
def test_without_a_target_this_machine_is_asked(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets: list[str] = []

    def fetch(target: str, _: Credentials) -> bytes:
        targets.append(target)
        return flight_file.dump(some_record())

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flight, "fetch", fetch)
    monkeypatch.setattr(explain, "fetch", fetch)
    assert main(words) == 0
    assert targets == [DEFAULT_TARGET]
