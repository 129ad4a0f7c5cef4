"""The commands: what they print, write and refuse; no server, no model."""

from __future__ import annotations

import json
import re
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from pageturner.loadtest.traces.lines import OnBytes, TraceLines, open_lines
from pageturner.service.cli import main
from pageturner.service.simulator.contenders import parse_policies
from pageturner.service.simulator.experiment import run_experiment
from pageturner.service.simulator.machine import load_machine, shipped_machines
from pageturner.service.simulator.recordings import fit_machine
from pageturner.service.simulator.step_time import StepTimeModel
from pageturner.service.simulator.synthetic import parse_recipe

SMALL = ["simulate", "--workload=mixed:requests=20,longest=2000", "--seeds=2"]


def test_simulate_prints_a_table_and_paired_differences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--sweep=cache.num_blocks=300,3000"]) == 0
    printed = capsys.readouterr().out
    for words in ("TTFT p99", "KV occupancy", "paired by seed"):
        assert words in printed


def test_sets_that_were_never_asked_are_told_apart_by_a_smaller_pool(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where no request was preempted, victim policies can't differ, and the report says how they would."""
    sets = ["--policies=", "--policies=victim=last-arrived"]
    assert main([*SMALL, *sets]) == 0
    assert "--sweep cache.num_blocks=N" in " ".join(capsys.readouterr().out.split())
    assert main([*SMALL, *sets, "--sweep=cache.num_blocks=150", "--concurrency=16"]) == 0
    printed = capsys.readouterr().out
    assert "by recompute" in printed
    assert "was preempted" not in printed


def test_simulate_finds_a_policy_in_the_folder_that_it_is_called_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["policies", "new", "victim", "HereForSimulation"]) == 0
    assert main([*SMALL, "--policies=victim=here_for_simulation:HereForSimulation"]) == 0
    assert "TTFT p99" in capsys.readouterr().out


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


@pytest.mark.fault("L")
def test_a_picture_shows_each_whole_name_and_its_legend_covers_no_curve() -> None:
    """Every name is within the picture, and the legend lies outside the axes."""
    pytest.importorskip("matplotlib")
    from pageturner.service.simulator.plots import draw_figure, pictures

    base = "preset=vllm-v1;victim=least-computed;reclaim=always-swap;admission="
    setups = [parse_policies(f"{base}{name}") for name in ("first-chunk", "full-prompt")]
    recipe = parse_recipe("mixed:requests=8,longest=500")[1]
    outcomes = run_experiment(
        [setup.on(load_machine("h100-8b")) for setup in setups],
        {seed: recipe.make("w", seed) for seed in (0, 1)},
    )
    for title, draw in pictures(outcomes):
        figure = draw_figure(draw, title, outcomes)
        figure.draw_without_rendering()
        (axes,) = figure.axes
        whole = figure.bbox
        names = ["".join(label.get_text().split("\n")) for label in axes.get_yticklabels()]
        for label in axes.get_yticklabels():
            box = label.get_window_extent()
            assert whole.x0 <= box.x0
            assert box.x1 <= axes.bbox.x0
        for legend in figure.legends:
            assert legend.get_window_extent().y1 <= axes.bbox.y0
            names += ["".join(text.get_text().split("\n")) for text in legend.get_texts()]
        assert axes.get_legend() is None
        assert {setup.name for setup in setups} <= set(names)


FLEET = ["simulate", "--workload=chat:requests=12,rate=30,turns=2,output=20", "--seeds=2", "--replicas=3"]


def test_several_servers_are_compared_by_their_routing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "plots"
    words = ["--routing=prefix-aware,session", "--servers=coarse", f"--plot={folder}", "--json"]
    assert main([*FLEET, *words]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["setting"]["num_replicas"] == 3
    names = [contender["name"] for contender in document["contenders"]]
    assert names == ["routing=prefix-aware", "routing=session"]
    assert all(run["imbalance"] >= 1 for each in document["contenders"] for run in each["runs"])
    pictures = {path.stem for path in folder.glob("*.png")}
    assert {"ttft", "hits", "imbalance"} <= pictures
    assert not {"occupancy", "preemptions"} & pictures, "of which a fleet has no figures"


def test_routing_is_an_axis_that_sets_and_sweeps_may_change(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--policies=a: routing=session;victim=last-arrived", "--sweep=routing.order=1,2", "--json"]
    assert main([*FLEET, *words, "--sweep=fleet.num_routers=2", "--report-interval=0.5"]) == 0
    document = json.loads(capsys.readouterr().out)
    names = [contender["name"] for contender in document["contenders"]]
    assert names == [f"a;routing.order={order};fleet.num_routers=2" for order in (1, 2)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--routing=session"], "--routing: needs --replicas N"),
        (["--routers=2"], "--routers: needs --replicas N"),
        (["--servers=coarse"], "--servers: needs --replicas N"),
        (["--policies=routing=session"], "routing: is of several servers: say how many with --replicas N"),
        (["--sweep=fleet.num_routers=2"], "is of several servers"),
        (["--replicas=0"], "--replicas: 0 is below 1"),
        (["--replicas=2", "--report-interval=-1"], "report_seconds must be finite and at least 0"),
        (["--replicas=2", "--routing=sesion"], "did you mean 'session'"),
        (["--replicas=2", "--sweep=fleet.num_routers=0"], "num_routers must be at least 1"),
        (["--replicas=9", "--policies=victim=last-arrived"], "coarse servers run the defaults only"),
    ],
)
def test_what_is_wrong_with_several_servers_is_named(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.fault("L")
def test_sets_carry_the_names_they_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--policies=base:", "--policies=late comer: victim=last-arrived", "--json"]
    assert main([*SMALL, *words]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [contender["name"] for contender in document["contenders"]] == ["base", "late comer"]


@pytest.mark.fault("L")
def test_two_sets_of_one_name_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--policies=a: victim=last-arrived", "--policies=a: queue=priority"]) == 2
    assert "two sets are called 'a'" in capsys.readouterr().err


@pytest.mark.fault("L")
def test_a_long_name_heads_its_column_by_number(capsys: pytest.CaptureFixture[str]) -> None:
    long = "victim=last-arrived;reclaim=always-recompute"
    assert main([*SMALL, "--policies=", f"--policies={long}", "--sweep=cache.num_blocks=300"]) == 0
    assert f"2: {long};cache.num_blocks=300" in capsys.readouterr().out


BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def burstgpt(folder: Path, num_requests: int) -> Path:
    rows = [f"{n},ChatGPT,{20 + n},{3 * (n > 0)},9,API log\n" for n in range(num_requests + 1)]
    path = folder / "burst.csv"
    path.write_text(BURSTGPT + "".join(rows))
    return path


@pytest.mark.fault("L")
def test_a_workload_that_is_the_same_for_every_seed_is_run_once_without_an_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", f"--workload={burstgpt(tmp_path, 4)}", "--seeds=2"]
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["setting"]["seeds"] == 1
    (contender,) = document["contenders"]
    assert len(contender["runs"]) == 1
    assert contender["metrics"]["ttft_p50"]["low"] is None
    assert "the workload is the same for every seed" in captured.err
    left_out = "burst.csv: 1 of 5 requests generated nothing and are left out"
    assert left_out in captured.err
    assert left_out in document["setting"]["workload_notes"]
    assert main([*words, "--sweep=cache.num_blocks=300,3000"]) == 0
    captured = capsys.readouterr()
    assert "one run of each set" in captured.out
    assert "±" not in captured.out


@pytest.mark.fault("L")
def test_windows_that_two_seeds_share_are_run_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace of four has two windows of three requests, whatever the number of seeds."""
    words = ["simulate", f"--workload={burstgpt(tmp_path, 4)}", "--limit=3", "--seeds=8", "--json"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["setting"]["seeds"] == 2
    assert "8 seeds make 2 different workloads" in captured.err


@pytest.mark.fault("46")
def test_a_trace_is_read_once_for_all_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[Path] = []

    def counted(path: Path, on_bytes: OnBytes) -> AbstractContextManager[TraceLines]:
        opened.append(path)
        return open_lines(path, on_bytes)

    monkeypatch.setattr("pageturner.loadtest.traces.reader.open_lines", counted)
    path = burstgpt(tmp_path, 1000)
    assert main(["simulate", f"--workload={path}", "--limit=5", "--seeds=5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["setting"]["seeds"] == 5
    assert opened == [path]


def test_a_limit_of_a_recipe_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--workload=chat", "--limit=5"]) == 2
    assert "a recipe has requests=5 for it" in capsys.readouterr().err


@pytest.mark.fault("L")
@pytest.mark.parametrize(
    "words",
    [["simulate", "--plot={}/x"], ["study", "--out={}/x"], ["calibrate", "--out={}/x"]],
    ids=["simulate", "study", "calibrate"],
)
def test_results_that_could_not_be_written_are_refused_before_the_work(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "file"
    taken.write_text("mine")
    assert main([word.format(taken) for word in words]) == 2
    captured = capsys.readouterr()
    assert "Not a directory" in captured.err
    assert captured.err.count("\n") == 1
    assert taken.read_text() == "mine"


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
        (["--speed=nan"], "--speed"),
        (["--slo-ttft=-1"], "--slo-ttft"),
        (["--slo-tpot=inf"], "--slo-tpot"),
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


@pytest.mark.fault("11")
def test_a_recording_with_blank_lines_and_a_cut_last_line_is_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recording(tmp_path)
    lines = path.read_text().splitlines()
    path.write_text("\n\n".join(lines)[:-20])
    assert main(["calibrate", f"--recording={path}"]) == 0
    captured = capsys.readouterr()
    assert "relative error over 3 steps" in captured.out
    assert "line 11 was cut off and is left out" in captured.err
    assert main(["simulate", f"--workload={path}", "--seeds=1"]) == 0
    assert "line 11 was cut off and is left out" in capsys.readouterr().err


@pytest.mark.fault("L")
@pytest.mark.parametrize(
    ("line", "place"),
    [
        ('{"step": [1, "x"], "seconds": 1}', "line 7, step: [1, 'x'] is not a list of counts"),
        ('{"step": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1], "seconds": 1}', "line 7, step: "),
        ('{"step": [1, 1], "seconds": "x"}', "line 7, seconds: 'x' is not a number"),
        ('{"step": [1, 1]', "line 7, column 16: "),
    ],
)
def test_an_error_in_a_recording_names_file_line_and_field(
    line: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recording(tmp_path)
    path.write_text(f"{path.read_text()}\n{line}\n")
    assert main(["calibrate", f"--recording={path}"]) == 2
    assert f"{path}, {place}" in capsys.readouterr().err


@pytest.mark.fault("L")
def test_a_fit_that_is_far_off_comes_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recording(tmp_path)
    steps = [{"step": [1, 1, 4, 1, 0, 0, 0, 0, 0], "seconds": 0.01 * (1 + n % 3)} for n in range(12)]
    path.write_text(path.read_text() + "\n" + "\n".join(map(json.dumps, steps)) + "\n")
    assert main(["calibrate", f"--recording={path}", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["error"]["mean"] > 0.1
    assert "off by" in document["warnings"][0]
    assert f"warning: {document['warnings'][0]}" in captured.err


def swapping(folder: Path, **header: object) -> Path:
    """A recording in which swapping steps were, by chance, shorter than others."""
    path = recording(folder)
    first, *rest = path.read_text().splitlines()
    steps = [
        {"step": [1, 1, 8, 1, 0, 0, swapped, swapped, 0], "seconds": 0.018 - 0.001 * bool(swapped)}
        for swapped in (0, 3) * 10
    ]
    lines = [json.loads(first) | header, *map(json.loads, rest), *steps]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


@pytest.mark.fault("L")
def test_swaps_cost_what_the_engine_measured(tmp_path: Path) -> None:
    rates = {"swap_out_bytes_per_second": 1e6, "swap_in_bytes_per_second": 2e6}
    found = fit_machine(swapping(tmp_path, rates=rates))
    assert found.machine.step_time.a_swap_out == pytest.approx(1024 / 1e6)
    assert found.machine.step_time.a_swap_in == pytest.approx(1024 / 2e6)
    assert found.machine.step_time.a_token == pytest.approx(1e-3, rel=0.2)
    assert "swap out and a swap in: as the engine measured" in found.notes[0]


@pytest.mark.fault("L")
def test_swaps_without_any_price_come_with_a_warning(tmp_path: Path) -> None:
    (warning,) = fit_machine(swapping(tmp_path)).warnings
    assert "a swap out and a swap in costs nothing here" in warning


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
