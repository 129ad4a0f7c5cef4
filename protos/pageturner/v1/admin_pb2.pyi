from pageturner.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_WAITING: _ClassVar[RequestState]
    REQUEST_STATE_RUNNING: _ClassVar[RequestState]
    REQUEST_STATE_SWAPPED: _ClassVar[RequestState]

class RequestOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_ORDER_UNSPECIFIED: _ClassVar[RequestOrder]
    REQUEST_ORDER_SCHEDULE: _ClassVar[RequestOrder]
    REQUEST_ORDER_AGE: _ClassVar[RequestOrder]
    REQUEST_ORDER_BLOCKS: _ClassVar[RequestOrder]
    REQUEST_ORDER_TOKENS: _ClassVar[RequestOrder]
    REQUEST_ORDER_PREEMPTIONS: _ClassVar[RequestOrder]

class BlockUse(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_USE_UNSPECIFIED: _ClassVar[BlockUse]
    BLOCK_USE_FREE: _ClassVar[BlockUse]
    BLOCK_USE_LIVE: _ClassVar[BlockUse]
    BLOCK_USE_SHARED: _ClassVar[BlockUse]
    BLOCK_USE_PENDING: _ClassVar[BlockUse]
    BLOCK_USE_EVICTABLE: _ClassVar[BlockUse]

class EngineHealth(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_HEALTH_UNSPECIFIED: _ClassVar[EngineHealth]
    ENGINE_HEALTH_STARTING: _ClassVar[EngineHealth]
    ENGINE_HEALTH_SERVING: _ClassVar[EngineHealth]
    ENGINE_HEALTH_STALLED: _ClassVar[EngineHealth]
    ENGINE_HEALTH_DRAINING: _ClassVar[EngineHealth]
    ENGINE_HEALTH_DEAD: _ClassVar[EngineHealth]
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_WAITING: RequestState
REQUEST_STATE_RUNNING: RequestState
REQUEST_STATE_SWAPPED: RequestState
REQUEST_ORDER_UNSPECIFIED: RequestOrder
REQUEST_ORDER_SCHEDULE: RequestOrder
REQUEST_ORDER_AGE: RequestOrder
REQUEST_ORDER_BLOCKS: RequestOrder
REQUEST_ORDER_TOKENS: RequestOrder
REQUEST_ORDER_PREEMPTIONS: RequestOrder
BLOCK_USE_UNSPECIFIED: BlockUse
BLOCK_USE_FREE: BlockUse
BLOCK_USE_LIVE: BlockUse
BLOCK_USE_SHARED: BlockUse
BLOCK_USE_PENDING: BlockUse
BLOCK_USE_EVICTABLE: BlockUse
ENGINE_HEALTH_UNSPECIFIED: EngineHealth
ENGINE_HEALTH_STARTING: EngineHealth
ENGINE_HEALTH_SERVING: EngineHealth
ENGINE_HEALTH_STALLED: EngineHealth
ENGINE_HEALTH_DRAINING: EngineHealth
ENGINE_HEALTH_DEAD: EngineHealth

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "start_seconds", "uptime_seconds", "block_size", "num_blocks", "num_host_blocks", "block_bytes", "max_num_seqs", "max_num_batched_tokens", "kernels", "rates", "config", "device", "products", "fingerprint", "exact_resume", "model_name", "kv_dtype", "num_host_cache_blocks", "num_disk_cache_blocks", "adapter_memory_bytes", "max_adapter_rank", "speculation", "structured_output", "sliding_window", "tensor_parallel_size")
    class ConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PRODUCTS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EXACT_RESUME_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_CACHE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_CACHE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTER_RANK_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
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
    config: _containers.ScalarMap[str, str]
    device: str
    products: Products
    fingerprint: str
    exact_resume: bool
    model_name: str
    kv_dtype: str
    num_host_cache_blocks: int
    num_disk_cache_blocks: int
    adapter_memory_bytes: int
    max_adapter_rank: int
    speculation: Speculation
    structured_output: str
    sliding_window: int
    tensor_parallel_size: int
    def __init__(self, version: _Optional[str] = ..., start_seconds: _Optional[float] = ..., uptime_seconds: _Optional[float] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., kernels: _Optional[str] = ..., rates: _Optional[_Union[Rates, _Mapping]] = ..., config: _Optional[_Mapping[str, str]] = ..., device: _Optional[str] = ..., products: _Optional[_Union[Products, _Mapping]] = ..., fingerprint: _Optional[str] = ..., exact_resume: bool = ..., model_name: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., num_host_cache_blocks: _Optional[int] = ..., num_disk_cache_blocks: _Optional[int] = ..., adapter_memory_bytes: _Optional[int] = ..., max_adapter_rank: _Optional[int] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., structured_output: _Optional[str] = ..., sliding_window: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("method", "num_tokens", "max_ngram", "min_ngram", "row_cost")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NGRAM_FIELD_NUMBER: _ClassVar[int]
    MIN_NGRAM_FIELD_NUMBER: _ClassVar[int]
    ROW_COST_FIELD_NUMBER: _ClassVar[int]
    method: str
    num_tokens: int
    max_ngram: int
    min_ngram: int
    row_cost: float
    def __init__(self, method: _Optional[str] = ..., num_tokens: _Optional[int] = ..., max_ngram: _Optional[int] = ..., min_ngram: _Optional[int] = ..., row_cost: _Optional[float] = ...) -> None: ...

class Products(_message.Message):
    __slots__ = ("name", "reason", "measured", "warning")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    measured: _containers.RepeatedCompositeFieldContainer[MeasuredProducts]
    warning: str
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ..., measured: _Optional[_Iterable[_Union[MeasuredProducts, _Mapping]]] = ..., warning: _Optional[str] = ...) -> None: ...

class MeasuredProducts(_message.Message):
    __slots__ = ("name", "seconds", "mean_kl")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    MEAN_KL_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: _containers.RepeatedScalarFieldContainer[float]
    mean_kl: float
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[_Iterable[float]] = ..., mean_kl: _Optional[float] = ...) -> None: ...

class Rates(_message.Message):
    __slots__ = ("swap_out_bytes_per_second", "swap_in_bytes_per_second", "block_bytes", "prefill_seconds_fixed", "prefill_seconds_per_token", "prefill_seconds_per_token_context", "disk_read_bytes_per_second")
    SWAP_OUT_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIXED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_PER_TOKEN_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    DISK_READ_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    swap_out_bytes_per_second: float
    swap_in_bytes_per_second: float
    block_bytes: int
    prefill_seconds_fixed: float
    prefill_seconds_per_token: float
    prefill_seconds_per_token_context: float
    disk_read_bytes_per_second: float
    def __init__(self, swap_out_bytes_per_second: _Optional[float] = ..., swap_in_bytes_per_second: _Optional[float] = ..., block_bytes: _Optional[int] = ..., prefill_seconds_fixed: _Optional[float] = ..., prefill_seconds_per_token: _Optional[float] = ..., prefill_seconds_per_token_context: _Optional[float] = ..., disk_read_bytes_per_second: _Optional[float] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_waiting", "num_running", "num_swapped", "num_running_sequences", "num_queued_prompt_tokens", "num_blocks", "num_blocks_free", "num_blocks_evictable", "num_blocks_used", "num_host_blocks", "num_host_blocks_used", "num_wasted_slots", "num_steps_total", "num_scheduled_tokens_total", "num_prefix_query_tokens_total", "num_prefix_hit_tokens_total", "num_resume_hit_tokens_total", "num_swap_preemptions_total", "num_recompute_preemptions_total", "num_tail_preemptions_total", "num_bypasses_total", "num_policy_faults_total", "num_step_failures_total", "num_evictions_total", "num_swapped_out_blocks_total", "num_swapped_in_blocks_total", "num_copied_blocks_total", "kv_cache_usage", "generation_tokens_per_second", "prompt_tokens_per_second", "requests_per_second", "faults_per_second", "max_running_sequences", "is_ready", "is_draining", "not_ready_reason", "seconds_without_progress", "num_live", "queue_seconds", "drain_tokens_per_second", "num_drafted_tokens_total", "num_accepted_drafts_total", "num_host_blocks_cached", "num_disk_blocks_cached", "num_requests_fetching", "num_host_hit_tokens_total", "num_disk_hit_tokens_total", "num_spilled_blocks_total", "num_disk_writes_dropped_total", "num_disk_reads_failed_total", "num_adapters", "num_adapters_loaded", "adapter_bytes", "num_adapter_reads_total", "num_beam_selections_total", "num_beam_table_entries_total", "num_beam_blocks_total", "num_cached_grammars", "num_grammar_compilations_total", "mask_wait_seconds_total", "num_window_blocks_total")
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_WASTED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_QUERY_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_HIT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_RESUME_HIT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAP_PREEMPTIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTE_PREEMPTIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_TAIL_PREEMPTIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_BYPASSES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_POLICY_FAULTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_STEP_FAILURES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_OUT_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_IN_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_COPIED_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    FAULTS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_REASON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_WITHOUT_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_LIVE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FETCHING_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_HIT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_HIT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_SPILLED_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_WRITES_DROPPED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_READS_FAILED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_ADAPTERS_LOADED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_ADAPTER_READS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_BEAM_SELECTIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_BEAM_TABLE_ENTRIES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_BEAM_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_GRAMMARS_FIELD_NUMBER: _ClassVar[int]
    NUM_GRAMMAR_COMPILATIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MASK_WAIT_SECONDS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_WINDOW_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    num_waiting: int
    num_running: int
    num_swapped: int
    num_running_sequences: int
    num_queued_prompt_tokens: int
    num_blocks: int
    num_blocks_free: int
    num_blocks_evictable: int
    num_blocks_used: int
    num_host_blocks: int
    num_host_blocks_used: int
    num_wasted_slots: int
    num_steps_total: int
    num_scheduled_tokens_total: int
    num_prefix_query_tokens_total: int
    num_prefix_hit_tokens_total: int
    num_resume_hit_tokens_total: int
    num_swap_preemptions_total: int
    num_recompute_preemptions_total: int
    num_tail_preemptions_total: int
    num_bypasses_total: int
    num_policy_faults_total: int
    num_step_failures_total: int
    num_evictions_total: int
    num_swapped_out_blocks_total: int
    num_swapped_in_blocks_total: int
    num_copied_blocks_total: int
    kv_cache_usage: float
    generation_tokens_per_second: float
    prompt_tokens_per_second: float
    requests_per_second: float
    faults_per_second: float
    max_running_sequences: int
    is_ready: bool
    is_draining: bool
    not_ready_reason: str
    seconds_without_progress: float
    num_live: int
    queue_seconds: float
    drain_tokens_per_second: float
    num_drafted_tokens_total: int
    num_accepted_drafts_total: int
    num_host_blocks_cached: int
    num_disk_blocks_cached: int
    num_requests_fetching: int
    num_host_hit_tokens_total: int
    num_disk_hit_tokens_total: int
    num_spilled_blocks_total: int
    num_disk_writes_dropped_total: int
    num_disk_reads_failed_total: int
    num_adapters: int
    num_adapters_loaded: int
    adapter_bytes: int
    num_adapter_reads_total: int
    num_beam_selections_total: int
    num_beam_table_entries_total: int
    num_beam_blocks_total: int
    num_cached_grammars: int
    num_grammar_compilations_total: int
    mask_wait_seconds_total: float
    num_window_blocks_total: int
    def __init__(self, num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., num_swapped: _Optional[int] = ..., num_running_sequences: _Optional[int] = ..., num_queued_prompt_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_blocks_free: _Optional[int] = ..., num_blocks_evictable: _Optional[int] = ..., num_blocks_used: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., num_host_blocks_used: _Optional[int] = ..., num_wasted_slots: _Optional[int] = ..., num_steps_total: _Optional[int] = ..., num_scheduled_tokens_total: _Optional[int] = ..., num_prefix_query_tokens_total: _Optional[int] = ..., num_prefix_hit_tokens_total: _Optional[int] = ..., num_resume_hit_tokens_total: _Optional[int] = ..., num_swap_preemptions_total: _Optional[int] = ..., num_recompute_preemptions_total: _Optional[int] = ..., num_tail_preemptions_total: _Optional[int] = ..., num_bypasses_total: _Optional[int] = ..., num_policy_faults_total: _Optional[int] = ..., num_step_failures_total: _Optional[int] = ..., num_evictions_total: _Optional[int] = ..., num_swapped_out_blocks_total: _Optional[int] = ..., num_swapped_in_blocks_total: _Optional[int] = ..., num_copied_blocks_total: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ..., generation_tokens_per_second: _Optional[float] = ..., prompt_tokens_per_second: _Optional[float] = ..., requests_per_second: _Optional[float] = ..., faults_per_second: _Optional[float] = ..., max_running_sequences: _Optional[int] = ..., is_ready: bool = ..., is_draining: bool = ..., not_ready_reason: _Optional[str] = ..., seconds_without_progress: _Optional[float] = ..., num_live: _Optional[int] = ..., queue_seconds: _Optional[float] = ..., drain_tokens_per_second: _Optional[float] = ..., num_drafted_tokens_total: _Optional[int] = ..., num_accepted_drafts_total: _Optional[int] = ..., num_host_blocks_cached: _Optional[int] = ..., num_disk_blocks_cached: _Optional[int] = ..., num_requests_fetching: _Optional[int] = ..., num_host_hit_tokens_total: _Optional[int] = ..., num_disk_hit_tokens_total: _Optional[int] = ..., num_spilled_blocks_total: _Optional[int] = ..., num_disk_writes_dropped_total: _Optional[int] = ..., num_disk_reads_failed_total: _Optional[int] = ..., num_adapters: _Optional[int] = ..., num_adapters_loaded: _Optional[int] = ..., adapter_bytes: _Optional[int] = ..., num_adapter_reads_total: _Optional[int] = ..., num_beam_selections_total: _Optional[int] = ..., num_beam_table_entries_total: _Optional[int] = ..., num_beam_blocks_total: _Optional[int] = ..., num_cached_grammars: _Optional[int] = ..., num_grammar_compilations_total: _Optional[int] = ..., mask_wait_seconds_total: _Optional[float] = ..., num_window_blocks_total: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_seconds",)
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    grace_seconds: float
    def __init__(self, grace_seconds: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_finished", "num_aborted")
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    num_finished: int
    num_aborted: int
    def __init__(self, num_finished: _Optional[int] = ..., num_aborted: _Optional[int] = ...) -> None: ...

class ProcessUsage(_message.Message):
    __slots__ = ("resident_bytes", "cpu_seconds_total")
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CPU_SECONDS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    resident_bytes: int
    cpu_seconds_total: float
    def __init__(self, resident_bytes: _Optional[int] = ..., cpu_seconds_total: _Optional[float] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("load", "process")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    load: Load
    process: ProcessUsage
    def __init__(self, load: _Optional[_Union[Load, _Mapping]] = ..., process: _Optional[_Union[ProcessUsage, _Mapping]] = ...) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ("interval_seconds",)
    INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    interval_seconds: float
    def __init__(self, interval_seconds: _Optional[float] = ...) -> None: ...

class WatchLoadResponse(_message.Message):
    __slots__ = ("load", "process")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    load: Load
    process: ProcessUsage
    def __init__(self, load: _Optional[_Union[Load, _Mapping]] = ..., process: _Optional[_Union[ProcessUsage, _Mapping]] = ...) -> None: ...

class GetPoliciesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPoliciesResponse(_message.Message):
    __slots__ = ("policies", "revision")
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    policies: _containers.RepeatedCompositeFieldContainer[Policy]
    revision: int
    def __init__(self, policies: _Optional[_Iterable[_Union[Policy, _Mapping]]] = ..., revision: _Optional[int] = ...) -> None: ...

class SetPoliciesRequest(_message.Message):
    __slots__ = ("policies", "shadows", "preset", "expected_revision")
    class PoliciesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: PolicyChoice
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[PolicyChoice, _Mapping]] = ...) -> None: ...
    class ShadowsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: PolicyChoice
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[PolicyChoice, _Mapping]] = ...) -> None: ...
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    SHADOWS_FIELD_NUMBER: _ClassVar[int]
    PRESET_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_REVISION_FIELD_NUMBER: _ClassVar[int]
    policies: _containers.MessageMap[str, PolicyChoice]
    shadows: _containers.MessageMap[str, PolicyChoice]
    preset: str
    expected_revision: int
    def __init__(self, policies: _Optional[_Mapping[str, PolicyChoice]] = ..., shadows: _Optional[_Mapping[str, PolicyChoice]] = ..., preset: _Optional[str] = ..., expected_revision: _Optional[int] = ...) -> None: ...

class PolicyChoice(_message.Message):
    __slots__ = ("name", "options")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    options: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., options: _Optional[_Mapping[str, str]] = ...) -> None: ...

class SetPoliciesResponse(_message.Message):
    __slots__ = ("policies", "revision")
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    policies: _containers.RepeatedCompositeFieldContainer[Policy]
    revision: int
    def __init__(self, policies: _Optional[_Iterable[_Union[Policy, _Mapping]]] = ..., revision: _Optional[int] = ...) -> None: ...

class Policy(_message.Message):
    __slots__ = ("axis", "name", "options", "available", "quarantined", "faults", "last_fault", "shadow", "quarantine_reason", "calls", "seconds", "step_seconds", "asking_seconds")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    AXIS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    LAST_FAULT_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_REASON_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ASKING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    axis: str
    name: str
    options: _containers.ScalarMap[str, str]
    available: _containers.RepeatedScalarFieldContainer[str]
    quarantined: bool
    faults: int
    last_fault: str
    shadow: Shadow
    quarantine_reason: str
    calls: int
    seconds: float
    step_seconds: float
    asking_seconds: float
    def __init__(self, axis: _Optional[str] = ..., name: _Optional[str] = ..., options: _Optional[_Mapping[str, str]] = ..., available: _Optional[_Iterable[str]] = ..., quarantined: bool = ..., faults: _Optional[int] = ..., last_fault: _Optional[str] = ..., shadow: _Optional[_Union[Shadow, _Mapping]] = ..., quarantine_reason: _Optional[str] = ..., calls: _Optional[int] = ..., seconds: _Optional[float] = ..., step_seconds: _Optional[float] = ..., asking_seconds: _Optional[float] = ...) -> None: ...

class Shadow(_message.Message):
    __slots__ = ("name", "options", "compared", "disagreements", "samples", "faults", "last_fault", "seconds", "step_seconds", "stopped")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    COMPARED_FIELD_NUMBER: _ClassVar[int]
    DISAGREEMENTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    LAST_FAULT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    name: str
    options: _containers.ScalarMap[str, str]
    compared: int
    disagreements: int
    samples: _containers.RepeatedCompositeFieldContainer[Disagreement]
    faults: int
    last_fault: str
    seconds: float
    step_seconds: float
    stopped: bool
    def __init__(self, name: _Optional[str] = ..., options: _Optional[_Mapping[str, str]] = ..., compared: _Optional[int] = ..., disagreements: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[Disagreement, _Mapping]]] = ..., faults: _Optional[int] = ..., last_fault: _Optional[str] = ..., seconds: _Optional[float] = ..., step_seconds: _Optional[float] = ..., stopped: bool = ...) -> None: ...

class Disagreement(_message.Message):
    __slots__ = ("subject", "obeyed", "shadow")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    OBEYED_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    subject: str
    obeyed: str
    shadow: str
    def __init__(self, subject: _Optional[str] = ..., obeyed: _Optional[str] = ..., shadow: _Optional[str] = ...) -> None: ...

class GetFlightRecordRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetFlightRecordResponse(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    def __init__(self, chunk: _Optional[bytes] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "order", "states", "tenant")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    order: RequestOrder
    states: _containers.RepeatedScalarFieldContainer[RequestState]
    tenant: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., order: _Optional[_Union[RequestOrder, str]] = ..., states: _Optional[_Iterable[_Union[RequestState, str]]] = ..., tenant: _Optional[str] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "next_page_token", "total_size", "age_seconds")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SIZE_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[LiveRequest]
    next_page_token: str
    total_size: int
    age_seconds: float
    def __init__(self, requests: _Optional[_Iterable[_Union[LiveRequest, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., total_size: _Optional[int] = ..., age_seconds: _Optional[float] = ...) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "number", "state", "queue_position", "priority", "num_choices", "num_prompt_tokens", "num_cached_prompt_tokens", "num_uncomputed_tokens", "num_output_tokens", "max_tokens", "num_blocks", "num_host_blocks", "num_preemptions", "age_seconds", "queue_seconds", "first_token_seconds", "deadline_seconds", "paused", "guarded")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNCOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    GUARDED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    number: int
    state: RequestState
    queue_position: int
    priority: int
    num_choices: int
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_uncomputed_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_blocks: int
    num_host_blocks: int
    num_preemptions: int
    age_seconds: float
    queue_seconds: float
    first_token_seconds: float
    deadline_seconds: float
    paused: bool
    guarded: bool
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., number: _Optional[int] = ..., state: _Optional[_Union[RequestState, str]] = ..., queue_position: _Optional[int] = ..., priority: _Optional[int] = ..., num_choices: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_prompt_tokens: _Optional[int] = ..., num_uncomputed_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., age_seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ..., first_token_seconds: _Optional[float] = ..., deadline_seconds: _Optional[float] = ..., paused: bool = ..., guarded: bool = ...) -> None: ...

class AbortRequestsRequest(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestName]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestName, _Mapping]]] = ...) -> None: ...

class RequestName(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class AbortRequestsResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[AbortRequestsResult]
    def __init__(self, results: _Optional[_Iterable[_Union[AbortRequestsResult, _Mapping]]] = ...) -> None: ...

class AbortRequestsResult(_message.Message):
    __slots__ = ("request", "outcome")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    request: RequestName
    outcome: _generation_pb2.AbortOutcome
    def __init__(self, request: _Optional[_Union[RequestName, _Mapping]] = ..., outcome: _Optional[_Union[_generation_pb2.AbortOutcome, str]] = ...) -> None: ...

class GetBlocksRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetBlocksResponse(_message.Message):
    __slots__ = ("uses", "owners", "requests", "age_seconds")
    USES_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    uses: bytes
    owners: bytes
    requests: _containers.RepeatedCompositeFieldContainer[BlockOwner]
    age_seconds: float
    def __init__(self, uses: _Optional[bytes] = ..., owners: _Optional[bytes] = ..., requests: _Optional[_Iterable[_Union[BlockOwner, _Mapping]]] = ..., age_seconds: _Optional[float] = ...) -> None: ...

class BlockOwner(_message.Message):
    __slots__ = ("request_id", "tenant", "number")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    number: int
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class GetPrefixSummaryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPrefixSummaryResponse(_message.Message):
    __slots__ = ("summary",)
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    summary: PrefixSummary
    def __init__(self, summary: _Optional[_Union[PrefixSummary, _Mapping]] = ...) -> None: ...

class WatchPrefixSummaryRequest(_message.Message):
    __slots__ = ("interval_seconds",)
    INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    interval_seconds: float
    def __init__(self, interval_seconds: _Optional[float] = ...) -> None: ...

class WatchPrefixSummaryResponse(_message.Message):
    __slots__ = ("whole", "change")
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    whole: PrefixSummary
    change: PrefixChange
    def __init__(self, whole: _Optional[_Union[PrefixSummary, _Mapping]] = ..., change: _Optional[_Union[PrefixChange, _Mapping]] = ...) -> None: ...

class PrefixSummary(_message.Message):
    __slots__ = ("revision", "block_size", "key_id", "fingerprints", "is_truncated")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    IS_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    revision: int
    block_size: int
    key_id: str
    fingerprints: bytes
    is_truncated: bool
    def __init__(self, revision: _Optional[int] = ..., block_size: _Optional[int] = ..., key_id: _Optional[str] = ..., fingerprints: _Optional[bytes] = ..., is_truncated: bool = ...) -> None: ...

class PrefixChange(_message.Message):
    __slots__ = ("revision", "added", "removed")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    revision: int
    added: bytes
    removed: bytes
    def __init__(self, revision: _Optional[int] = ..., added: _Optional[bytes] = ..., removed: _Optional[bytes] = ...) -> None: ...

class GetActivityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetActivityResponse(_message.Message):
    __slots__ = ("health", "uptime_seconds", "prompt_tokens_total", "generation_tokens_total", "requests_refused_total", "requests_finished_total", "time_to_first_token", "inter_token_latency", "request_latency", "queue_time", "health_reason")
    class RequestsFinishedTotalEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_REFUSED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FINISHED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_LATENCY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_LATENCY_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    HEALTH_REASON_FIELD_NUMBER: _ClassVar[int]
    health: EngineHealth
    uptime_seconds: float
    prompt_tokens_total: int
    generation_tokens_total: int
    requests_refused_total: int
    requests_finished_total: _containers.ScalarMap[str, int]
    time_to_first_token: Latencies
    inter_token_latency: Latencies
    request_latency: Latencies
    queue_time: Latencies
    health_reason: str
    def __init__(self, health: _Optional[_Union[EngineHealth, str]] = ..., uptime_seconds: _Optional[float] = ..., prompt_tokens_total: _Optional[int] = ..., generation_tokens_total: _Optional[int] = ..., requests_refused_total: _Optional[int] = ..., requests_finished_total: _Optional[_Mapping[str, int]] = ..., time_to_first_token: _Optional[_Union[Latencies, _Mapping]] = ..., inter_token_latency: _Optional[_Union[Latencies, _Mapping]] = ..., request_latency: _Optional[_Union[Latencies, _Mapping]] = ..., queue_time: _Optional[_Union[Latencies, _Mapping]] = ..., health_reason: _Optional[str] = ...) -> None: ...

class Latencies(_message.Message):
    __slots__ = ("bounds", "cumulative", "sum")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    cumulative: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., cumulative: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListTenantsResponse(_message.Message):
    __slots__ = ("tenants", "num_tenants", "refused_total")
    class RefusedTotalEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TENANTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[Tenant]
    num_tenants: int
    refused_total: _containers.ScalarMap[str, int]
    def __init__(self, tenants: _Optional[_Iterable[_Union[Tenant, _Mapping]]] = ..., num_tenants: _Optional[int] = ..., refused_total: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Tenant(_message.Message):
    __slots__ = ("name", "num_requests", "num_waiting", "num_queued_tokens", "tokens_left", "limits", "refused_total")
    class RefusedTotalEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_LEFT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_requests: int
    num_waiting: int
    num_queued_tokens: int
    tokens_left: float
    limits: TenantLimits
    refused_total: _containers.ScalarMap[str, int]
    def __init__(self, name: _Optional[str] = ..., num_requests: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_queued_tokens: _Optional[int] = ..., tokens_left: _Optional[float] = ..., limits: _Optional[_Union[TenantLimits, _Mapping]] = ..., refused_total: _Optional[_Mapping[str, int]] = ...) -> None: ...

class TenantLimits(_message.Message):
    __slots__ = ("max_concurrent_requests", "max_queued_tokens", "tokens_per_minute", "max_tokens", "min_priority", "max_priority", "tokenized_per_minute")
    MAX_CONCURRENT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MAX_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TOKENIZED_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    max_concurrent_requests: int
    max_queued_tokens: int
    tokens_per_minute: int
    max_tokens: int
    min_priority: int
    max_priority: int
    tokenized_per_minute: int
    def __init__(self, max_concurrent_requests: _Optional[int] = ..., max_queued_tokens: _Optional[int] = ..., tokens_per_minute: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_priority: _Optional[int] = ..., max_priority: _Optional[int] = ..., tokenized_per_minute: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name", "wait_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    wait_seconds: float
    def __init__(self, name: _Optional[str] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("num_requests",)
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    def __init__(self, num_requests: _Optional[int] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "path", "digest", "rank", "modules", "num_bytes", "is_loaded", "is_unloading", "num_requests", "num_requests_total")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_LOADED_FIELD_NUMBER: _ClassVar[int]
    IS_UNLOADING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    digest: str
    rank: int
    modules: _containers.RepeatedScalarFieldContainer[str]
    num_bytes: int
    is_loaded: bool
    is_unloading: bool
    num_requests: int
    num_requests_total: int
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ..., rank: _Optional[int] = ..., modules: _Optional[_Iterable[str]] = ..., num_bytes: _Optional[int] = ..., is_loaded: bool = ..., is_unloading: bool = ..., num_requests: _Optional[int] = ..., num_requests_total: _Optional[int] = ...) -> None: ...
