"""The engine over the real scheduler, real block traffic and real text, in a pool far too small."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_model import FakeModel, Stop, expected_tokens
from support.scripted import recording_logger
from support.tiny_tokenizers import byte_level_bpe

from pageturner.policies import registry
from pageturner.policies.views import Rates
from pageturner.service.core.clock import ManualClock
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.outputs import (
    BlockCopies,
    FinishedEvent,
    SampledSequence,
    SchedulerOutput,
    TokenEvent,
)
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.engine.api import AcceptedEvent, GenerationRequest, ModelInfo, ServerInfo
from pageturner.service.engine.async_engine import AsyncEngine
from pageturner.service.engine.engine import Engine
from pageturner.service.engine.metrics import Metrics
from pageturner.service.engine.options import EngineOptions
from pageturner.service.engine.step_computation import DirectSteps, StepComputation, ThreadedSteps
from pageturner.service.engine.text_output import TextOutput
from pageturner.service.engine.thread_messages import (
    Abort,
    EngineOutput,
    Pause,
    Resume,
    Submit,
    SubmitRefused,
)
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.errors import PageturnerError, RequestAborted, StepFailed

TOKENIZER = Tokenizer(byte_level_bpe())
NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE = 12, 6, 4
OPTIONS = EngineOptions(
    stream_buffer_tokens=16, max_consecutive_failures=500, slow_consumer_timeout_seconds=5
)


class PagedModel:
    """The fake model behind the engine's three interfaces; fails a forward that holds a poisoned request."""

    def __init__(self) -> None:
        self._model = FakeModel(NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE)
        self.poison: set[str] = set()
        self.fails_once = False

    def apply(self, copies: BlockCopies) -> None:
        self._model.kv_cache.apply(copies)

    def forward(self, output: SchedulerOutput) -> SchedulerOutput:
        fails_once, self.fails_once = self.fails_once, False
        if fails_once or any(part.request_id in self.poison for part in output.scheduled):
            raise RuntimeError("poison")
        return output

    def note_sampled(self, sampled: tuple[SampledSequence, ...]) -> None:
        """Nothing: the fake model knows what it sampled."""

    def sample(self, logits: SchedulerOutput, output: SchedulerOutput) -> tuple[SampledSequence, ...]:
        return self._model.compute(output)


WAYS: dict[str, tuple[int, Callable[[StepComputation], StepComputation]]] = {
    "depth 0": (0, lambda steps: steps),
    "depth 1": (1, lambda steps: steps),
    "depth 1 in a thread": (1, ThreadedSteps),
}
"""How deep the engine goes, and how its steps are computed."""


@dataclass
class Bench:
    """Everything from the scheduler down, real but for the model."""

    clock: ManualClock = field(default_factory=lambda: ManualClock(100.0))
    text: TextOutput = field(default_factory=lambda: TextOutput(TOKENIZER))
    model: PagedModel = field(default_factory=PagedModel)
    way: str = "depth 0"

    def __post_init__(self) -> None:
        depth, steps = WAYS[self.way]
        self.scheduler = Scheduler(
            SchedulerOptions(max_model_len=40, max_num_seqs=6, max_num_batched_tokens=16, max_waiting=64),
            CacheOptions(NUM_BLOCKS, BLOCK_SIZE, NUM_HOST_BLOCKS),
            registry.default_policies(),
            self.text,
            Rates(),
            depth=depth,
            hash_key=b"test",
        )
        self.engine = Engine(
            self.scheduler,
            steps(DirectSteps(self.model, self.model, self.model)),
            clock=self.clock,
            options=OPTIONS,
            metrics=Metrics(),
            logger=recording_logger()[0],
            depth=depth,
        )

    def check_empty(self) -> None:
        """Every block is back and every sequence's text is forgotten."""
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert (stats.num_blocks_used, stats.num_host_blocks_used) == (0, 0)
        assert len(self.text) == 0


operations = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 9)),
    st.tuples(st.just("submit"), st.integers(0, 9)),
    st.tuples(st.sampled_from(["abort", "pause", "resume", "poison"]), st.integers(0, 9)),
    st.tuples(st.sampled_from(["fail", "step", "step"]), st.just(0)),
    st.tuples(st.just("advance"), st.integers(1, 4)),
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(WAYS)), st.lists(operations, max_size=50))
def test_every_accepted_request_ends_once_with_the_tokens_of_unlimited_memory(
    way: str, script: list[tuple[str, int]]
) -> None:
    bench = Bench(way=way)
    outputs: list[EngineOutput] = []
    requests: dict[str, NewRequest] = {}
    for operation, argument in script:
        name = str(argument)
        match operation:
            case "submit" if name not in requests:
                params = SamplingParams(n=1 + argument % 3, max_tokens=3 + 2 * argument)
                prompt = tuple(i % 3 for i in range(argument, 2 * argument + 1))
                deadline = bench.clock.now() + 8 if argument % 4 == 0 else None
                now = bench.clock.now()
                requests[name] = NewRequest(name, prompt, params, argument, now, deadline=deadline)
                outputs += bench.engine.apply(Submit(requests[name]))
            case "abort":
                outputs += bench.engine.apply(Abort(name, RequestAborted("asked for")))
            case "pause":
                outputs += bench.engine.apply(Pause(name, bench.clock.now() + 5))
            case "resume":
                outputs += bench.engine.apply(Resume(name))
            case "poison":
                bench.model.poison.add(name)
            case "fail":
                bench.model.fails_once = True
                outputs += bench.engine.step()
            case "step":
                outputs += bench.engine.step()
            case "advance":
                bench.clock.advance(float(argument))
    for _ in range(2000):
        if bench.engine.seconds_to_next_step() is None:
            break
        bench.clock.advance(0.01 if bench.scheduler.has_work() else 1.0)
        outputs += bench.engine.step()
    assert bench.engine.seconds_to_next_step() is None
    bench.engine.close()
    bench.check_empty()
    check_outputs(outputs, requests)


def check_outputs(outputs: list[EngineOutput], requests: dict[str, NewRequest]) -> None:
    accepted = Counter(output.request_id for output in outputs if isinstance(output, AcceptedEvent))
    finished = {output.request_id: output for output in outputs if isinstance(output, FinishedEvent)}
    num_finished = sum(isinstance(output, FinishedEvent) for output in outputs)
    assert accepted.keys() == finished.keys()
    assert accepted.total() == num_finished == len(finished)
    assert (
        accepted.keys() | {o.request_id for o in outputs if isinstance(o, SubmitRefused)} == requests.keys()
    )
    for name, end in finished.items():
        params = requests[name].params
        assert params.max_tokens is not None
        for index in range(params.n):
            events = [
                output
                for output in outputs
                if isinstance(output, TokenEvent) and (output.request_id, output.index) == (name, index)
            ]
            tokens = [token.token_id for event in events for token in event.tokens]
            expected = expected_tokens(
                requests[name].prompt_token_ids, requests[name].seed, index, Stop(params.max_tokens)
            )
            assert tokens == expected[: len(tokens)]
            if end.error is None:
                assert tokens == expected
                assert "".join(event.text for event in events) == TOKENIZER.decode(expected)


@pytest.mark.parametrize("way", WAYS)
def test_only_the_request_that_fails_every_forward_ends_with_an_error(way: str) -> None:
    bench = Bench(way=way)
    for argument in range(6):
        params = SamplingParams(max_tokens=8)
        request = NewRequest(str(argument), (argument % 3,) * 5, params, argument, bench.clock.now())
        bench.engine.apply(Submit(request))
    bench.model.poison.add("3")
    outputs = [event for _ in range(200) for event in bench.engine.step()]
    errors = {e.request_id: type(e.error) for e in outputs if isinstance(e, FinishedEvent)}
    assert errors == {str(i): StepFailed if i == 3 else type(None) for i in range(6)}
    bench.engine.close()
    bench.check_empty()


MODEL = ModelInfo("tiny", "here", "Fake", "fake", "float32", True, 500, 40, 2, 1, 3, 0, (), False)
SERVER = ServerInfo("1", 0.5, 0.0, BLOCK_SIZE, NUM_BLOCKS, 0, 1, 6, 16, "torch", Rates(), {})


@pytest.mark.parametrize(("seed", "way"), list(enumerate(WAYS)))
async def test_64_streams_with_cancellations_get_their_own_tokens(seed: int, way: str) -> None:
    random = Random(seed)
    bench = Bench(way=way)
    engine = AsyncEngine(
        bench.engine,
        TOKENIZER,
        model=MODEL,
        server_info=SERVER,
        scheduler_options=SchedulerOptions(max_n=4),
        options=OPTIONS,
        clock=bench.clock,
        random=random,
        logger=recording_logger()[0],
    )
    await engine.start()

    async def use(i: int) -> bool:
        """Read one request to its end and check it."""
        prompt = tuple((i * j) % 3 for j in range(1 + i % 7))
        stream = await engine.submit(
            GenerationRequest(prompt, SamplingParams(max_tokens=12, n=1 + i % 2, seed=i))
        )
        try:
            tokens: dict[int, list[int]] = {index: [] for index in range(1 + i % 2)}
            async for event in stream:
                if isinstance(event, TokenEvent):
                    tokens[event.index] += [token.token_id for token in event.tokens]
        finally:
            await stream.aclose()
        return all(got == expected_tokens(prompt, i, index, Stop(12)) for index, got in tokens.items())

    tasks = [asyncio.ensure_future(use(i)) for i in range(64)]
    doomed = random.sample(range(64), 32)
    for i in doomed:
        for _ in range(random.randrange(3)):
            await asyncio.sleep(0)
        tasks[i].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    await engine.drain(grace_seconds=60.0)
    await engine.aclose()
    bench.check_empty()
    for i, result in enumerate(results):
        assert result is True or (
            i in doomed and isinstance(result, asyncio.CancelledError | PageturnerError)
        )
