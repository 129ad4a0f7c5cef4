"""Medians and ratios of slices, as tables, JSON and a picture."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from support.peer_slices import slice_of

from pageturner.loadtest.errors import OptionError
from pageturner.loadtest.peers.cases import cases_of, demand_of
from pageturner.loadtest.peers.figures import figures, whole_turns
from pageturner.loadtest.peers.machine import Machine, processor_time, read_machine
from pageturner.loadtest.peers.report import table, to_json, write_plot

MACHINE = Machine("EPYC", 2, ("avx2",))


# In the third round the machine was ten times as slow for both.
SLICES = [
    slice_of(engine, number, seconds * slowness)
    for number, slowness in ((1, 1.0), (2, 1.1), (3, 10.0))
    for engine, seconds in (("theirs", 4.0), ("ours", 2.0))
]


def test_a_noisy_round_moves_neither_medians_nor_ratios() -> None:
    ours, theirs = figures(SLICES, ["ours", "theirs"])
    assert (ours.engine, ours.rounds, ours.throughput_ratio, ours.ttft_ratio) == ("ours", 3, 1.0, 1.0)
    assert ours.output_tokens_per_second == pytest.approx(1.0 / 1.1)
    assert theirs.output_tokens_per_second == pytest.approx(0.5 / 1.1)
    assert (theirs.throughput_ratio, theirs.ttft_ratio) == pytest.approx((2.0, 2.0))
    assert theirs.ttft_p50 == pytest.approx(2.2)
    assert theirs.itl_p50 == pytest.approx(2.2)
    assert theirs.other_cores == pytest.approx(0.2)


def test_a_ratio_is_of_engines_in_the_same_round() -> None:
    """Ratios of medians would compare the fast minute of one with the slow minute of the other."""
    slices = [slice_of("ours", 1, 1.0), slice_of("theirs", 1, 2.0)]
    slices += [slice_of("ours", 2, 10.0), slice_of("theirs", 2, 20.0), slice_of("ours", 3, 30.0)]
    _, theirs = figures(slices, ["ours", "theirs"])
    assert theirs.throughput_ratio == 2.0


def test_a_run_that_ended_early_compares_the_turns_that_every_engine_had() -> None:
    cut = [*SLICES, slice_of("theirs", 4, 1.0)]
    assert whole_turns(cut, ["ours", "theirs"]) == SLICES
    assert whole_turns(cut[-1:], ["ours", "theirs"]) == []


def test_the_table_and_the_document_hold_every_engine_and_case() -> None:
    found = figures(SLICES, ["ours", "theirs"])
    console = Console(width=140, record=True, file=StringIO())
    console.print(table(found, MACHINE))
    shown = console.export_text()
    assert "EPYC, 2 processors (avx2)" in shown
    assert [line.count("ours") + line.count("theirs") for line in shown.splitlines()].count(1) >= 2
    document = json.loads(json.dumps(to_json(found, SLICES, MACHINE, {"ours": "serve"})))
    assert [row["engine"] for row in document["figures"]] == ["ours", "theirs"]
    assert len(document["slices"]) == 6
    assert document["slices"][0]["output_tokens_per_second"] == 0.5


def test_the_picture_is_drawn_where_it_can_be(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = figures(SLICES, ["ours", "theirs"])
    write_plot(found, tmp_path / "peers.svg")
    assert "ours" in (tmp_path / "peers.svg").read_text()
    with pytest.raises(OptionError, match="--plot"):
        write_plot(found, tmp_path / "nowhere" / "peers.svg")


def test_cases_are_named_by_set() -> None:
    cases = cases_of("throughput,long-context")
    assert [case.concurrency for case in cases] == [1, 16, 64, 64, 8]
    assert (demand_of(cases).num_sequences, demand_of(cases).tokens_per_sequence) == (64, 7064)
    with pytest.raises(OptionError, match="'slow' is none of throughput, first-token"):
        cases_of("throughput,slow")


def process(root: Path, number: int, session: int, ticks: int) -> None:
    folder = root / str(number)
    folder.mkdir()
    fields = [*"S1", number, session, *[0] * 7, ticks, ticks, *[0] * 30]
    (folder / "stat").write_text(f"{number} (a ) name) {' '.join(map(str, fields))}")


def test_processor_time_of_others_is_what_no_session_used(tmp_path: Path) -> None:
    # user, nice, system, idle, wait, irq, softirq, steal
    (tmp_path / "stat").write_text("cpu  1000 100 200 9999 9999 0 50 150 0 0\ncpu0 7 7\n")
    process(tmp_path, 10, session=10, ticks=100)
    process(tmp_path, 11, session=10, ticks=50)
    process(tmp_path, 12, session=9, ticks=400)
    time = processor_time(10, tmp_path)
    assert (time.busy, time.own, time.others) == (15.0, 3.0, 12.0)


def test_a_machine_tells_whether_it_multiplies_bfloat16(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("model name\t: EPYC\nflags\t\t: fpu avx2 avx512_bf16\n")
    machine = read_machine(tmp_path)
    assert (machine.processor, machine.features, machine.has_bfloat16) == (
        "EPYC",
        ("avx2", "avx512_bf16"),
        True,
    )
    assert not replace(machine, features=("avx2",)).has_bfloat16
    assert read_machine(tmp_path / "nowhere").processor == "unknown"
