"""The generator against a real gRPC server that plays a script."""

from __future__ import annotations

import multiprocessing
import string
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.fake_server import (
    EOS_TOKEN_ID,
    MAX_MODEL_LEN,
    POLICIES,
    SPECIAL_TOKEN_IDS,
    VOCAB_SIZE,
    Play,
    delta,
    finished,
    play_in_full,
    serve,
)

from pageturner.loadtest import processes
from pageturner.loadtest.client import Outcome, RequestRecord
from pageturner.loadtest.errors import OptionError, ServerError, WorkerDied
from pageturner.loadtest.runner import Run, execute, run_part
from pageturner.loadtest.server import Target, discover
from pageturner.loadtest.workload import Lengths, LoadtestWorkload, Mix, arrivals
from pageturner.loadtest.workload.arrivals import RandomArrivals

WORKLOAD = LoadtestWorkload(
    num_requests=12, prompt_lengths=Lengths(8, 8), output_lengths=Lengths(3, 3), token_ids=tuple(range(3, 40))
)


def ignore(record: RequestRecord) -> None:
    pass


async def run_here(run: Run) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    await run_part(run, 0, time.monotonic, records.append)
    return sorted(records, key=lambda record: record.index)


def check_due_times(workload: LoadtestWorkload, records: list[RequestRecord]) -> None:
    """Each was due as its workload says after one common start, and sent no earlier."""
    starts = [r.scheduled_at - at for r, at in zip(records, arrivals(workload), strict=True)]
    assert starts == pytest.approx([starts[0]] * len(records), abs=1e-6)
    assert all(record.send_lag >= 0.0 for record in records)


async def test_every_request_is_sent_as_planned_and_recorded() -> None:
    workload = replace(WORKLOAD, priorities=Mix((4,), (1.0,)), tenants=Mix(("alice",), (1.0,)))
    with serve() as server:
        records = await run_here(Run(Target(server.address, model="fake"), workload, concurrency=3))
    assert [record.index for record in records] == list(range(12))
    for record in records:
        assert record.outcome is Outcome.OK
        assert record.error == ""
        assert [arrival.num_tokens for arrival in record.arrivals] == [1, 1, 1]
        assert (record.num_swaps, record.num_recomputes, record.num_tail_reclaims) == (2, 0, 1)
        assert record.queue_seconds == 0.25
        assert dict(record.policies) == POLICIES
        times = [record.scheduled_at, record.sent_at, *(a.at for a in record.arrivals), record.ended_at]
        assert times == sorted(times)
    for request in server.requests:
        assert request.model == "fake"
        assert len(request.prompt.token_ids.ids) == 8
        assert request.sampling.max_tokens == 3
        assert request.sampling.ignore_eos
        assert request.sampling.temperature == 0.0
        assert request.sampling.HasField("temperature")
        assert (request.priority, request.tenant) == (4, "alice")


async def test_a_closed_loop_keeps_just_so_many_in_flight() -> None:
    barrier = threading.Barrier(4)

    def play_together(request: Any, context: Any) -> Iterator[Any]:
        barrier.wait(timeout=30)  # ends only when four requests are open
        yield from play_in_full(request, context)

    with serve(play_together) as server:
        records = await run_here(Run(Target(server.address), WORKLOAD, concurrency=4))
    assert [record.outcome for record in records] == [Outcome.OK] * 12
    assert server.most_open == 4


async def test_a_closed_loop_is_due_again_when_a_place_is_free() -> None:
    with serve() as server:
        records = await run_here(Run(Target(server.address), WORKLOAD, concurrency=1))
    for earlier, later in pairwise(records):
        assert later.scheduled_at == earlier.ended_at


async def test_an_open_loop_sends_when_due_with_requests_still_open() -> None:
    workload = replace(WORKLOAD, arrivals=RandomArrivals(1000.0))
    gate = threading.Barrier(12)

    def play_when_all_are_open(request: Any, context: Any) -> Iterator[Any]:
        gate.wait(timeout=30)
        yield from play_in_full(request, context)

    with serve(play_when_all_are_open) as server:
        records = await run_here(Run(Target(server.address), workload))
    assert [record.outcome for record in records] == [Outcome.OK] * 12
    due = list(arrivals(workload))
    for record in records:
        assert record.scheduled_at - records[0].scheduled_at == pytest.approx(
            due[record.index] - due[0], abs=1e-6
        )
        assert record.send_lag >= 0.0


def aborting(code: grpc.StatusCode) -> Play:
    def play(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        yield delta(1)
        context.abort(code, "as told")

    return play


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Outcome.SHED),
        (grpc.StatusCode.ABORTED, Outcome.CANCELLED),
        (grpc.StatusCode.CANCELLED, Outcome.CANCELLED),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Outcome.CANCELLED),
        (grpc.StatusCode.INTERNAL, Outcome.FAILED),
        (grpc.StatusCode.INVALID_ARGUMENT, Outcome.FAILED),
    ],
)
async def test_ends_are_told_apart_by_status(code: grpc.StatusCode, outcome: Outcome) -> None:
    with serve(aborting(code)) as server:
        (record,) = await run_here(Run(Target(server.address), replace(WORKLOAD, num_requests=1)))
    assert record.outcome is outcome
    assert record.error == f"{code.name}: as told"
    assert record.num_output_tokens == 1


def playing(*messages: Any) -> Callable[[Any, Any], Iterator[Any]]:
    return lambda request, context: iter(messages)


@pytest.mark.parametrize(
    ("play", "error"),
    [
        (playing(delta(1), delta(2, 3)), "without Finished"),
        (playing(delta(1), delta(2), finished(3)), "Finished counts 3 tokens, 2 came"),
        (playing(delta(1), delta(2), finished(2)), "2 tokens came, 3 were asked for"),
    ],
)
async def test_a_stream_that_breaks_its_contract_is_a_failure(play: Play, error: str) -> None:
    with serve(play) as server:
        (record,) = await run_here(Run(Target(server.address), replace(WORKLOAD, num_requests=1)))
    assert record.outcome is Outcome.FAILED
    assert error in record.error


async def test_joined_tokens_are_one_arrival() -> None:
    with serve(playing(delta(1, 2), delta(), delta(3), finished(3))) as server:
        (record,) = await run_here(Run(Target(server.address), replace(WORKLOAD, num_requests=1)))
    assert [arrival.num_tokens for arrival in record.arrivals] == [2, 1]
    assert record.outcome is Outcome.OK


async def test_the_server_is_asked_for_its_model_and_for_tokens_that_are_not_special() -> None:
    with serve() as server:
        model = await discover(Target(server.address), seed=0)
        with pytest.raises(ServerError, match="NOT_FOUND: no model other"):
            await discover(Target(server.address, model="other"), seed=0)
    assert (model.name, model.version, model.max_model_len) == ("fake", "1.2.3", 512)
    assert len(model.token_ids) > 10
    assert set(model.token_ids) <= set(range(VOCAB_SIZE)) - SPECIAL_TOKEN_IDS


async def test_a_server_that_loads_its_model_is_waited_for() -> None:
    with serve() as server:
        server.num_loading_answers = 2
        assert (await discover(Target(server.address), seed=0)).name == "fake"
        server.num_loading_answers = 1000
        with pytest.raises(ServerError, match="UNAVAILABLE: the model is loading"):
            await discover(Target(server.address, loading_seconds=0.0), seed=0)


@pytest.mark.fault("K")
async def test_ordinary_tokens_are_found_by_one_call() -> None:
    """A call for each would be a line each in the server's log."""
    with serve() as server:
        await discover(Target(server.address), seed=0)
    (request,) = server.tokenize_requests
    assert not request.add_special_tokens
    assert len(request.prompt.text) <= MAX_MODEL_LEN
    assert set(request.prompt.text) <= {*string.ascii_letters, " "}


async def test_a_model_without_a_tokenizer_gets_any_tokens_but_its_ends() -> None:
    with serve(has_tokenizer=False) as server:
        model = await discover(Target(server.address), seed=0)
    assert set(model.token_ids) == set(range(VOCAB_SIZE)) - {EOS_TOKEN_ID}


@pytest.mark.fault("36")
async def test_a_unix_socket_is_a_target(tmp_path: Path) -> None:
    with serve(address=f"unix:{tmp_path / 's'}") as server:
        records = await run_here(Run(Target(server.address), WORKLOAD))
    assert [record.outcome for record in records] == [Outcome.OK] * 12


@pytest.mark.fault("8")
async def test_a_local_server_is_reached_though_a_proxy_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serve() as server:
        model = await discover(Target(server.address), seed=0)
    assert model.name == "fake"


@pytest.mark.fault("8")
async def test_where_a_proxy_is_used_the_error_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    target = Target("192.0.2.1:50051", connect_seconds=0.05)
    with pytest.raises(ServerError, match="http_proxy is set: gRPC goes through that proxy"):
        await discover(target, seed=0)


async def test_no_server_is_an_error_that_says_where() -> None:
    with serve() as server:
        address = server.address
    with pytest.raises(ServerError, match=f"no server answers at {address}"):
        await discover(Target(address, connect_seconds=0.05), seed=0)


def test_several_processes_share_the_work_and_begin_together() -> None:
    heard: list[RequestRecord] = []
    with serve() as server:
        run = Run(
            Target(server.address),
            replace(WORKLOAD, arrivals=RandomArrivals(500.0)),
            num_processes=2,
            warmup=2,
        )
        records = execute(run, heard.append)
    assert [record.index for record in records] == list(range(12))
    assert [record.outcome for record in records] == [Outcome.OK] * 12
    assert sorted(heard, key=lambda record: record.index) == records
    assert len(server.requests) == 12 + 2
    due = list(arrivals(run.workload))
    for record in records:
        assert record.scheduled_at - records[0].scheduled_at == pytest.approx(
            due[record.index] - due[0], abs=1e-6
        )


def test_an_error_in_a_process_is_raised_here() -> None:
    with serve() as server:
        address = server.address
    run = Run(Target(address, connect_seconds=0.05), WORKLOAD, concurrency=2, num_processes=2)
    with pytest.raises(ServerError, match="no server answers"):
        execute(run, ignore)


def test_a_process_that_dies_ends_the_run() -> None:
    gate = threading.Event()

    def play_the_first_only(request: Any, context: Any) -> Iterator[Any]:
        if len(server.requests) > 1:
            gate.wait(timeout=30)
        yield from play_in_full(request, context)

    def kill(record: RequestRecord) -> None:
        for process in multiprocessing.active_children():
            process.kill()

    with serve(play_the_first_only) as server:
        run = Run(Target(server.address), WORKLOAD, concurrency=2, num_processes=2)
        with pytest.raises(WorkerDied, match="ended before its work was done"):
            execute(run, kill)
        gate.set()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("killed", [(0,), (1,), (0, 1)])
def test_a_process_that_dies_between_ready_and_start_ends_the_run(
    killed: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is killed when it has said that it is ready, before it is told when to begin."""
    begin = processes._begin
    is_done = False

    def kill_first(connection: Connection, start: float) -> None:
        nonlocal is_done
        if not is_done:
            is_done = True
            children = sorted(multiprocessing.active_children(), key=lambda child: child.name)
            for index in killed:
                children[index].kill()
                children[index].join(timeout=30)
        begin(connection, start)

    monkeypatch.setattr(processes, "_begin", kill_first)
    with serve() as server:
        run = Run(Target(server.address), WORKLOAD, concurrency=2, num_processes=2)
        with pytest.raises(WorkerDied, match="ended before its work was done"):
            execute(run, ignore)
    assert multiprocessing.active_children() == []


def test_the_warm_up_is_not_counted_and_sends_other_prompts() -> None:
    with serve() as server:
        records = execute(Run(Target(server.address), WORKLOAD, concurrency=2, warmup=3), ignore)
    assert len(records) == 12
    prompts = [tuple(request.prompt.token_ids.ids) for request in server.requests]
    assert len(prompts) == 15
    assert set(prompts[:3]).isdisjoint(prompts[3:])


def test_a_warm_up_that_fails_stops_the_run() -> None:
    with (
        serve(aborting(grpc.StatusCode.INTERNAL)) as server,
        pytest.raises(ServerError, match="a warm-up request was failed: INTERNAL: as told"),
    ):
        execute(Run(Target(server.address), WORKLOAD, warmup=1), ignore)
    assert len(server.requests) == 1


async def test_a_concurrency_beyond_the_requests_makes_no_more_tasks_than_requests() -> None:
    with serve() as server:
        records = await run_here(Run(Target(server.address), WORKLOAD, concurrency=10**18))
    assert len(records) == WORKLOAD.num_requests


def test_the_concurrency_is_shared_out_whole() -> None:
    run = Run(Target("nowhere"), WORKLOAD, concurrency=8, num_processes=3)
    assert [run.concurrency_of(part) for part in range(3)] == [3, 3, 2]


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"num_processes": 0}, "processes"),
        ({"num_processes": 2}, "processes"),
        ({"warmup": -1}, "warmup"),
    ],
)
def test_a_run_that_makes_no_sense_names_the_flag(change: dict[str, int], option: str) -> None:
    with pytest.raises(OptionError) as caught:
        Run(Target("nowhere"), WORKLOAD, **change)
    assert caught.value.option == option


async def test_of_several_servers_conversations_go_to_each_in_turn() -> None:
    with serve() as first, serve() as second:
        target = Target(first.address, model="fake", others=(second.address,))
        records = await run_here(Run(target, WORKLOAD, concurrency=1))
        assert [record.outcome for record in records] == [Outcome.OK] * 12
        assert (len(first.requests), len(second.requests)) == (6, 6)


async def test_one_of_several_servers_that_is_away_is_named() -> None:
    with serve() as server:
        target = Target(server.address, connect_seconds=0.2, others=("127.0.0.1:9",))
        with pytest.raises(ServerError, match=r"127\.0\.0\.1:9"):
            await run_here(Run(target, WORKLOAD, concurrency=1))
