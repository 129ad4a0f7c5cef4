"""The engine as its clients see it: what goes in, what comes out, and the one interface between.

`rpc` is written against this page alone, and tested against a fake of it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

from pageturner.policies.spec import PolicySpec
from pageturner.policies.views import Rates
from pageturner.service.core.inspection import BlockUse as BlockUse
from pageturner.service.core.inspection import RequestInfo as RequestInfo
from pageturner.service.core.inspection import RequestState as RequestState
from pageturner.service.core.inspection import SchedulerInspection as SchedulerInspection
from pageturner.service.core.options import SpeculationOptions as SpeculationOptions
from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    FinishedEvent,
    RequestTimings,
    SampledToken,
    SchedulerStats,
    ScoredTokensEvent,
    TokenEvent,
    Usage,
)
from pageturner.service.core.prefix_summary import PrefixChange as PrefixChange
from pageturner.service.core.prefix_summary import PrefixSummary as PrefixSummary
from pageturner.service.core.request import ResumedChoice as ResumedChoice
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.engine.adapter_reports import AdapterFigures as AdapterFigures
from pageturner.service.engine.adapter_reports import AdapterInfo as AdapterInfo
from pageturner.service.engine.conversation import ChatMessage as ChatMessage
from pageturner.service.engine.conversation import ChatPrompt as ChatPrompt
from pageturner.service.engine.conversation import ToolCall as ToolCall
from pageturner.service.engine.handover import HandedBlock as HandedBlock
from pageturner.service.engine.handover import PrefillOrder as PrefillOrder
from pageturner.service.engine.prompt_limits import InputLimits
from pageturner.service.engine.tenants import TenantsReport
from pageturner.service.errors import InvalidArgument, PageturnerError
from pageturner.service.identity import ANONYMOUS, Identity
from pageturner.service.policy_host.reports import PoliciesInfo

MAX_NAME_CHARACTERS = 256
"""Of an id, a model's name, a tenant or a salt: they travel in logs and metadata."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text with a choice. parse_special: special tokens that it spells are those tokens, else text."""

    text: str
    parse_special: bool = True


Prompt = str | TextPrompt | tuple[int, ...] | tuple[ChatMessage, ...] | ChatPrompt


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a client has of an answer that broke off; fields as those of `Resume` in `generation.proto`."""

    seed: int
    fingerprint: str
    choices: tuple[ResumedChoice, ...]
    max_tokens: int | None = None
    allow_inexact: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request as a client states it, before tokenizing."""

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str = ""
    """Chosen by the server if empty."""
    model: str = ""
    """Empty: whichever is served."""
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    bypass_prefix_cache: bool = False
    deadline_seconds: float | None = None
    """Time left from now, None for no limit."""
    trace_parent: str = ""
    """The W3C trace context of the call that brings it; empty where it is not traced."""
    resume: Resumption | None = None
    """What is known of the answer already; None for one that begins."""
    continuations: tuple[tuple[int, ...], ...] = ()
    """Token ids that are to be scored behind the prompt, `params.n` of them, in place of an answer."""
    adapter: str = ""
    """Name of a loaded adapter; empty for the model as it is."""
    hands_over: bool = False
    """Whether the prompt's KV goes to another server as it is made (see `engine.handover`)."""
    return_prompt: bool = False
    """Whether the AcceptedEvent says what was rendered of the prompt."""
    identity: Identity = ANONYMOUS
    """Who asks, as proved. Its tenant takes the place of `tenant` where authentication is on."""

    def check_names(self) -> None:
        """Raises InvalidArgument for an id, a model's or adapter's name, a tenant or a salt that is too
        long."""
        for name in ("request_id", "model", "tenant", "cache_salt", "adapter"):
            if len(getattr(self, name)) > MAX_NAME_CHARACTERS:
                raise InvalidArgument(name, f"longer than {MAX_NAME_CHARACTERS} characters")


@dataclass(frozen=True, slots=True)
class AcceptedEvent:
    """First message of every stream: the id and seed in force, and the size of the prompt.

    fingerprint: of what determines the tokens, for resuming the answer elsewhere; empty where it can't be.
    is_exact: a server of equal fingerprint would go on with exactly the tokens that come here.
    rendered_prompt: the text that was tokenized, if the request asked for it; empty for one of token ids.
    """

    request_id: str
    seed: int
    num_prompt_tokens: int
    max_tokens: int
    fingerprint: str = ""
    is_exact: bool = False
    rendered_prompt: str = ""


StreamEvent = AcceptedEvent | TokenEvent | ScoredTokensEvent | ChoiceFinishedEvent | FinishedEvent


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Continuations of one prompt, of which it is asked how likely they are; fields as of GenerationRequest.

    num_top: most likely tokens wanted beside each token's own.
    """

    prompt: Prompt
    continuations: tuple[str | tuple[int, ...], ...]
    num_top: int = 0
    request_id: str = ""
    model: str = ""
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    bypass_prefix_cache: bool = False
    deadline_seconds: float | None = None
    trace_parent: str = ""
    identity: Identity = ANONYMOUS
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """How likely a continuation is. logprob: the sum of its tokens'. is_greedy: greedy decoding gives it."""

    logprob: float
    is_greedy: bool
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class ScoreAnswer:
    """scores: of the continuations, in order. usage: the prompt counts once, continuations as output."""

    request_id: str
    scores: tuple[ContinuationScore, ...]
    usage: Usage
    timings: RequestTimings


class RequestStream(Protocol):
    """The events of one request, in order: Accepted, scores of the prompt, tokens and ends, Finished last.

    Iteration raises the request's PageturnerError in place of a Finished that carries one. Adjacent
    token events of one choice that already wait are delivered as one. Leaving early must be followed
    by `aclose`, which aborts what still runs.
    """

    @property
    def request_id(self) -> str: ...

    def __aiter__(self) -> AsyncIterator[StreamEvent]: ...

    async def aclose(self) -> None: ...


class AbortOutcome(Enum):
    """What an abort met. Aborting twice is no error."""

    ABORTED = "aborted"
    ALREADY_FINISHED = "already_finished"
    NOT_FOUND = "not_found"


class EngineHealth(Enum):
    """STARTING and DRAINING refuse new work; DEAD is final.

    STALLED: nothing goes forward, so that new work waits; SERVING again once something does.
    """

    STARTING = "starting"
    SERVING = "serving"
    STALLED = "stalled"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Condition:
    """Whether the engine takes work, and how it goes on.

    reason: why it takes none, in a sentence without a user's words; empty while it does. num_live: requests
    that were submitted and have not ended. seconds_without_progress: since a step last ended, while
    there is a request that a step could advance; else 0.
    """

    health: EngineHealth
    reason: str = ""
    num_live: int = 0
    seconds_without_progress: float = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether new work is welcome here."""
        return self.health is EngineHealth.SERVING

    @property
    def is_alive(self) -> bool:
        """Whether waiting can help; if not, the process must be started anew."""
        return self.health is not EngineHealth.DEAD


@dataclass(frozen=True, slots=True)
class DrainOutcome:
    """What became of the requests that lived when a drain began: they ended by themselves, or were ended."""

    num_finished: int = 0
    num_aborted: int = 0


@dataclass(frozen=True, slots=True)
class RecentLoad:
    """What came and went in the last ten whole seconds, a second.

    requests: that ended. faults: that ended by a fault of the server's own.
    """

    generation_tokens_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0
    requests_per_second: float = 0.0
    faults_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model as clients may ask about it."""

    name: str
    source: str
    architecture: str
    backend: str
    dtype: str
    deterministic: bool
    vocab_size: int
    max_model_len: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    quantization: str = "none"
    adapters: tuple[str, ...] = ()
    """Names of those that requests may have now."""


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """The policies that are wanted, by axis; what is left out stays as it is."""

    policies: Mapping[str, PolicySpec] = field(default_factory=dict)
    shadows: Mapping[str, PolicySpec | None] = field(default_factory=dict)
    """None ends a shadow."""
    preset: str = ""
    """A named set for all axes, which `policies` go over."""
    expected_revision: int | None = None
    """Refuse unless it is the one in force."""
    origin: str = ""
    """The caller, for the log."""


@dataclass(frozen=True, slots=True)
class MeasuredProducts:
    """One candidate for the model's matrix products.

    seconds: of a step's products at 1, 16 and 64 rows. mean_kl: from float32 on a short text, None where it
    was not measured.
    """

    name: str
    seconds: tuple[float, ...]
    mean_kl: float | None


@dataclass(frozen=True, slots=True)
class ProductsInfo:
    """What computes the model's matrix products, why, and what else was measured, fastest first.

    warning: what an operator should know of the choice; empty if nothing.
    """

    name: str = ""
    reason: str = ""
    measured: tuple[MeasuredProducts, ...] = ()
    warning: str = ""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What runs here: version, sizes, measured rates. `config` is the flat effective configuration."""

    version: str
    start_seconds: float
    uptime_seconds: float
    block_size: int
    num_blocks: int
    num_host_blocks: int
    block_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kernels: str
    rates: Rates
    config: Mapping[str, str]
    device: str = "cpu"
    products: ProductsInfo = ProductsInfo()
    fingerprint: str = ""
    """See `engine.fingerprint`; empty where no answer is resumed."""
    exact_resume: bool = False
    model_name: str = ""
    speculation: SpeculationOptions = SpeculationOptions()
    num_host_cache_blocks: int = 0
    num_disk_cache_blocks: int = 0
    kv_dtype: str = ""
    """What the KV cache is kept in, in the configuration's words, such as "bfloat16" or "int8"."""
    structured_output: str = ""
    """What obeys the form that a request asks for; empty where there is nothing that does."""
    adapter_memory_bytes: int = 0
    """That adapters may take together; 0 where the model takes none."""
    max_adapter_rank: int = 0
    sliding_window: int = 0
    """Keys behind which blocks are given back; 0 where none are."""
    tensor_parallel_size: int = 1
    """Processes that share the model."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What lives in the engine. age_seconds: how long ago; much only where a step does not end."""

    scheduler: SchedulerInspection
    age_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Latencies:
    """A histogram of seconds. cumulative: observations at or below each bound, and all of them last."""

    bounds: tuple[float, ...] = ()
    cumulative: tuple[int, ...] = (0,)
    sum: float = 0.0


@dataclass(frozen=True, slots=True)
class Activity:
    """What was done since start. finished_total: requests by outcome, `ok` or the kind of error.

    health_reason: why it does not serve, in a sentence; empty while it does.
    """

    health: EngineHealth
    uptime_seconds: float
    num_prompt_tokens_total: int = 0
    num_generation_tokens_total: int = 0
    num_refused_total: int = 0
    finished_total: Mapping[str, int] = field(default_factory=dict)
    time_to_first_token: Latencies = Latencies()
    inter_token_latency: Latencies = Latencies()
    request_latency: Latencies = Latencies()
    queue_time: Latencies = Latencies()
    health_reason: str = ""


class EngineClient(Protocol):
    """Everything the wire offers, as Python. Methods raise PageturnerError subclasses only."""

    @property
    def health(self) -> EngineHealth: ...

    async def wait_for_health_change(self, known: EngineHealth) -> EngineHealth: ...

    @property
    def condition(self) -> Condition:
        """Health with its reason, of this moment."""
        ...

    @property
    def limits(self) -> InputLimits:
        """What prompts may be at most; for refusing one before it is copied."""
        ...

    async def submit(self, request: GenerationRequest) -> RequestStream:
        """Check, tokenize and queue; returns once accepted. Raises what refuses it (InvalidArgument,
        ModelNotFound, DuplicateRequest, QueueFull, Loading, Draining, EngineDead). A caller that is
        cancelled meanwhile leaves nothing behind: the request is withdrawn."""
        ...

    async def score(self, request: ScoreRequest) -> ScoreAnswer:
        """How likely continuations are. Raises as `submit` and its stream do; a caller that is cancelled
        leaves nothing behind."""
        ...

    async def abort(
        self, request_id: str, error: PageturnerError | None = None, *, tenant: str = ""
    ) -> AbortOutcome:
        """End a request. error: what its stream then raises; RequestAborted if none is given.

        tenant: the proved one that asks; another's request is NOT_FOUND to it. Without one the id is that of
        any request as records and logs of the scheduler have it (`identity.scoped_id`)."""
        ...

    async def drain(self, grace_seconds: float) -> DrainOutcome:
        """Refuse new requests (Draining, and so says health) and let those that live finish and be read.
        Returns then, or after the grace, when those that are left have been told to end with Draining.
        Of several drains the one whose grace ends first ends them."""
        ...

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True, identity: Identity = ANONYMOUS
    ) -> tuple[int, ...]:
        """identity: of the caller, whose tenant's limits hold and who leaves room for others, here and
        below. Raises TenantLimitReached."""
        ...

    async def render(self, prompt: Prompt, *, identity: Identity = ANONYMOUS) -> str:
        """The text of a prompt that is tokenized, as its chat template writes it; empty for token ids."""
        ...

    async def detokenize(self, token_ids: tuple[int, ...], *, identity: Identity = ANONYMOUS) -> str: ...

    def models(self) -> tuple[ModelInfo, ...]: ...

    def server_info(self) -> ServerInfo: ...

    def policies(self) -> PoliciesInfo: ...

    async def set_policies(self, change: PolicyChange) -> PoliciesInfo:
        """Carry the change out whole, between two steps, and return what is in force then.

        Raises InvalidArgument naming the axis and the option that is wrong, StaleRevision, or what
        `submit` raises of an engine that does not serve; nothing is changed then."""
        ...

    def load(self) -> SchedulerStats:
        """The figures of this moment: a request that was accepted counts, one that has ended does not."""
        ...

    def activity(self) -> Activity:
        """What was done since start, as of this moment."""
        ...

    async def inspect(self) -> Inspection:
        """The requests and blocks of a moment between two steps, of now or a fraction of a second ago.

        Costs the engine nothing while nobody calls, and little however many do. Where the step under way
        does not end, the last one there is."""
        ...

    async def prefix_summary(self) -> PrefixSummary:
        """What the prefix cache holds, for who chooses among servers by it. As fresh as `inspect`."""
        ...

    def recent_load(self) -> RecentLoad:
        """Rates of the last seconds."""
        ...

    def tenants(self, limit: int) -> TenantsReport:
        """What tenants hold at this moment: at most `limit` of them, those that hold most first."""
        ...

    async def flight_record(self) -> bytes:
        """What the scheduler was told and decided of late, as a file. Raises NotRecorded."""
        ...

    async def load_adapter(self, name: str, folder: Path) -> AdapterInfo:
        """Let requests name the adapter in a folder. Raises InvalidArgument, AdapterError where the model
        takes none, or what `submit` raises of an engine that does not serve; nothing is changed then."""
        ...

    async def unload_adapter(self, name: str, wait_seconds: float) -> int:
        """Let no request name it any more, and wait so long for those that have it; how many still do.
        Raises AdapterNotFound."""
        ...

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """Those that requests may name, then those that wait for the end of their last."""
        ...

    @property
    def adapter_folder(self) -> Path | None:
        """Below which clients may name folders to load; None if they may name none."""
        ...

    def adapter_figures(self) -> AdapterFigures:
        """How many there are, and what they take."""
        ...

    def prefill(self, order: PrefillOrder) -> AsyncGenerator[HandedBlock, None]:
        """Compute a prompt for another server, and hand its blocks over. As `PrefillSource` says."""
        ...
