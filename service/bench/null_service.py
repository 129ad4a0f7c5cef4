"""A service whose model costs nothing, or a fixed time a step: all that is left is the host's work.

Scheduler, prompts, text and gRPC are those that serve. The tokens are those of a text, over and over, so that
text is made of them as it would be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from structlog.typing import FilteringBoundLogger

from pageturner import __version__
from pageturner.policies import registry
from pageturner.policies.views import Rates
from pageturner.service.core.clock import Clock
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.outputs import (
    BlockCopies,
    FinishedEvent,
    SampledSequence,
    SampledToken,
    SchedulerOutput,
    SchedulerStats,
)
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.engine.api import ModelInfo, ServerInfo
from pageturner.service.engine.async_engine import AsyncEngine
from pageturner.service.engine.engine import Engine
from pageturner.service.engine.metrics import Metrics
from pageturner.service.engine.options import EngineOptions
from pageturner.service.engine.step_computation import DirectSteps
from pageturner.service.engine.step_thread import StepThread
from pageturner.service.engine.text_output import TextOutput
from pageturner.service.engine.thread_messages import EngineOutput, Shutdown, Submit
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.model.artifacts import ModelArtifacts
from pageturner.service.model.loader import load_artifacts
from pageturner.service.model.options import ModelOptions

BLOCK_SIZE = 16

TEXT = (
    "The librarian turned a page, and then another; by the window a clock counted what was left of the "
    "afternoon. Nobody had asked for this book in twenty years — not since the flood of '06 — yet its "
    "margins were full of notes: dates, names, a recipe for quince jelly (sugar: 1.5 kg), half a letter. "
)
"""What the null model says, and what it is asked."""


@dataclass(frozen=True, slots=True)
class NullLoad:
    """So many requests at once, each of so many tokens in and out; a step of the model takes step_seconds,
    and token_seconds for each token in it. max_waiting: requests that may wait."""

    num_streams: int
    prompt_tokens: int
    output_tokens: int
    step_seconds: float = 0.0
    token_seconds: float = 0.0
    max_waiting: int = SchedulerOptions().max_waiting

    @property
    def max_model_len(self) -> int:
        """Room for one request; a prompt of text may come out somewhat longer than it was meant."""
        return 2 * self.prompt_tokens + self.output_tokens + BLOCK_SIZE

    def scheduler_options(self) -> SchedulerOptions:
        """Everything runs at once, and waits for nothing but its turn to read its prompt."""
        return SchedulerOptions(
            max_model_len=self.max_model_len,
            max_num_seqs=self.num_streams,
            max_num_batched_tokens=max(512, 2 * self.num_streams),
            max_waiting=self.max_waiting,
        )

    def cache_options(self) -> CacheOptions:
        """Blocks for all of it, twice over."""
        return CacheOptions(2 * self.num_streams * -(-self.max_model_len // BLOCK_SIZE), BLOCK_SIZE)


class NullModel:
    """KV store, runner and sampler in one. Counts what it was asked for; from any thread."""

    def __init__(
        self,
        token_ids: Sequence[int],
        step_seconds: float,
        sleep: Callable[[float], object] = time.sleep,
        token_seconds: float = 0.0,
    ) -> None:
        self._tokens = tuple((SampledToken(token_id),) for token_id in token_ids)
        self._step_seconds = step_seconds
        self._token_seconds = token_seconds
        self._sleep = sleep
        self.num_steps = 0
        self.num_tokens = 0

    def apply(self, copies: BlockCopies) -> None:
        """There is no KV."""

    def forward(self, output: SchedulerOutput) -> bool:
        """Take as long as a step takes. There are no logits."""
        seconds = self._step_seconds + output.num_tokens * self._token_seconds
        if seconds:
            self._sleep(seconds)
        return True

    def note_sampled(self, sampled: tuple[SampledSequence, ...]) -> None:
        """No step is planned before the one before it is done."""

    def sample(self, logits: bool, output: SchedulerOutput) -> tuple[SampledSequence, ...]:
        """The text's next token for each row."""
        tokens, length = self._tokens, len(self._tokens)
        sampled = tuple(
            SampledSequence(row.seq_id, row.epoch, tokens[part.end % length])
            for part in output.scheduled
            for row in part.samples
        )
        self.num_steps += 1
        self.num_tokens += len(sampled)
        return sampled


@dataclass(frozen=True, slots=True)
class NullParts:
    """What services of one load are made of. tokenizer: the embedded model's."""

    load: NullLoad
    artifacts: ModelArtifacts
    tokenizer: Tokenizer
    clock: Clock
    logger: FilteringBoundLogger

    @classmethod
    def read(cls, load: NullLoad, cache_dir: Path, clock: Clock, logger: FilteringBoundLogger) -> NullParts:
        """Of the embedded model's files. Raises ModelError where it is not installed."""
        artifacts = load_artifacts(ModelOptions(), cache_dir)
        assert artifacts.tokenizer is not None, "the embedded model has a tokenizer"
        return cls(load, artifacts, Tokenizer(artifacts.tokenizer), clock, logger)

    def engine(self, metrics: Metrics) -> tuple[Engine, NullModel]:
        """A fresh engine, and its model."""
        load = self.load
        text = self.tokenizer.encode(TEXT)
        model = NullModel(text, load.step_seconds, token_seconds=load.token_seconds)
        rates = Rates()
        if load.token_seconds:
            rates = replace(
                rates,
                prefill_seconds_fixed=load.step_seconds,
                prefill_seconds_per_token=load.token_seconds,
            )
        scheduler = Scheduler(
            self.load.scheduler_options(),
            self.load.cache_options(),
            registry.default_policies(),
            TextOutput(self.tokenizer),
            rates,
        )
        engine = Engine(
            scheduler,
            DirectSteps(model, model, model),
            clock=self.clock,
            options=EngineOptions(),
            metrics=metrics,
            logger=self.logger,
        )
        return engine, model

    def service(self, metrics: Metrics) -> tuple[AsyncEngine, NullModel]:
        """A fresh engine for a gRPC server to attach, not started, and its model."""
        engine, model = self.engine(metrics)
        limits, cache = self.load.scheduler_options(), self.load.cache_options()
        service = AsyncEngine(
            engine,
            self.tokenizer,
            model=_describe_model(self.tokenizer, limits.max_model_len),
            server_info=_describe_server(limits, cache),
            scheduler_options=limits,
            options=EngineOptions(),
            clock=self.clock,
            random=Random(),
            logger=self.logger,
        )
        return service, model

    def prompt(self, number: int) -> str:
        """The text that stream `number` asks about: each its own, of about prompt_tokens."""
        per_token = len(TEXT) / len(self.tokenizer.encode(TEXT))
        length = round(self.load.prompt_tokens * per_token)
        return (f"{number}: " + TEXT * (1 + length // len(TEXT)))[: max(8, length)]


def _describe_model(tokenizer: Tokenizer, max_model_len: int) -> ModelInfo:
    return ModelInfo(
        name="null",
        source="null",
        architecture="null",
        backend="null",
        dtype="none",
        deterministic=True,
        vocab_size=tokenizer.vocab_size,
        max_model_len=max_model_len,
        num_layers=0,
        num_kv_heads=0,
        head_dim=0,
        num_parameters=0,
        eos_token_ids=(),
        has_chat_template=False,
    )


def _describe_server(limits: SchedulerOptions, cache: CacheOptions) -> ServerInfo:
    return ServerInfo(
        version=__version__,
        start_seconds=0.0,
        uptime_seconds=0.0,
        block_size=cache.block_size,
        num_blocks=cache.num_blocks,
        num_host_blocks=cache.num_host_blocks,
        block_bytes=0,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        kernels="null",
        rates=Rates(),
        config={},
    )


class AloneRun:
    """The same load on an engine's thread with no client: each request that ends is followed by another."""

    def __init__(self, parts: NullParts) -> None:
        engine, self.model = parts.engine(Metrics())
        self._parts = parts
        self._prompts = tuple(parts.tokenizer.encode(parts.prompt(n)) for n in range(parts.load.num_streams))
        self._num_sent = 0
        self.fault: BaseException | None = None
        self._thread = StepThread(engine, parts.clock, on_outputs=self._on_outputs, on_end=self._on_end)

    def start(self) -> None:
        """Start the thread with every stream's first request."""
        for number in range(self._parts.load.num_streams):
            self._submit(number)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step under way."""
        self._thread.send(Shutdown())
        self._thread.join(60.0)

    def _submit(self, number: int) -> None:
        self._num_sent += 1
        prompt = self._prompts[number % len(self._prompts)]
        params = SamplingParams(max_tokens=self._parts.load.output_tokens, ignore_eos=True)
        request_id = f"{number}:{self._num_sent}"
        self._thread.send(Submit(NewRequest(request_id, prompt, params, number, self._parts.clock.now())))

    def _on_end(self, fault: BaseException | None) -> None:
        self.fault = fault

    def _on_outputs(self, outputs: Iterable[EngineOutput], stats: SchedulerStats) -> None:
        for output in outputs:
            if type(output) is FinishedEvent:
                self._submit(int(output.request_id.partition(":")[0]))
