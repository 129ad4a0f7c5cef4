"""`pageturner loadtest`, from flags to tables and JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.fake_server import POLICIES, play_in_full, serve

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
        (("--prompt-tokens=x",), "--prompt-tokens: 'x' is neither a number nor LOW-HIGH"),
        (("--prompt-tokens=500", "--output-tokens=13"), "may reach 513 tokens, fake has 512"),
        (("--rate=-1",), "--rate: must be positive"),
        (("--timeout=0",), "--timeout: must be positive"),
        (("--model=other",), "NOT_FOUND: no model other"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve() as server:
        assert run("--address", server.address, *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert server.requests == []


def test_it_is_a_command_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["loadtest", "--help"])
    assert ended.value.code == 0
    assert cli.EXAMPLE.split()[2] in capsys.readouterr().out
    assert main(["loadtest", "--timeout=nan"]) == 2
    assert "pageturner loadtest: --timeout: must be positive, not nan" in capsys.readouterr().err


def test_a_rate_and_a_concurrency_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--rate=1", "--concurrency=1")
    assert "not allowed with argument" in capsys.readouterr().err
