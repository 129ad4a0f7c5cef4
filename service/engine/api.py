"""The engine as its clients see it: what goes in, what comes out, and the one interface between.

`rpc` is written against this page alone, and tested against a fake of it. What goes in and what comes of it
is `requests.py`'s, what the engine tells of itself `reports.py`'s; both are imported from here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Protocol

from pageturner.service.core.inspection import BlockUse as BlockUse
from pageturner.service.core.inspection import RequestInfo as RequestInfo
from pageturner.service.core.inspection import RequestState as RequestState
from pageturner.service.core.inspection import SchedulerInspection as SchedulerInspection
from pageturner.service.core.options import SpeculationOptions as SpeculationOptions
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.core.prefix_summary import PrefixChange as PrefixChange
from pageturner.service.core.prefix_summary import PrefixSummary as PrefixSummary
from pageturner.service.core.request import ResumedChoice as ResumedChoice
from pageturner.service.engine.adapter_reports import AdapterFigures as AdapterFigures
from pageturner.service.engine.adapter_reports import AdapterInfo as AdapterInfo
from pageturner.service.engine.conversation import ChatMessage as ChatMessage
from pageturner.service.engine.conversation import ChatPrompt as ChatPrompt
from pageturner.service.engine.conversation import ToolCall as ToolCall
from pageturner.service.engine.handover import HandedBlock as HandedBlock
from pageturner.service.engine.handover import PrefillOrder as PrefillOrder
from pageturner.service.engine.prompt_limits import InputLimits
from pageturner.service.engine.reports import Activity as Activity
from pageturner.service.engine.reports import Condition as Condition
from pageturner.service.engine.reports import DrainOutcome as DrainOutcome
from pageturner.service.engine.reports import EngineHealth as EngineHealth
from pageturner.service.engine.reports import Inspection as Inspection
from pageturner.service.engine.reports import Latencies as Latencies
from pageturner.service.engine.reports import MeasuredProducts as MeasuredProducts
from pageturner.service.engine.reports import ModelInfo as ModelInfo
from pageturner.service.engine.reports import ProductsInfo as ProductsInfo
from pageturner.service.engine.reports import RecentLoad as RecentLoad
from pageturner.service.engine.reports import ServerInfo as ServerInfo
from pageturner.service.engine.requests import MAX_NAME_CHARACTERS as MAX_NAME_CHARACTERS
from pageturner.service.engine.requests import AbortOutcome as AbortOutcome
from pageturner.service.engine.requests import AcceptedEvent as AcceptedEvent
from pageturner.service.engine.requests import ContinuationScore as ContinuationScore
from pageturner.service.engine.requests import GenerationRequest as GenerationRequest
from pageturner.service.engine.requests import PolicyChange as PolicyChange
from pageturner.service.engine.requests import Prompt as Prompt
from pageturner.service.engine.requests import RequestStream as RequestStream
from pageturner.service.engine.requests import Resumption as Resumption
from pageturner.service.engine.requests import ScoreAnswer as ScoreAnswer
from pageturner.service.engine.requests import ScoreRequest as ScoreRequest
from pageturner.service.engine.requests import StreamEvent as StreamEvent
from pageturner.service.engine.requests import TextPrompt as TextPrompt
from pageturner.service.engine.tenants import TenantsReport
from pageturner.service.errors import PageturnerError
from pageturner.service.identity import ANONYMOUS, Identity
from pageturner.service.policy_host.reports import PoliciesInfo


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
