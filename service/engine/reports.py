"""What an engine tells of itself: how it fares, what it serves, what it has done. Frozen, of one moment each.

`engine/api.py` gathers them with the interface that gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from pageturner.policies.views import Rates
from pageturner.service.core.inspection import SchedulerInspection
from pageturner.service.core.options import SpeculationOptions


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
