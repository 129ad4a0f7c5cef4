"""`bench front`: a null service answers as the real one would, and its figures are what they are called."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from support.serving import capturing_logger, serving

from pageturner.service.bench.front import FrontResult, document, quantile, summarise
from pageturner.service.bench.front_clients import FrontWindow, ask_by_library, ask_by_stub, measure
from pageturner.service.bench.front_server import ServerMark, run_alone
from pageturner.service.bench.null_service import TEXT, NullLoad, NullModel, NullParts
from pageturner.service.cli import main
from pageturner.service.client import Client
from pageturner.service.config import cache_directory
from pageturner.service.core.clock import MonotonicClock
from pageturner.service.core.outputs import ScheduledSequence, SchedulerOutput
from pageturner.service.engine.metrics import Metrics

LOAD = NullLoad(num_streams=3, prompt_tokens=16, output_tokens=40)


@pytest.fixture(scope="module")
def parts() -> NullParts:
    return NullParts.read(LOAD, cache_directory(), MonotonicClock(), capturing_logger()[0])


async def test_the_null_model_says_its_text_to_every_kind_of_client(
    parts: NullParts, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, model = parts.service(Metrics())
    await engine.start()
    async with serving(engine) as served:
        completion = await served.client.generate(parts.prompt(0), max_tokens=40, ignore_eos=True)
        assert completion.text in TEXT * 2
        assert len(completion.choices[0].tokens) == 40
        prompts = [parts.prompt(number) for number in range(LOAD.num_streams)]
        async with Client(f"localhost:{served.port}") as client:
            for ask in (ask_by_library(client, 40), ask_by_stub(served.channel, 40)):
                window = await measure(ask, prompts, seconds=0.3, warm_up_seconds=0.1)
                assert window.num_messages <= window.num_tokens
                assert len(window.gaps) + len(window.first_seconds) == window.num_messages > 0
    await engine.aclose()
    assert model.num_tokens >= 40
    assert capsys.readouterr().out == '"begin"\n' * 2


def test_the_engine_alone_keeps_every_stream_going(parts: NullParts) -> None:
    mark = run_alone(parts, 0.2, 0.1)
    assert mark.num_tokens > LOAD.num_streams * LOAD.output_tokens
    assert mark.num_steps * LOAD.num_streams >= mark.num_tokens


def test_prompts_differ_and_fit(parts: NullParts) -> None:
    prompts = [parts.prompt(number) for number in range(50)]
    assert len(set(prompts)) == 50
    longest = max(len(parts.tokenizer.encode(prompt)) for prompt in prompts)
    assert LOAD.prompt_tokens / 2 <= longest <= LOAD.max_model_len - LOAD.output_tokens


def test_a_step_takes_its_time() -> None:
    slept: list[float] = []
    row = ScheduledSequence(1, "a", 0, (7, 8, 9), 0, 0, (), ())
    for token_seconds in (0.0, 0.5):
        model = NullModel((1, 2), 0.25, slept.append, token_seconds)
        model.forward(SchedulerOutput(1, (row,)))
    assert slept == [0.25, 1.75]


def test_figures() -> None:
    alone = ServerMark(seconds=2.0, cpu_seconds=1.0, num_steps=400, num_tokens=100_000)
    attached = ServerMark(seconds=2.0, cpu_seconds=1.5, num_steps=300, num_tokens=50_000)
    windows = [
        FrontWindow(2.0, 1.0, 30_000, 3_000, [0.001, 0.003], [0.5]),
        FrontWindow(2.0, 0.5, 20_000, 2_000, [0.002], []),
    ]
    found = summarise(alone, attached, windows)
    assert found.tokens_per_second == 25_000
    assert found.messages_per_token == 0.1
    assert (found.server_cpu, found.client_cpu, found.engine_cpu) == pytest.approx((30, 30, 10))
    assert (found.itl_p50, found.itl_p99, found.ttft_p50) == pytest.approx((2, 3, 500))
    assert found.steps_kept == 0.75
    result = FrontResult(LOAD, "library", 2, (found, found))
    assert json.loads(json.dumps(document(result)))["medians"]["steps_kept"] == 0.75


def test_quantiles() -> None:
    assert [quantile((3, 1, 2), share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 2, 3, 3]
    assert math.isnan(quantile((), 0.5))


@pytest.mark.parametrize(
    "words", [("--streams=0",), ("--step-ms=nan",), ("--seconds=0",), ("--client-processes=65",)]
)
def test_a_bad_number_is_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "front", *words]) == 2
    assert words[0].partition("=")[0] in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--streams=2", "--output-tokens=20", "--rounds=1", "--seconds=0.3", "--client-processes=2")
    assert main(["bench", "front", *words, "--json"]) == 0
    medians = json.loads(capsys.readouterr().out)["medians"]
    assert medians["tokens_per_second"] > 0
    assert 0 < medians["messages_per_token"] <= 1
