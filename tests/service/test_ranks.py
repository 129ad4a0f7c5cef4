"""A model on two ranks: its tokens are those of one rank, a step that fails on one costs its request alone,
and the loss of a rank ends the server in order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # has no types
import pytest
from support.model_folders import save_chat_model, save_plain_adapter
from support.processes import is_running

from pageturner.service.client import Completion, SyncClient, TokenEvent
from pageturner.service.client.server_process import PROGRAM
from pageturner.service.errors import (
    AdapterNotFound,
    EngineDead,
    InvalidArgument,
    NonFiniteLogits,
    PageturnerError,
    RankLost,
    StepFailed,
)
from pageturner.service.llm import LLM
from pageturner.service.startup import ranks

POISON, NAN = 77, 78
_FAILS_IN_THE_MIDDLE = f"""
from pageturner.service.model.runner import Runner
from pageturner.service.ranks.meeting import RenewedCollectives
forward, all_reduce = Runner.forward, RenewedCollectives.all_reduce
left, nan_rows = [-1], []
def planted_forward(self, output):
    first = [part.token_ids[0] if part.start == 0 else -1 for part in output.scheduled]
    left[0] = 2 if {POISON} in first else -1
    tokens = [token for part, token in zip(output.scheduled, first) for _ in part.token_ids]
    nan_rows[:] = [row for row, token in enumerate(tokens) if token == {NAN}]
    return forward(self, output)
def planted_all_reduce(self, tensor):
    left[0] -= 1
    if left[0] == 0:
        raise MemoryError("planted: rank 1 is full")
    if nan_rows:
        tensor[nan_rows] = float("nan")
    all_reduce(self, tensor)
Runner.forward, RenewedCollectives.all_reduce = planted_forward, planted_all_reduce
from pageturner.service.model.decoder import Decoder
read_adapter = Decoder.read_adapter
def planted_read(self, folder, max_rank, max_bytes):
    if folder.name == "full":
        raise MemoryError("planted: rank 1 is full")
    return read_adapter(self, folder, max_rank, max_bytes)
Decoder.read_adapter = planted_read
"""

PROMPTS = [[5, 6, 7], [9, 10, 11, 12] * 20, [1, 2], [300]]


def options(model: Path, size: int) -> dict[str, object]:
    plain = {"device": "cpu", "quantization": "none", "dtype": "float32", "num_threads": 1}
    return {"source": str(model), "tensor_parallel_size": size, **plain}


def answers(llm: LLM) -> list[tuple[int, ...]]:
    """Greedy ones, in float32: sums in another order turn none of these."""
    found = llm.generate(PROMPTS, max_tokens=24, temperature=0, ignore_eos=True)
    return list(map(tokens_of, found))


ADAPTERS = ("", "a", "b", "a")
"""Of PROMPTS."""


def adapted_answers(llm: LLM) -> list[tuple[int, ...]]:
    """Likewise, all at once, each with its adapter."""

    def ask(prompt: list[int], adapter: str) -> tuple[int, ...]:
        (found,) = llm.generate([prompt], adapter=adapter, max_tokens=24, temperature=0, ignore_eos=True)
        return tokens_of(found)

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(ask, PROMPTS, ADAPTERS))


def tokens_of(completion: Completion) -> tuple[int, ...]:
    return tuple(token.token_id for token in completion.choices[0].tokens)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: save_plain_adapter(model, folder / name, seed) for seed, name in enumerate(("a", "b", "full"))
    }


@pytest.fixture(scope="module")
def on_one_rank(
    model: Path, adapters: Mapping[str, Path]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The answers without adapters, and with them."""
    given = {"load": {name: str(adapters[name]) for name in "ab"}}
    with LLM(options(model, 1), cache={"num_blocks": 64, "swap_space": "0"}, adapters=given) as llm:
        return answers(llm), adapted_answers(llm)


@pytest.fixture(scope="module")
def expected(on_one_rank: tuple[list[tuple[int, ...]], list[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    return on_one_rank[0]


@pytest.fixture(scope="module")
def two_ranks(model: Path, adapters: Mapping[str, Path]) -> Iterator[LLM]:
    """Rank 1 fails in the middle of a step that begins with POISON, computes no number behind NAN, and has no
    memory for the adapter `full`."""
    program = (*ranks.RANK_PROGRAM[:-1], _FAILS_IN_THE_MIDDLE + ranks.RANK_PROGRAM[-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "RANK_PROGRAM", program)
        llm = LLM(
            options(model, 2),
            cache={"num_blocks": 64, "swap_space": "64KiB"},
            adapters={"load": {"a": str(adapters["a"])}},
        )
    with llm:
        yield llm


def test_two_ranks_say_what_one_says(two_ranks: LLM, expected: list[tuple[int, ...]]) -> None:
    assert answers(two_ranks) == expected
    info = two_ranks.info()
    assert info.tensor_parallel_size == 2
    assert info.fingerprint.endswith(";ranks=2")
    assert two_ranks.model.num_kv_heads == 2


@pytest.mark.parametrize(
    ("token", "error", "told"),
    [
        (POISON, StepFailed, "rank 1: MemoryError: planted: rank 1 is full"),
        (NAN, NonFiniteLogits, "the model produced NaN or infinite logits"),
    ],
)
def test_what_goes_wrong_on_one_rank_costs_its_request_alone(
    two_ranks: LLM,
    expected: list[tuple[int, ...]],
    token: int,
    error: type[PageturnerError],
    told: str,
) -> None:
    results: list[object] = []

    def ask() -> None:
        try:
            results.append(two_ranks.generate([[token, 1, 2]], max_tokens=4))
        except PageturnerError as failure:
            results.append(failure)

    asking = threading.Thread(target=ask)
    asking.start()
    assert answers(two_ranks) == expected
    asking.join()
    assert isinstance(results[0], error)
    assert told in str(results[0])
    assert answers(two_ranks) == expected


def test_adapters_come_and_go_on_both_ranks(
    two_ranks: LLM,
    adapters: Mapping[str, Path],
    on_one_rank: tuple[list[tuple[int, ...]], list[tuple[int, ...]]],
) -> None:
    plain, adapted = on_one_rank
    assert all(ours != theirs for ours, theirs in zip(plain[1:], adapted[1:], strict=True))
    two_ranks.load_adapter("b", adapters["b"])
    assert adapted_answers(two_ranks) == adapted
    with pytest.raises(InvalidArgument, match="path: rank 1: MemoryError: planted: rank 1 is full"):
        two_ranks.load_adapter("b", adapters["full"])
    assert [info.name for info in two_ranks.adapters()] == ["a", "b"]
    assert adapted_answers(two_ranks) == adapted
    assert two_ranks.unload_adapter("b") == 0
    with pytest.raises(AdapterNotFound):
        two_ranks.generate([[1, 2]], adapter="b", max_tokens=1)
    two_ranks.load_adapter("b", adapters["b"])
    assert adapted_answers(two_ranks) == adapted


class Served:
    """`pageturner serve` on some ranks, its ranks' process ids, and its log as far as it is written."""

    def __init__(self, model: Path, size: int, log: Path, *flags: str) -> None:
        self._log = log
        given = [f"--{key.replace('_', '-')}={value}" for key, value in options(model, size).items()]
        given[0] = f"--model={model}"
        sizes = ("--num-blocks=512", "--swap-space=0", "--port=0", "--log-format=json")
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*PROGRAM, "serve", *given, *sizes, *flags], stdout=subprocess.PIPE, stderr=file, text=True
            )
        assert self.process.stdout is not None
        self.target = self.process.stdout.readline().split()[-1]
        self.ranks = sorted(child.pid for child in psutil.Process(self.process.pid).children())

    def lines(self, event: str) -> list[dict[str, object]]:
        found = [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]
        return [line for line in found if line["event"] == event]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def lose(served: Served, number: int, how: signal.Signals) -> None:
    """Streams in flight, then a signal to a rank: all streams end UNAVAILABLE, and the server with code 2."""
    ends: list[PageturnerError | None] = []
    has_begun = threading.Barrier(5)

    def stream(number: int) -> None:
        with SyncClient(served.target) as client:
            events = client.stream([number, 5, 6], max_tokens=2000, temperature=0, ignore_eos=True)
            error = None
            try:
                next(events), next(events)
                has_begun.wait()
                for _ in events:
                    pass
            except PageturnerError as failure:
                error = failure
            ends.append(error)

    streams = [threading.Thread(target=stream, args=(number,)) for number in range(4)]
    for thread in streams:
        thread.start()
    has_begun.wait()
    os.kill(served.ranks[number - 1], how)
    for thread in streams:
        thread.join()
    assert served.process.wait(60) == 2
    assert all(isinstance(error, EngineDead) for error in ends), ends
    (lost,) = served.lines("rank_lost")
    assert lost["rank"] == number
    assert lost["process"] == served.ranks[number - 1]
    assert [line["now"] for line in served.lines("health")] == ["serving", "dead"]
    assert not any(map(is_running, served.ranks))


def test_a_killed_rank_ends_every_stream_and_the_server(model: Path, tmp_path: Path) -> None:
    served = Served(model, 2, tmp_path / "log")
    try:
        lose(served, 1, signal.SIGKILL)
        assert served.lines("rank_lost")[0]["reason"] == "it was ended by SIGKILL"
    finally:
        served.end()


@pytest.mark.slow
def test_a_stopped_rank_of_four_ends_every_stream_and_the_server(model: Path, tmp_path: Path) -> None:
    served = Served(model, 4, tmp_path / "log")
    try:
        lose(served, 2, signal.SIGSTOP)
        assert served.lines("rank_lost")[0]["reason"] == "it has given no sign of life for 5 s"
    finally:
        served.end()


@pytest.mark.slow
def test_a_drain_lets_two_ranks_finish_what_runs(model: Path, tmp_path: Path) -> None:
    served = Served(model, 2, tmp_path / "log")
    try:
        with SyncClient(served.target) as client:
            events = client.stream([1, 5, 6], max_tokens=100, temperature=0, ignore_eos=True)
            next(events), next(events)
            for process_id in (served.process.pid, *served.ranks):  # as a supervisor does to a whole group
                os.kill(process_id, signal.SIGTERM)
            assert sum(len(event.tokens) for event in events if isinstance(event, TokenEvent)) == 99
        assert served.process.wait(60) == 0
        assert not served.lines("rank_lost")
        assert not any(map(is_running, served.ranks))
    finally:
        served.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--steps-ahead=0",),
        ("--steps-ahead=1",),
        ("--speculation-method=ngram",),
        ("--num-blocks=12", "--swap-space=1MiB", "--reclaim-policy=always-swap"),
    ],
)
def test_four_ranks_say_what_one_says(
    model: Path, tmp_path: Path, expected: list[tuple[int, ...]], flags: tuple[str, ...]
) -> None:
    served = Served(model, 4, tmp_path / "log", *flags)
    try:
        with SyncClient(served.target) as client, ThreadPoolExecutor(len(PROMPTS)) as threads:
            ask = partial(client.generate, max_tokens=24, temperature=0, ignore_eos=True)
            assert [tokens_of(each) for each in threads.map(ask, PROMPTS)] == expected
            assert (client.load().num_swapped_out_blocks_total > 0) == ("always-swap" in flags[-1])
    finally:
        served.end()


_KILLED = """
import os
from pageturner.service.ranks import messages
from pageturner.service.ranks.follower import Follower
real_send, real_read, real_carry_out = messages.send, messages.read, Follower._carry_out
def end():
    os.kill(os.getpid(), 9)
def send(channel, message, timeout=None):
    if type(message).__name__ == PHASE:
        end()
    real_send(channel, message, timeout)
def read(kind, payload):
    message = real_read(kind, payload)
    if type(message).__name__ == PHASE:
        end()
    return message
def carry_out(self, output):
    return end() if PHASE == "first step" else real_carry_out(self, output)
messages.send, messages.read, Follower._carry_out = send, read, carry_out
"""


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["Hello", "Identity", "Join", "Capacity", "Ready", "first step", "Renew"])
def test_a_rank_that_is_killed_while_a_server_starts_ends_the_start(
    phase: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = f"PHASE = {phase!r}\n{_KILLED}{ranks.RANK_PROGRAM[-1]}"
    monkeypatch.setattr(ranks, "RANK_PROGRAM", (*ranks.RANK_PROGRAM[:-1], program))
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(RankLost, match=r"rank 1 \(process \d+\) is lost: it was ended by SIGKILL"):
        LLM(options(model, 2), cache={"num_blocks": 64, "swap_space": "0"})
    assert {child.pid for child in psutil.Process().children()} <= before
