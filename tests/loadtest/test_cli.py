"""`pageturner loadtest`, from flags to tables and JSON."""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.fake_server import POLICIES, Play, delta, play_in_full, serve

from pageturner.loadtest import cli
from pageturner.service.cli import main


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(words))


SMALL = ("--requests=6", "--concurrency=2", "--prompt-tokens=8-10", "--output-tokens=3", "--warmup=0")


def test_the_figures_come_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with serve() as server:
        assert run("--address", server.address, *SMALL) == 0
    out = capsys.readouterr().out
    for part in (
        "fake",
        "6 of 6",
        "TTFT",
        "TPOT",
        "ITL",
        "send lag",
        "output tokens/s",
        "12 / 0 / 6",
        "least-computed",
    ):
        assert part in out


def test_json_is_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    with serve() as server:
        assert run("--address", server.address, *SMALL, "--json", "--seed=3", "--priorities=0:1,2:1") == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert "TTFT" in captured.err
    assert document["settings"]["loop"] == "closed"
    assert document["settings"]["concurrency"] == 2
    assert document["settings"]["prompt_tokens"] == "8-10"
    assert document["settings"]["priorities"] == "0:1,2:1"
    assert document["settings"]["seed"] == 3
    assert document["server"]["name"] == "fake"
    results = document["results"]
    assert results["num_ok"] == 6
    assert results["num_output_tokens"] == 18
    assert results["num_swaps"] == 12
    assert results["policies"] == POLICIES
    assert results["time_to_first_token"]["num_samples"] == 6
    assert results["time_per_output_token"]["p50"] >= 0
    assert results["output_tokens_per_second"] == pytest.approx(18 / results["duration_seconds"])


def test_json_has_the_fields_of_bench_serve_at_its_top(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--json", "--goodput", "ttft:60000", "e2el:0.001")
    with serve() as server:
        assert run("--address", server.address, *words) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    for name in ("ttft", "tpot", "itl", "e2el"):
        for figure in ("mean", "median", "std", "p50", "p90", "p95", "p99"):
            assert document[f"{figure}_{name}_ms"] >= 0
    assert document["completed"] == 6
    assert document["output_throughput"] == document["results"]["output_tokens_per_second"]
    assert document["request_goodput"] == 0
    assert document["results"]["goodput"] | {"requests_per_second": 0} == {
        "objectives": "ttft:60000 e2el:0.001",
        "num_good": 0,
        "num_judged": 6,
        "share": 0,
        "requests_per_second": 0,
    }
    assert "goodput (ttft:60000 e2el:0.001)" in captured.err
    assert document["client"]["cpu_seconds"] > 0
    assert "client: share of a core" in captured.err


@pytest.mark.parametrize(
    "words",
    [
        ("--workload=chat", "--think-seconds=0.001"),
        ("--workload=summarise",),
        ("--workload=code", "--rate=500", "--burstiness=0.3"),
        ("--workload=agents", "--think-seconds=0", "--concurrency=3"),
        ("--workload=shared-prefix", "--rate=500", "--burstiness=inf"),
        ("--workload=long-context", "--rate=100", "--ramp-to=1000", "--processes=2"),
        ("--prompt-tokens=4", "--output-tokens=2-5", "--turns=1-3", "--system-prompts=2:16"),
        ("--prompt-tokens=4", "--output-tokens=5", "--cancel-rate=0.5", "--slow-reader-rate=0.3"),
    ],
    ids=lambda words: " ".join(words),
)
def test_every_kind_of_load_is_sent(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with serve() as server:
        target = f"--target={server.address}"
        assert run(target, "--requests=24", "--slow-reader-seconds=0.001", *words, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    results = document["results"]
    assert results["num_requests"] == 24
    assert results["num_ok"] + results["num_abandoned"] == 24
    if document["settings"]["workload"] in ("summarise", "shared-prefix", "long-context"):
        assert results["cut_to_context"]["prompts"] > 0  # the fake has room for 512 tokens


TRACE = "Timestamp,Request tokens,Response tokens\n"
TRACE += "".join(f"{n},{n + 5},{n % 3 + 1}\n" for n in range(40))


def test_a_trace_is_a_workload_or_gives_the_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "day.csv").write_text(TRACE)
    path = tmp_path / "day.csv"
    with serve() as server:
        words = (f"--target={server.address}", "--requests=12", "--speed=500", "--warmup=0")
        assert run(*words, f"--workload={path}", "--json") == 0
        lengths = sorted(len(request.prompt.token_ids.ids) for request in server.requests)
        assert run(*words, f"--arrivals={path}", "--prompt-tokens=7", "--output-tokens=2") == 0
    assert lengths == list(range(lengths[0], lengths[0] + 12))
    captured = capsys.readouterr().out
    document, _ = json.JSONDecoder().raw_decode(captured)
    assert document["settings"]["arrivals"] == "of day.csv, 500 x as fast"
    assert document["settings"]["workload"] == "day.csv"
    assert "open, of day.csv, 500 x as fast" in captured


def test_the_knee_is_searched(capsys: pytest.CaptureFixture[str]) -> None:
    """A server that answers one request after another, 10 ms each: about 100 a second."""
    lock = threading.Lock()

    def play(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        with lock:
            time.sleep(0.01)
        yield from play_in_full(request, context)

    words = (
        "--find-knee",
        "--rate=25",
        "--goodput",
        "ttft:60",
        "--requests=40",
        "--knee-precision=0.9",
        "--knee-seconds=0.2",
    )
    with serve(play) as server:
        assert (
            run(f"--target={server.address}", "--prompt-tokens=4", "--output-tokens=2", *words, "--json") == 0
        )
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    knee = document["knee"]
    assert knee["is_complete"]
    assert {probe["holds"] for probe in knee["probes"]} == {True, False}
    assert document["settings"]["rate"] == knee["rate"]
    assert "does not hold" in captured.err
    assert "for 90% of requests (ttft:60)" in captured.err
    firsts = {tuple(request.prompt.token_ids.ids) for request in server.requests}
    assert len(firsts) == len(server.requests), "no batch finds its prompts cached"


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["table", "json"])
def test_a_full_disk_is_one_line(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:  # closing flushes once more, as the interpreter does at exit
        monkeypatch.setattr(sys, "stdout", full)
        with serve() as server:
            assert run("--address", server.address, *SMALL, *flags) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "pageturner loadtest: standard output: No space left on device"


def test_an_open_loop_by_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with serve() as server:
        words = ("--requests=5", "--rate=500", "--prompt-tokens=4", "--output-tokens=2", "--json")
        assert run("--address", server.address, *words) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert (settings["loop"], settings["rate"], settings["concurrency"]) == ("open", 500.0, None)


def play_in_turn(*codes: grpc.StatusCode | None) -> Any:
    """Each request gets the next code; None is a good end."""
    remaining = iter(codes)

    def play(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        code = next(remaining)
        if code is not None:
            context.abort(code, "as told")
        yield from play_in_full(request, context)

    return play


def test_shed_requests_are_a_result_and_failed_ones_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    shed, failed = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL
    words = ("--requests=3", "--concurrency=1", "--prompt-tokens=4", "--output-tokens=2", "--warmup=0")
    with serve(play_in_turn(None, shed, None)) as server:
        assert run("--address", server.address, *words) == 0
    assert "1 / 0 / 0" in capsys.readouterr().out
    with serve(play_in_turn(None, shed, failed)) as server:
        assert run("--address", server.address, *words) == 1
    out = capsys.readouterr().out
    assert "1 / 0 / 1" in out
    assert "INTERNAL: as told" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prompt-tokens=500", "--output-tokens=13"), "may reach 513 tokens, fake has room for 512"),
        (("--model=other",), "NOT_FOUND: no model other"),
    ],
)
def test_what_the_server_cannot_run_is_said_in_one_line(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve() as server:
        assert run("--address", server.address, *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert server.requests == []


@pytest.mark.fault("K")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--target=nowhere:x",), "--target: 'nowhere:x' is neither HOST:PORT nor unix:PATH"),
        (("--concurrency=0",), "--concurrency: must be at least 1"),
        (("--rate=-1",), "--rate: must be positive"),
        (("--rate=nan",), "--rate: must be positive"),
        (("--requests=0",), "--requests: must be at least 1"),
        (("--warmup=-1",), "--warmup: must not be negative"),
        (("--processes=0",), "--processes: must be at least 1"),
        (("--processes=3", "--concurrency=2"), "--processes: 3 cannot share a concurrency of 2"),
        (("--prompt-tokens=x",), "--prompt-tokens: 'x' is neither a number nor LOW-HIGH"),
        (("--prompt-tokens=10-2",), "--prompt-tokens: '10-2': needs 1 <= LOW <= HIGH"),
        (("--output-tokens=0",), "--output-tokens: '0': needs 1 <= LOW <= HIGH"),
        (("--shared-prefix-tokens=129",), "--shared-prefix-tokens: 129 is not within the shortest prompt"),
        (("--priorities=0:x",), "--priorities: '0:x': the weight is not a number"),
        (("--priorities=high",), "--priorities: 'high': each value must be a whole number"),
        (("--priorities=0:-1",), "--priorities: '0:-1': weights must be positive"),
        (("--priorities=4294967296",), "--priorities: '4294967296': each value must fit 32 bits"),
        (("--tenants=a:b",), "--tenants: 'a:b': the weight is not a number"),
        (("--tenants=a,,b",), "--tenants: 'a,,b': a value is empty"),
        (("--workload=nothing",), "--workload: 'nothing' is none of random, chat"),
        (("--burstiness=2",), "--burstiness: needs --rate"),
        (("--ramp-to=2",), "--ramp-to: needs --rate"),
        (("--rate=1", "--burstiness=0"), "--burstiness: must be positive"),
        (("--arrivals=nothing",), "nothing: No such file"),
        (("--turns=0",), "--turns: '0': needs 1 <= LOW <= HIGH"),
        (("--think-seconds=-1",), "--think-seconds: must not be negative"),
        (("--system-prompts=4",), "--system-prompts: '4' is not COUNT:TOKENS"),
        (("--cancel-rate=2",), "--cancel-rate: must be from 0 to 1"),
        (("--slow-reader-rate=2",), "--slow-reader-rate: must be from 0 to 1"),
        (("--goodput", "speed:1"), "--goodput: 'speed' is none of ttft, tpot, itl, e2el"),
        (("--report=/nowhere/page.html",), "--report: there is no folder /nowhere"),
        (("--find-knee",), "--find-knee: needs --goodput"),
        (("--find-knee", "--concurrency=2"), "--find-knee: searches rates"),
        (("--find-knee", "--rate=1", "--ramp-to=2"), "--find-knee: searches constant rates"),
        (("--find-knee", "--goodput", "ttft:1", "--knee-share=1"), "--knee-share: must be between 0 and 1"),
        (("--timeout=0",), "--timeout: must be above 0"),
        (("--timeout=inf",), "--timeout: must be above 0 and at most 1e+08 seconds"),
    ],
)
def test_a_bad_flag_is_refused_by_name_before_any_connection(
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_connection(*_: object) -> None:
        pytest.fail("it asked for a server")

    monkeypatch.setattr(cli, "discover", no_connection)
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def blocking_after(num_answered: int, number: signal.Signals) -> tuple[Play, list[threading.Event]]:
    """Answers so many requests, then signals this process once and keeps each further stream open until the
    client cancels it, which sets that stream's event."""
    answered = itertools.count(1)
    cancelled: list[threading.Event] = []

    def play(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        turn = next(answered)
        if turn <= num_answered:
            yield from play_in_full(request, context)
            return
        yield delta(1)
        gone = threading.Event()
        cancelled.append(gone)
        assert context.add_callback(gone.set)
        if turn == num_answered + 1:
            os.kill(os.getpid(), number)
        gone.wait(timeout=60)

    return play, cancelled


@pytest.mark.fault("40")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_the_figures_of_what_ended(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--requests=50", "--concurrency=1", "--prompt-tokens=4", "--output-tokens=2", "--warmup=0")
    play, cancelled = blocking_after(3, number)
    before = signal.getsignal(number)
    with serve(play) as server:
        assert run("--address", server.address, *words, "--json") == 128 + number
        assert [gone.wait(timeout=60) for gone in cancelled] == [True]
    assert signal.getsignal(number) is before
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    results = document["results"]
    assert results["is_complete"] is False
    assert document["client"]["cpu_seconds"] > 0
    assert (results["num_planned"], results["num_requests"], results["num_ok"]) == (50, 3, 3)
    assert results["num_output_tokens"] == 6
    assert "INCOMPLETE: ended early, after 3 of 50 requests" in captured.err


@pytest.mark.fault("40")
def test_a_signal_ends_the_client_processes_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--requests=50", "--concurrency=2", "--processes=2", "--prompt-tokens=4", "--output-tokens=2")
    play, cancelled = blocking_after(4, signal.SIGINT)
    with serve(play) as server:
        assert run("--address", server.address, *words, "--warmup=0", "--json") == 130
        assert all(gone.wait(timeout=60) for gone in cancelled)
    results = json.loads(capsys.readouterr().out)["results"]
    assert results["is_complete"] is False
    assert results["num_requests"] == results["num_ok"] <= 4
    assert multiprocessing.active_children() == []


@pytest.mark.fault("40")
def test_a_signal_before_any_request_ended_gives_no_figures_of_any(
    capsys: pytest.CaptureFixture[str],
) -> None:
    play, _ = blocking_after(0, signal.SIGINT)
    with serve(play) as server:
        assert run("--address", server.address, *SMALL, "--json") == 130
    results = json.loads(capsys.readouterr().out)["results"]
    assert (results["is_complete"], results["num_requests"]) == (False, 0)


@pytest.mark.fault("40")
def test_a_complete_run_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with serve() as server:
        assert run("--address", server.address, *SMALL, "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["results"]["is_complete"] is True
    assert "INCOMPLETE" not in captured.err


@pytest.mark.fault("9")
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    """As `nohup` leaves SIGHUP: each request sends one, and all are answered."""

    def play(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        os.kill(os.getpid(), signal.SIGHUP)
        yield from play_in_full(request, context)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with serve(play) as server:
            assert run("--address", server.address, *SMALL) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "6 of 6" in capsys.readouterr().out


def test_it_is_a_command_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["loadtest", "--help"])
    assert ended.value.code == 0
    assert cli.EXAMPLE.split()[2] in capsys.readouterr().out
    assert main(["loadtest", "--timeout=nan"]) == 2
    assert "pageturner loadtest: --timeout: must be above 0" in capsys.readouterr().err


def test_a_rate_and_a_concurrency_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--rate=1", "--concurrency=1")
    assert "not allowed with argument" in capsys.readouterr().err
