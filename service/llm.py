"""The engine in this process, without a server: ten lines to a first answer.

    from pageturner.service.llm import LLM

    with LLM() as llm:
        for completion in llm.generate(["Once upon a time", "The sea is"], max_tokens=32):
            print(completion.text)

The scheduler, the KV cache and the policies are those of the service. What is given passes through the
messages of the wire, so that this takes what a client takes and refuses what the server refuses, in the
same words.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self, TypeVar, Unpack

from structlog.typing import FilteringBoundLogger

from pageturner.policies.spec import PolicySpec
from pageturner.service.client import admin_calls
from pageturner.service.client.messages import build
from pageturner.service.client.prompts import to_chat, to_prompt
from pageturner.service.client.to_wire import to_request, to_score_request
from pageturner.service.client.values import Completion, Options, PromptLike, ScoreOptions, Turn
from pageturner.service.config import LoadedConfig, cache_directory, load_config
from pageturner.service.core.clock import MonotonicClock
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.core.prefix_summary import PrefixSummary
from pageturner.service.engine.api import (
    AdapterInfo,
    GenerationRequest,
    ModelInfo,
    ScoreAnswer,
    ServerInfo,
    StreamEvent,
)
from pageturner.service.engine.async_engine import AsyncEngine
from pageturner.service.engine.metrics import Metrics
from pageturner.service.engine_thread import EngineThread, Progress
from pageturner.service.errors import InvalidArgument
from pageturner.service.identity import ANONYMOUS
from pageturner.service.logs.structured import warnings_on_standard_error
from pageturner.service.policy_host.reports import PoliciesInfo
from pageturner.service.rpc import from_wire
from pageturner.service.startup.wiring import build_service
from pageturner.v1 import admin_pb2, generation_pb2

_T = TypeVar("_T")
_Section = Mapping[str, object]
_NOTHING: _Section = MappingProxyType({})


class LLM:
    """A loaded model, used from any thread. Ended by `close`, as a context manager, or when it is collected.

    model: a folder of safetensors, a .gguf file or a hub id, or a mapping of keys of the configuration's
    section `[model]`; the embedded model if left out. cache, scheduler, speculation, policies, engine,
    grammars, adapters: the keys of those sections, as in `LLM(cache={"num_blocks": 96}, adapters={"load":
    {"sql": "adapters/sql"}})`. config: a TOML file; the environment (PAGETURNER_SECTION_KEY) goes over it,
    the arguments over both. logger: takes the log; if left out, warnings go to standard error.

    The process's environment stays as it is: unlike `pageturner serve`, this does not tell OpenMP how long
    its threads spin when they wait. Quantised products, the CPU's default, have threads of their own, which
    sleep soon. Where float32 or bfloat16 runs beside busy programs, set GOMP_SPINCOUNT=2000 before torch is
    imported.

    Raises ConfigError or ModelError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | _Section = _NOTHING,
        *,
        cache: _Section = _NOTHING,
        scheduler: _Section = _NOTHING,
        speculation: _Section = _NOTHING,
        policies: _Section = _NOTHING,
        engine: _Section = _NOTHING,
        grammars: _Section = _NOTHING,
        adapters: _Section = _NOTHING,
        config: Path | None = None,
        logger: FilteringBoundLogger | None = None,
    ) -> None:
        sections = {
            "model": model if isinstance(model, Mapping) else {"source": os.fspath(model)},
            "cache": cache,
            "scheduler": scheduler,
            "speculation": speculation,
            "policies": policies,
            "engine": engine,
            "grammars": grammars,
            "adapters": adapters,
        }
        given = {
            f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()
        }
        loaded = load_config(config, given=given)
        self._max_at_once = loaded.config.scheduler.max_waiting
        self._thread = EngineThread(_build(loaded, logger or warnings_on_standard_error()))
        self._finalizer = weakref.finalize(self, self._thread.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what runs, which raises Draining, and the engine's threads. Closing twice is no error."""
        self._finalizer()

    def generate(
        self,
        prompts: str | Iterable[PromptLike],
        *,
        on_progress: Progress | None = None,
        **options: Unpack[Options],
    ) -> list[Completion]:
        """The whole answers, in the order of the prompts, which are computed together.

        prompts: texts, lists of token ids, conversations; a text alone stands for a list of one. The
        options hold for each; timeout_seconds counts from when a prompt is queued. If one fails, the others
        are aborted and its error is raised, with a note of its position.
        on_progress: called in this thread; what it raises ends the call.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        elif isinstance(prompts, Mapping | bytes):
            raise TypeError(f"prompts is a {type(prompts).__name__}, not a text or a list of prompts")
        requests = []
        for position, prompt in enumerate(prompts):
            try:
                requests.append(_to_request(self._engine, to_prompt(prompt), options))
            except Exception as error:
                error.add_note(f"prompts[{position}]")
                raise
        if options.get("request_id") and len(requests) > 1:
            raise InvalidArgument("request_id", f"one id cannot name {len(requests)} requests")
        return self._thread.answer_all(requests, self._max_at_once, on_progress)

    def chat(
        self,
        messages: Iterable[Turn],
        *,
        template_variables: Mapping[str, object] = _NOTHING,
        continue_final_message: bool = False,
        tools: Iterable[object] = (),
        template: str = "",
        **options: Unpack[Options],
    ) -> Completion:
        """The answer to one conversation, through the model's chat template, as `Client.chat` has it."""
        chat = to_chat(messages, template_variables, continue_final_message, tools, template)
        return self._thread.answer(_to_request(self._engine, chat, options))

    def stream(self, prompt: PromptLike, **options: Unpack[Options]) -> Generator[StreamEvent, None, None]:
        """The answer as it comes, to a prompt or a conversation: AcceptedEvent; TokenEvents and a
        ChoiceFinishedEvent for each choice; FinishedEvent.

        Leaving it aborts the request. A reader may take its time: what is generated meanwhile is kept.
        """
        return self._follow(_to_request(self._engine, to_prompt(prompt), options))

    def score(
        self,
        prompt: PromptLike,
        continuations: Iterable[str | Iterable[int]],
        **options: Unpack[ScoreOptions],
    ) -> ScoreAnswer:
        """How likely continuations of a prompt are, texts or lists of token ids, whose KV they share.

        A text is tokenized by itself: a space that belongs to it stands at its beginning.
        """
        message, timeout_seconds = to_score_request(to_prompt(prompt), continuations, options)
        limits = self._engine.limits.generation
        request = from_wire.to_score_request(message, message.request_id, timeout_seconds, limits, ANONYMOUS)

        async def score() -> ScoreAnswer:
            try:
                return await self._engine.score(request)
            except InvalidArgument as error:
                raise from_wire.to_score_path(error, request.prompt) from error

        return self._thread.run(score())

    def tokenize(self, prompt: PromptLike, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The ids that a prompt becomes, a conversation through the model's chat template."""
        plain = from_wire.to_prompt(to_prompt(prompt), self._engine.limits.tokenization)

        async def tokenize() -> tuple[int, ...]:
            try:
                return await self._engine.tokenize(plain, add_special_tokens=add_special_tokens)
            except InvalidArgument as error:
                raise from_wire.to_wire_path(error, plain) from error

        return self._thread.run(tokenize())

    def render(self, prompt: PromptLike) -> str:
        """The text that is tokenized of a prompt: of a conversation, what the model's template writes."""
        plain = from_wire.to_prompt(to_prompt(prompt), self._engine.limits.tokenization)

        async def render() -> str:
            try:
                return await self._engine.render(plain)
            except InvalidArgument as error:
                raise from_wire.to_wire_path(error, plain) from error

        return self._thread.run(render())

    def detokenize(self, token_ids: Iterable[int]) -> str:
        """The text of ids, special tokens left out."""
        message = build(generation_pb2.DetokenizeRequest, token_ids=token_ids)
        return self._thread.run(self._engine.detokenize(tuple(message.token_ids)))

    @property
    def model(self) -> ModelInfo:
        """The model that answers."""
        return self._engine.models()[0]

    def info(self) -> ServerInfo:
        """Version, sizes, measured rates, the configuration in force."""
        return self._engine.server_info()

    def load(self) -> SchedulerStats:
        """The scheduler's gauges and counters."""
        return self._engine.load()

    def prefix_summary(self) -> PrefixSummary:
        """Which prompts' beginnings the prefix cache holds, as fingerprints of blocks."""
        return self._thread.run(self._engine.prefix_summary())

    def policies(self) -> PoliciesInfo:
        """The policy of each axis, and how the shadows compare."""
        return self._engine.policies()

    def set_policies(
        self,
        policies: Mapping[str, PolicySpec] = admin_calls.NO_POLICIES,
        *,
        shadows: Mapping[str, PolicySpec | None] = admin_calls.NO_POLICIES,
        preset: str = "",
        expected_revision: int | None = None,
    ) -> PoliciesInfo:
        """As `Client.set_policies`, of classes of one's own too (`"module:Class"`)."""
        request = admin_calls.set_policies(policies, shadows, preset, expected_revision).request
        assert isinstance(request, admin_pb2.SetPoliciesRequest)
        return self._thread.run(self._engine.set_policies(from_wire.to_policy_change(request, "LLM")))

    def load_adapter(self, name: str, folder: str | os.PathLike[str]) -> AdapterInfo:
        """Let requests name the adapter in any folder. Raises InvalidArgument for one that is not served."""
        return self._thread.run(self._engine.load_adapter(name, Path(folder)))

    def unload_adapter(self, name: str, wait_seconds: float = 0.0) -> int:
        """Let no request name it any more; how many still have it after so long."""
        return self._thread.run(self._engine.unload_adapter(name, wait_seconds))

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The adapters that requests may name, then those that wait for the end of their last request."""
        return self._thread.run(_now(self._engine.adapters))

    def _follow(self, request: GenerationRequest) -> Generator[StreamEvent, None, None]:
        """Holds this LLM for as long as the stream is held: `LLM().stream(...)` must not end it."""
        yield from self._thread.stream(request)

    @property
    def _engine(self) -> AsyncEngine:
        return self._thread.engine


async def _now(look: Callable[[], _T]) -> _T:
    """What a look finds on the event loop that owns what it looks at."""
    return look()


def _build(loaded: LoadedConfig, logger: FilteringBoundLogger) -> AsyncEngine:
    clock = MonotonicClock()
    # In a thread that ends, with the OpenMP team that each thread has that ran torch.
    with ThreadPoolExecutor(1, "pageturner-load") as loader:
        return loader.submit(
            build_service, loaded, cache_directory(), clock, clock.now(), logger, Metrics()
        ).result()


def _to_request(engine: AsyncEngine, prompt: generation_pb2.Prompt, options: Options) -> GenerationRequest:
    message, timeout_seconds = to_request(generation_pb2.GenerateRequest, prompt, options)
    return from_wire.to_generation_request(
        message, message.request_id, timeout_seconds, engine.limits.generation, ANONYMOUS
    )
