"""An EngineClient that follows a script: no model, no thread, no clock.

A request's script is a list of steps. An event is delivered, an exception is raised, and `PAUSE` holds
the stream until the test resumes it or the request is aborted. Every request and abort is
recorded, and `reached` lets a test wait for a phase instead of sleeping.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path

from pageturner.policies.views import Rates
from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    FinishedEvent,
    FinishReason,
    RequestTimings,
    SampledToken,
    SchedulerStats,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from pageturner.service.engine.api import (
    AbortOutcome,
    AcceptedEvent,
    Activity,
    AdapterFigures,
    AdapterInfo,
    ChatMessage,
    ChatPrompt,
    Condition,
    ContinuationScore,
    DrainOutcome,
    EngineHealth,
    GenerationRequest,
    HandedBlock,
    Inspection,
    ModelInfo,
    PolicyChange,
    PrefillOrder,
    PrefixSummary,
    Prompt,
    RecentLoad,
    SchedulerInspection,
    ScoreAnswer,
    ScoreRequest,
    ServerInfo,
    StreamEvent,
    TextPrompt,
)
from pageturner.service.engine.instruments import OTHER
from pageturner.service.engine.prompt_limits import InputLimits, PromptLimits
from pageturner.service.engine.tenants import Cause, TenantReport, TenantsReport
from pageturner.service.errors import (
    AdapterNotFound,
    Draining,
    DuplicateRequest,
    EngineDead,
    InvalidArgument,
    ModelNotFound,
    NotRecorded,
    PageturnerError,
    RequestAborted,
    StaleRevision,
)
from pageturner.service.identity import ANONYMOUS, Identity, scoped_id
from pageturner.service.policy_host.reports import Disagreement, PoliciesInfo, PolicyInfo, ShadowInfo
from support.patience import PATIENCE_SECONDS

VOCAB_SIZE = 0x110000
MAX_N = 8
MAX_MODEL_LEN = 4096
DEFAULT_MAX_TOKENS = 4
DRAWN_SEED = 1234
ENDED_TEXT = "the server is shutting down; this request was not done in time"


UNLIMITED = PromptLimits(1 << 30, 1 << 30, 1 << 30)

POLICIES = PoliciesInfo(
    3,
    (
        PolicyInfo("queue", "fcfs", {}, ("fcfs", "priority")),
        PolicyInfo(
            "admission",
            "full-prompt",
            {"watermark": 0.03, "strict": True},
            ("full-prompt",),
            is_quarantined=True,
            num_faults=7,
            last_fault="raised ValueError()",
            shadow=ShadowInfo(
                "first-chunk", {"x": 1}, 20, 4, (Disagreement("admission", "r1", "wait", "admit"),), 2, "no"
            ),
        ),
    ),
)


class Pause(Enum):
    PAUSE = "pause"


PAUSE = Pause.PAUSE
Step = StreamEvent | Exception | Pause
Script = Callable[[GenerationRequest, tuple[int, ...]], Iterable[Step]]


def accepted(request: GenerationRequest, token_ids: tuple[int, ...]) -> AcceptedEvent:
    seed = DRAWN_SEED if request.params.seed is None else request.params.seed
    max_tokens = request.params.max_tokens or DEFAULT_MAX_TOKENS
    return AcceptedEvent(request.request_id, seed, len(token_ids), max_tokens)


def finished(request: GenerationRequest, num_prompt_tokens: int, num_output_tokens: int) -> FinishedEvent:
    return FinishedEvent(
        request.request_id,
        Usage(num_prompt_tokens, num_prompt_tokens // 2, num_output_tokens),
        RequestTimings(0.25, 0.5, 2.0, num_swaps=3, num_recomputes=2, num_tail_reclaims=1),
        policies={policy.axis: policy.name for policy in POLICIES.axes},
    )


def echo(request: GenerationRequest, token_ids: tuple[int, ...]) -> Sequence[Step]:
    """Each choice repeats the prompt's characters, round and round, one token each, up to max_tokens.

    Choices take turns. A stop string ends its choice, as one of one character would.
    """
    start = accepted(request, token_ids)
    steps: list[Step] = [start]
    running = set(range(request.params.n))
    num_output_tokens = 0
    for position in range(start.max_tokens):
        token_id = token_ids[position % len(token_ids)]
        for index in sorted(running):
            text = chr(token_id)
            num_output_tokens += 1
            if text in request.params.stop:
                running.remove(index)
                steps.append(ChoiceFinishedEvent(request.request_id, index, FinishReason.STOP, matched=text))
            else:
                token = _token(request, token_id)
                steps.append(TokenEvent(request.request_id, index, (token,), text))
    steps.extend(
        ChoiceFinishedEvent(request.request_id, index, FinishReason.LENGTH) for index in sorted(running)
    )
    return [*steps, finished(request, len(token_ids), num_output_tokens)]


def _token(request: GenerationRequest, token_id: int) -> SampledToken:
    if request.params.logprobs is None:
        return SampledToken(token_id)
    top = tuple(TokenLogprob(token_id + rank, -0.5 - rank) for rank in range(request.params.logprobs))
    return SampledToken(token_id, -0.5, top)


class FakeStream:
    def __init__(self, engine: FakeEngine, request_id: str, key: str, steps: Iterable[Step]) -> None:
        self._engine = engine
        self._request_id = request_id
        self._key = key
        self._steps = steps
        self.aborted = asyncio.Event()
        self.abort_error: PageturnerError = RequestAborted("aborted by id")
        self.resumed = asyncio.Event()
        self.num_taken = 0
        self.is_closed = False

    @property
    def request_id(self) -> str:
        return self._request_id

    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        for step in self._steps:
            if self.aborted.is_set():
                raise self.abort_error
            self.num_taken += 1
            if step is PAUSE:
                self._engine.mark(f"paused {self._request_id}")
                await _first_of(self.aborted, self.resumed, self._engine.died)
                self.resumed.clear()
                if self._engine.died.is_set():
                    raise EngineDead("secret: Traceback of a step")
            elif isinstance(step, Exception):
                self._engine.live.pop(self._key, None)
                raise step
            else:
                if isinstance(step, FinishedEvent):
                    self._engine.live.pop(self._key, None)
                    self._engine.ended.add(self._key)
                yield step

    async def aclose(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            if self._key in self._engine.live:
                await self._engine.abort(self._key)
            self._engine.unread.discard(self)
            self._engine.is_read.set()
            self._engine.mark(f"closed {self._request_id}")


class FakeEngine:
    """script: what each accepted request does.

    refusal: raised by submit. hold_submits: submit never returns. abort_hops: how often an abort
    lets the event loop go round before it is done.
    """

    def __init__(self, script: Script = echo) -> None:
        self.script = script
        self.input_limits = InputLimits(UNLIMITED, UNLIMITED)
        self.refusal: Exception | None = None
        self.hold_submits = False
        self.abort_hops = 0
        self.requests: list[GenerationRequest] = []
        self.aborts: list[str] = []
        self.live: dict[str, FakeStream] = {}
        self.ended: set[str] = set()
        self.unread: set[FakeStream] = set()
        self.is_read = asyncio.Event()
        self.died = asyncio.Event()
        self.stats = SchedulerStats()
        self.recent = RecentLoad()
        self.reason = "the fake was told so"
        self.tenant_reports: tuple[TenantReport, ...] = ()
        self.flight: bytes | None = None
        self.loaded: dict[str, AdapterInfo] = {}
        self.adapter_folder: Path | None = None
        self.done = Activity(EngineHealth.SERVING, 60.25)
        self.inspection = Inspection(SchedulerInspection())
        self.orders: list[PrefillOrder] = []
        self.handed_over: list[HandedBlock | PageturnerError] = []
        self.summary = PrefixSummary.of(1, 16, "key", [bytes(16), bytes([1]) * 16])
        self.policies_info = POLICIES
        self.policy_changes: list[PolicyChange] = []
        self._health = EngineHealth.SERVING
        self._health_changed = asyncio.Event()
        self._marks: dict[str, asyncio.Event] = {}

    def mark(self, phase: str) -> None:
        self._marks.setdefault(phase, asyncio.Event()).set()

    async def reached(self, phase: str) -> None:
        """Wait until this has happened, once more if it was waited for before: submitting, paused, aborting,
        aborted or closed, and the request's id."""
        mark = self._marks.setdefault(phase, asyncio.Event())
        async with asyncio.timeout(PATIENCE_SECONDS):
            await mark.wait()
        mark.clear()

    def resume(self, request_id: str) -> None:
        """Of every tenant that has one of this id."""
        for stream in self.live.values():
            if stream.request_id == request_id:
                stream.resumed.set()

    def set_health(self, health: EngineHealth) -> None:
        self._health = health
        self._health_changed.set()
        self._health_changed = asyncio.Event()

    def die(self) -> None:
        self.died.set()
        self.set_health(EngineHealth.DEAD)

    # EngineClient

    @property
    def health(self) -> EngineHealth:
        return self._health

    @property
    def condition(self) -> Condition:
        is_serving = self._health is EngineHealth.SERVING
        return Condition(self._health, "" if is_serving else self.reason, len(self.live))

    async def wait_for_health_change(self, known: EngineHealth) -> EngineHealth:
        while self._health is known:
            await self._health_changed.wait()
        return self._health

    @property
    def limits(self) -> InputLimits:
        return self.input_limits

    async def submit(self, request: GenerationRequest) -> FakeStream:
        if self._health is not EngineHealth.SERVING:
            raise Draining("the engine takes no new requests")
        self.requests.append(request)
        self.mark(f"submitting {request.request_id}")
        if self.refusal is not None:
            raise self.refusal
        request.check_names()
        if request.model not in ("", self.models()[0].name):
            raise ModelNotFound(request.model, self.models()[0].name)
        key = scoped_id(request.identity.tenant, request.request_id)
        if key in self.live:
            raise DuplicateRequest(request.request_id)
        request.params.check(VOCAB_SIZE, MAX_N)
        token_ids = await self.tokenize(request.prompt)
        if len(token_ids) >= MAX_MODEL_LEN:
            raise InvalidArgument("prompt", f"{len(token_ids)} tokens; at most {MAX_MODEL_LEN - 1} fit")
        if self.hold_submits:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.shield(self.abort(key))
        stream = FakeStream(self, request.request_id, key, self.script(request, token_ids))
        self.live[key] = stream
        self.unread.add(stream)
        return stream

    async def score(self, request: ScoreRequest) -> ScoreAnswer:
        """Of ids alone: each token has the log-probability of minus its id."""
        scores = []
        for continuation in request.continuations:
            assert not isinstance(continuation, str), "the fake has no tokenizer for continuations"
            tokens = tuple(SampledToken(token_id, -float(token_id)) for token_id in continuation)
            scores.append(ContinuationScore(-float(sum(continuation)), is_greedy=False, tokens=tokens))
        usage = Usage(1, 0, sum(len(score.tokens) for score in scores))
        return ScoreAnswer(request.request_id, tuple(scores), usage, RequestTimings(0.0, 0.0, 0.0, 0, 0, 0))

    async def drain(self, grace_seconds: float) -> DrainOutcome:
        self.set_health(EngineHealth.DRAINING)
        num_live = len(self.live)
        try:
            async with asyncio.timeout(grace_seconds):
                while self.unread:
                    self.is_read.clear()
                    await self.is_read.wait()
        except TimeoutError:
            left = list(self.live)
            for request_id in left:
                await self.abort(request_id, Draining(ENDED_TEXT))
            return DrainOutcome(num_live - len(left), len(left))
        return DrainOutcome(num_live, 0)

    async def abort(
        self, request_id: str, error: PageturnerError | None = None, *, tenant: str = ""
    ) -> AbortOutcome:
        request_id = scoped_id(tenant, request_id)
        self.mark(f"aborting {request_id}")
        for _ in range(self.abort_hops):
            await asyncio.sleep(0)
        self.aborts.append(request_id)
        self.mark(f"aborted {request_id}")
        if request_id in self.ended:
            return AbortOutcome.ALREADY_FINISHED
        stream = self.live.pop(request_id, None)
        if stream is None:
            return AbortOutcome.NOT_FOUND
        self.ended.add(request_id)
        stream.abort_error = error or stream.abort_error
        stream.aborted.set()
        return AbortOutcome.ABORTED

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True, identity: Identity = ANONYMOUS
    ) -> tuple[int, ...]:
        """One token a character; a text that wants special tokens is not changed by them."""
        if isinstance(prompt, TextPrompt):
            prompt = prompt.text
        if isinstance(prompt, ChatPrompt):
            prompt = prompt.messages
        if isinstance(prompt, str):
            return tuple(map(ord, prompt if add_special_tokens else prompt.strip("^")))
        token_ids: list[int] = []
        parts: Sequence[int | ChatMessage] = prompt
        for position, part in enumerate(parts):
            if isinstance(part, ChatMessage):
                token_ids.extend(map(ord, f"<{part.role}>{part.content}"))
            elif part < VOCAB_SIZE:
                token_ids.append(part)
            else:
                raise InvalidArgument(
                    f"prompt.token_ids[{position}]", f"{part} is not in [0, {VOCAB_SIZE - 1}]"
                )
        return tuple(token_ids)

    async def render(self, prompt: Prompt, *, identity: Identity = ANONYMOUS) -> str:
        return f"rendered {prompt}"

    async def detokenize(self, token_ids: tuple[int, ...], *, identity: Identity = ANONYMOUS) -> str:
        for position, token_id in enumerate(token_ids):
            if token_id >= VOCAB_SIZE:
                raise InvalidArgument(f"token_ids[{position}]", f"{token_id} is not in [0, {VOCAB_SIZE - 1}]")
        return "".join(map(chr, token_ids))

    def models(self) -> tuple[ModelInfo, ...]:
        return (
            ModelInfo(
                name="echo",
                source="nowhere",
                architecture="EchoForCausalLM",
                backend="fake",
                dtype="float32",
                deterministic=True,
                vocab_size=VOCAB_SIZE,
                max_model_len=MAX_MODEL_LEN,
                num_layers=2,
                num_kv_heads=3,
                head_dim=64,
                num_parameters=134_515_008,
                eos_token_ids=(2, 3),
                has_chat_template=True,
                adapters=tuple(self.loaded),
            ),
        )

    def server_info(self) -> ServerInfo:
        return ServerInfo(
            version="0.1.0",
            start_seconds=1.5,
            uptime_seconds=60.25,
            block_size=16,
            num_blocks=64,
            num_host_blocks=128,
            block_bytes=1 << 19,
            max_num_seqs=32,
            max_num_batched_tokens=512,
            kernels="reference",
            rates=Rates(),
            config={"cache.block_size": "16"},
            kv_dtype="int8",
        )

    def policies(self) -> PoliciesInfo:
        return self.policies_info

    async def set_policies(self, change: PolicyChange) -> PoliciesInfo:
        """Takes any name on its two axes."""
        self.policy_changes.append(change)
        info = self.policies_info
        for axis in change.policies:
            if axis not in ("queue", "admission"):
                raise InvalidArgument(f"policies[{axis}]", "no such axis")
        if change.expected_revision not in (None, info.revision):
            raise StaleRevision(change.expected_revision or 0, info.revision)
        axes = [
            replace(axis, name=change.policies[axis.axis].name, options=change.policies[axis.axis].options)
            if axis.axis in change.policies
            else axis
            for axis in info.axes
        ]
        self.policies_info = PoliciesInfo(info.revision + 1, tuple(axes))
        return self.policies_info

    def load(self) -> SchedulerStats:
        return self.stats

    def activity(self) -> Activity:
        return replace(self.done, health=self._health)

    async def inspect(self) -> Inspection:
        return self.inspection

    async def prefix_summary(self) -> PrefixSummary:
        return self.summary

    async def prefill(self, order: PrefillOrder) -> AsyncGenerator[HandedBlock, None]:
        self.orders.append(order)
        for item in self.handed_over:
            if isinstance(item, PageturnerError):
                raise item
            yield item

    def recent_load(self) -> RecentLoad:
        return self.recent

    def tenants(self, limit: int) -> TenantsReport:
        return TenantsReport(self.tenant_reports[:limit], len(self.tenant_reports), {Cause.QUEUE_SHARE: 3})

    async def load_adapter(self, name: str, folder: Path) -> AdapterInfo:
        """Takes any folder whose name does not begin with `bad`."""
        if folder.name.startswith("bad"):
            raise InvalidArgument("path", "use_dora: True: DoRA scales the columns of weights")
        self.loaded[name] = AdapterInfo(name, str(folder), "0" * 32, 8, ("q_proj", "v_proj"), 4096)
        return self.loaded[name]

    async def unload_adapter(self, name: str, wait_seconds: float) -> int:
        if name not in self.loaded:
            raise AdapterNotFound(name)
        del self.loaded[name]
        return 0 if wait_seconds else 2

    def adapters(self) -> tuple[AdapterInfo, ...]:
        return tuple(self.loaded.values())

    def adapter_figures(self) -> AdapterFigures:
        return AdapterFigures(
            len(self.loaded),
            len(self.loaded),
            num_bytes=4096 * len(self.loaded),
            num_reads_total=7,
            num_evictions_total=1,
            memory_bytes=1 << 20,
            num_loads_total=9,
            num_unloads_total=9 - len(self.loaded),
            requests={"sql": 1, OTHER: 0},
            requests_total={"sql": 5, OTHER: 2},
        )

    async def flight_record(self) -> bytes:
        if self.flight is None:
            raise NotRecorded("nothing is recorded")
        return self.flight


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
