"""Each example does what its docstring says, on a random model or on none."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.model_folders import save_chat_model

from pageturner.service import examples
from pageturner.service.client.server_process import RunningServer, running_server
from pageturner.service.examples import (
    async_client,
    in_process,
    own_policy,
    resumed_stream,
    sync_client,
    trace_replay,
)

MAX_LINES = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    flags = [f"--model={folder}", "--num-blocks=512", "--swap-space=0", "--device=cpu", "--num-threads=1"]
    with running_server(flags) as running:
        yield running


def test_the_synchronous_client(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    sync_client.main(server.target)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f" at {server.target}")
    assert any(line.endswith(" tokens, decided by fcfs") for line in lines)
    assert [line.partition(":")[0] for line in lines[-3:]] == ["0", "1", "2"]


def test_the_asyncio_client(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(async_client.main(server.target))
    out = capsys.readouterr().out
    for prompt in async_client.PROMPTS:
        assert f"{prompt!r} -> " in out
    assert "left early: " in out
    assert "refused: sampling.top_p 3.0 is not in [0, 1]" in out


def test_a_stream_begins_at_the_first_server_that_is_there(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    resumed_stream.main("127.0.0.1:1", server.target)
    out = capsys.readouterr().out
    assert f"[UnknownStatus: {server.target} is asked in 0.0 s]" in out
    assert "\n400 tokens, 0 resumes\n0 of them were brought along" in out


def test_the_engine_in_process(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_process.main(str(folder))
    out = capsys.readouterr().out
    for prompt in in_process.PROMPTS:
        assert f"{prompt!r} -> " in out
    assert " steps, " in out.splitlines()[-1]


def test_a_policy_of_ones_own_beside_the_built_in_ones(capsys: pytest.CaptureFixture[str]) -> None:
    own_policy.main("two-tenants:requests=60,output=400")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[0] for words in lines] == ["LeastComputed", "LastArrived", "BusiestTenant"]
    assert all(int(words[-2]) > 0 for words in lines), "a victim policy is asked where blocks run short"


def test_the_trace_example_replays_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(
        "".join(
            f'{{"timestamp":{at},"input_length":600,"output_length":5,"hash_ids":[1,{at}]}}\n'
            for at in range(2, 12)
        )
    )
    trace_replay.main(str(path), "8")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "8 requests of Mooncake, 4800 prompt tokens"
    assert [line.split()[0] for line in lines[1:]] == ["pageturner", "sglang-lpm"]


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(examples.__path__)])
def test_an_example_is_short_tried_here_and_says_how_it_is_run(name: str) -> None:
    module = importlib.import_module(f"{examples.__name__}.{name}")
    assert module.__file__ is not None
    assert len(Path(module.__file__).read_text().splitlines()) <= MAX_LINES
    assert f"python -m {module.__name__}" in str(module.__doc__)
    assert module in (async_client, in_process, own_policy, resumed_stream, sync_client, trace_replay)
