from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "start_seconds", "uptime_seconds", "block_size", "num_blocks", "num_host_blocks", "block_bytes", "max_num_seqs", "max_num_batched_tokens", "kernels", "rates", "config", "device", "products")
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
    def __init__(self, version: _Optional[str] = ..., start_seconds: _Optional[float] = ..., uptime_seconds: _Optional[float] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., kernels: _Optional[str] = ..., rates: _Optional[_Union[Rates, _Mapping]] = ..., config: _Optional[_Mapping[str, str]] = ..., device: _Optional[str] = ..., products: _Optional[_Union[Products, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("swap_out_bytes_per_second", "swap_in_bytes_per_second", "block_bytes", "prefill_seconds_fixed", "prefill_seconds_per_token", "prefill_seconds_per_token_context")
    SWAP_OUT_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIXED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_PER_TOKEN_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    swap_out_bytes_per_second: float
    swap_in_bytes_per_second: float
    block_bytes: int
    prefill_seconds_fixed: float
    prefill_seconds_per_token: float
    prefill_seconds_per_token_context: float
    def __init__(self, swap_out_bytes_per_second: _Optional[float] = ..., swap_in_bytes_per_second: _Optional[float] = ..., block_bytes: _Optional[int] = ..., prefill_seconds_fixed: _Optional[float] = ..., prefill_seconds_per_token: _Optional[float] = ..., prefill_seconds_per_token_context: _Optional[float] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_waiting", "num_running", "num_swapped", "num_running_sequences", "num_queued_prompt_tokens", "num_blocks", "num_blocks_free", "num_blocks_evictable", "num_blocks_used", "num_host_blocks", "num_host_blocks_used", "num_wasted_slots", "num_steps_total", "num_scheduled_tokens_total", "num_prefix_query_tokens_total", "num_prefix_hit_tokens_total", "num_resume_hit_tokens_total", "num_swap_preemptions_total", "num_recompute_preemptions_total", "num_tail_preemptions_total", "num_bypasses_total", "num_policy_faults_total", "num_step_failures_total", "num_evictions_total", "num_swapped_out_blocks_total", "num_swapped_in_blocks_total", "num_copied_blocks_total")
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
    def __init__(self, num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., num_swapped: _Optional[int] = ..., num_running_sequences: _Optional[int] = ..., num_queued_prompt_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_blocks_free: _Optional[int] = ..., num_blocks_evictable: _Optional[int] = ..., num_blocks_used: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., num_host_blocks_used: _Optional[int] = ..., num_wasted_slots: _Optional[int] = ..., num_steps_total: _Optional[int] = ..., num_scheduled_tokens_total: _Optional[int] = ..., num_prefix_query_tokens_total: _Optional[int] = ..., num_prefix_hit_tokens_total: _Optional[int] = ..., num_resume_hit_tokens_total: _Optional[int] = ..., num_swap_preemptions_total: _Optional[int] = ..., num_recompute_preemptions_total: _Optional[int] = ..., num_tail_preemptions_total: _Optional[int] = ..., num_bypasses_total: _Optional[int] = ..., num_policy_faults_total: _Optional[int] = ..., num_step_failures_total: _Optional[int] = ..., num_evictions_total: _Optional[int] = ..., num_swapped_out_blocks_total: _Optional[int] = ..., num_swapped_in_blocks_total: _Optional[int] = ..., num_copied_blocks_total: _Optional[int] = ...) -> None: ...

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
