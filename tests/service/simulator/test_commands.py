"""The commands: what they print, write and refuse; no server, no model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pageturner.service.cli import main
from pageturner.service.simulator.machine import load_machine, shipped_machines
from pageturner.service.simulator.step_time import StepTimeModel

SMALL = ["simulate", "--workload=mixed:requests=20,longest=2000", "--seeds=2"]


def test_simulate_prints_a_table_and_paired_differences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--sweep=cache.num_blocks=300,3000"]) == 0
    printed = capsys.readouterr().out
    for words in ("TTFT p99", "KV occupancy", "paired by seed"):
        assert words in printed


def test_simulate_writes_pictures_and_a_page_that_needs_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "plots"
    assert main([*SMALL, "--policies=", "--policies=victim=last-arrived", f"--plot={folder}", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [contender["name"] for contender in document["contenders"]] == ["defaults", "victim=last-arrived"]
    pictures = sorted(path.name for path in folder.glob("*.png"))
    assert {"ttft.png", "occupancy.png", "preemptions.png"} <= set(pictures)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png"))
    page = (folder / "page.html").read_text()
    assert page.count("data:image/png;base64,") == len(pictures)
    assert not re.search(r'(src|href)="(?!data:)|@import|<script', page)


def test_a_trace_is_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
    assert main(["simulate", f"--workload={path}", "--seeds=1", "--json"]) == 0
    (contender,) = json.loads(capsys.readouterr().out)["contenders"]
    assert contender["metrics"]["failed"]["mean"] == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--workload=nothing"], "no workload 'nothing'"),
        (["--workload=mixed:color=red"], "has no 'color'"),
        (["--workload=mixed:rate=fast"], "rate"),
        (["--workload=mixed:requests=0"], "requests must be at least 1"),
        (["--machine=none"], "shipped are"),
        (["--seeds=0"], "--seeds"),
        (["--speed=0"], "--speed"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_a_line(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words]) == 2
    message = capsys.readouterr().err
    assert reason in message
    assert "Traceback" not in message


def recording(folder: Path) -> Path:
    """Of a service that takes 10 ms a step and 1 ms a token."""
    header = {
        "pageturner_recording": 1,
        "name": "toy",
        "block_size": 16,
        "block_bytes": 1024,
        "cache": {"num_blocks": 100},
        "scheduler": {"max_model_len": 512},
    }
    asked = {"timestamp": 0, "input_length": 40, "output_length": 3, "hash_ids": [1 << 62, 7], "tenant": "a"}
    steps = [{"step": [1, 1, n, 1, 0, 0, 0, 0, 0], "seconds": 0.01 + 0.001 * n} for n in (1, 2, 40, 64)]
    path = folder / "recording.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in (header, asked, *steps)))
    return path


def test_calibrate_fits_a_recording_and_simulate_runs_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = recording(tmp_path), tmp_path / "machine.json"
    assert main(["calibrate", f"--recording={path}", f"--out={out}"]) == 0
    assert "relative error over 4 steps" in capsys.readouterr().out
    machine = load_machine(str(out))
    assert machine.name == "toy"
    assert machine.step_time.a_token == pytest.approx(1e-3, rel=1e-3)
    assert main(["simulate", f"--workload={path}", f"--machine={out}", "--seeds=1", "--json"]) == 0
    (contender,) = json.loads(capsys.readouterr().out)["contenders"]
    # 40 tokens, then one at a time.
    assert contender["metrics"]["seconds"]["mean"] == pytest.approx(0.05 + 2 * 0.011, rel=1e-3)


def test_calibrate_refuses_what_is_no_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty"
    path.write_text("{}\n")
    assert main(["calibrate", f"--recording={path}"]) == 2
    assert "no header or no steps" in capsys.readouterr().err


def test_shipped_machines_load_and_say_where_they_come_from() -> None:
    assert "h100-8b" in shipped_machines()
    for name in shipped_machines():
        machine = load_machine(name)
        assert machine.name == name
        assert machine.derivation
        assert machine.step_time != StepTimeModel(0.0)


def test_bench_simulator_counts_what_was_scheduled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pageturner.service.bench import simulator
    from pageturner.service.simulator.synthetic import Synthetic

    tiny = Synthetic(requests=4, concurrency=4, prompt=8, prompt_sigma=0, output=5, output_sigma=0)
    monkeypatch.setattr(simulator, "MIXES", {"tiny": tiny})
    assert main(["bench", "simulator", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["num_scheduled_tokens"] == 4 * (8 + 5 - 1)
