"""What a scrape shows, as families of Prometheus.

Names are vLLM's with this service's prefix, a colon behind it as there: a panel or an alert that was written
for vLLM works once its prefix is changed. Calls have the names of the gRPC dashboards, and the process those
of every client library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.engine.api import AdapterFigures, Condition, EngineHealth, ModelInfo, ServerInfo
from pageturner.service.engine.instruments import HistogramSnapshot
from pageturner.service.engine.metrics import Method, MetricsSnapshot
from pageturner.service.policy_host.reports import PoliciesInfo

PREFIX = "pageturner:"
_METHOD = ("grpc_type", "grpc_service", "grpc_method")


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """What is known of the engine once there is one."""

    model: ModelInfo
    server: ServerInfo
    stats: SchedulerStats
    policies: PoliciesInfo
    adapters: AdapterFigures


@dataclass(frozen=True, slots=True)
class Observation:
    """All that one scrape shows, of one moment. engine: None while the model loads."""

    metrics: MetricsSnapshot
    condition: Condition
    engine: ServedEngine | None = None
    num_log_lines_lost: int = 0
    certificate_ends: float | None = None
    """Of the server's own, in seconds of the epoch; None in plain text."""


_DOCS: Mapping[str, str] = {
    "prompt_tokens_total": "Prompt tokens of accepted requests.",
    "generation_tokens_total": "Tokens generated.",
    "scored_tokens_total": "Given tokens whose log-probabilities were told.",
    "requests_given_up_total": "Requests given up because nothing could be scheduled.",
    "requests_resumed_total": "Accepted requests whose answer had begun before, and went on here.",
    "engine_stalls_total": "Times that nothing went forward for engine.stall_seconds.",
    "num_preemptions_total": "Preemptions of any kind.",
    "prefix_cache_queries_total": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits_total": "Prompt tokens that the prefix cache held.",
    "spec_decode_num_draft_tokens_total": "Guesses of what comes next that steps verified.",
    "spec_decode_num_accepted_tokens_total": "Guesses that became tokens of answers.",
    "num_requests_running": "Requests that run.",
    "num_requests_waiting": "Requests that wait.",
    "num_requests_swapped": "Requests whose KV is in host memory.",
    "kv_cache_usage_perc": "Share of the KV blocks that requests hold; 1 is all of them.",
    "time_to_first_token_seconds": "Arrival to the first token.",
    "inter_token_latency_seconds": "Between two tokens of one choice.",
    "e2e_request_latency_seconds": "Arrival to the end of a request.",
    "request_queue_time_seconds": "Time that a request waited, preempted time included.",
    "request_prefill_time_seconds": "From its turn to its first token.",
    "request_decode_time_seconds": "From its first token to its end.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Tokens that a request was given.",
}

_STATE_GAUGES = {
    "num_running_sequences": "Sequences of the running requests.",
    "num_queued_prompt_tokens": "Prompt tokens of the waiting requests.",
    "num_blocks": "Blocks of the device pool.",
    "num_blocks_free": "Blocks that hold nothing.",
    "num_blocks_evictable": "Blocks that only the prefix cache holds.",
    "num_blocks_used": "Blocks that requests hold.",
    "num_host_blocks": "Blocks of the host pool.",
    "num_host_blocks_used": "Blocks of the host pool that requests hold.",
    "num_host_blocks_cached": "Blocks of the host pool that hold what the device evicted.",
    "num_disk_blocks_cached": "Blocks of the prefix cache on disk.",
    "num_requests_fetching": "Requests that wait for blocks from disk.",
    "num_wasted_slots": "Token slots of held blocks that hold no token.",
    "queue_seconds": "How long a request that comes now would wait for its turn, as estimated.",
    "drain_tokens_per_second": "Prompt tokens that leave the queue, as measured.",
    "num_cached_grammars": "Compiled grammars of structured output, in use or kept.",
}
_STATE_COUNTERS = {
    "num_steps_total": "Steps of the engine.",
    "num_scheduled_tokens_total": "Tokens computed.",
    "num_resume_hit_tokens_total": "Tokens that the prefix cache held when a preempted request came back.",
    "num_bypasses_total": "Admissions that overtook a waiting request.",
    "num_policy_faults_total": "Answers of policies that could not be followed.",
    "num_step_failures_total": "Steps that failed and were retried.",
    "num_evictions_total": "Cached blocks that were overwritten.",
    "num_swapped_out_blocks_total": "Blocks copied from device to host.",
    "num_swapped_in_blocks_total": "Blocks copied from host to device.",
    "num_copied_blocks_total": "Blocks copied on write.",
    "num_host_hit_tokens_total": "Tokens whose KV was copied back from the host in place of being computed.",
    "num_disk_hit_tokens_total": "Tokens whose KV was read from disk into the host.",
    "num_spilled_blocks_total": "Blocks that the device evicted and the host took.",
    "num_disk_writes_dropped_total": "Blocks that the disk was to take and did not.",
    "num_disk_reads_failed_total": "Blocks that could not be read from disk, or were damaged there.",
    "num_beam_selections_total": "Tokens at which beams of a search were chosen.",
    "num_beam_table_entries_total": "Blocks that beams would hold if none were shared, at each.",
    "num_beam_blocks_total": "Blocks that beams held, at each of these tokens.",
    "num_grammar_compilations_total": "Grammars of structured output that were compiled.",
    "mask_wait_seconds_total": "Time that steps waited for the masks of structured output.",
    "num_window_blocks_total": "Blocks given back behind a sliding window.",
}


def families(seen: Observation) -> Iterator[Metric]:
    """Every family of the service's own, in a fixed order."""
    metrics, engine = seen.metrics, seen.engine
    names, values = ("model_name",), (engine.model.name if engine else "",)
    yield from _call_families(metrics)
    yield from _condition_families(seen)
    if engine is None:
        return
    for name, counted in metrics.counters.items():
        yield _counter(name, _DOCS[name], names, [(values, counted)])
    for name, value in metrics.gauges.items():
        yield _gauge(name, _DOCS[name], names, [(values, value)])
    for name, histogram in metrics.histograms.items():
        yield _histogram(f"{PREFIX}{name}", _DOCS[name], names, [(values, histogram)])
    yield from _request_families(metrics, names, values)
    stats = engine.stats
    for name, doc in _STATE_GAUGES.items():
        yield _gauge(name, doc, names, [(values, getattr(stats, name))])
    for name, doc in _STATE_COUNTERS.items():
        yield _counter(name, doc, names, [(values, getattr(stats, name))])
    by_kind = [((*values, kind), getattr(stats, f"num_{kind}_preemptions_total")) for kind in _KINDS]
    yield _counter("preemptions_total", "Preemptions by kind.", (*names, "kind"), by_kind)
    yield from _engine_families(engine)
    yield from _policy_families(engine.policies)
    yield from _adapter_families(engine.adapters, names, values)


_KINDS = ("swap", "recompute", "tail")


def _request_families(
    metrics: MetricsSnapshot, names: Sequence[str], values: tuple[str, ...]
) -> Iterator[Metric]:
    for name, doc, label, counts in (
        ("request_success_total", "Choices by how they ended.", "finished_reason", "request_success_total"),
        ("requests_finished_total", "Accepted requests by outcome.", "outcome", "requests_finished_total"),
        ("requests_refused_total", "Requests not accepted, by cause.", "cause", "requests_refused_total"),
        (
            "requests_shed_total",
            "Accepted requests that ended without a token for want of time or room, by cause.",
            "cause",
            "requests_shed_total",
        ),
        (
            "tenant_prompt_tokens_total",
            "Prompt tokens of accepted requests, by tenant.",
            "tenant",
            "tenant_prompt_tokens_total",
        ),
        (
            "tenant_generation_tokens_total",
            "Tokens of ended requests, by tenant.",
            "tenant",
            "tenant_generation_tokens_total",
        ),
    ):
        counted = getattr(metrics, counts).items()
        yield _counter(name, doc, (*names, label), [((*values, key), count) for key, count in counted])
    by_tenant = [((*values, *key), count) for key, count in metrics.tenant_requests_total.items()]
    labels = (*names, "tenant", "outcome")
    yield _counter("tenant_requests_total", "Ended requests, by tenant and outcome.", labels, by_tenant)


def _call_families(metrics: MetricsSnapshot) -> Iterator[Metric]:
    started = CounterMetricFamily("grpc_server_started", "Calls that came in.", labels=_METHOD)
    for method, count in metrics.grpc_server_started_total.items():
        started.add_metric(method, count)
    handled = CounterMetricFamily("grpc_server_handled", "Calls that ended.", labels=(*_METHOD, "grpc_code"))
    for (method, code), count in metrics.grpc_server_handled_total.items():
        handled.add_metric((*method, _CODES.get(code, code)), count)
    histograms: Iterable[tuple[Method, HistogramSnapshot]] = metrics.grpc_server_handling_seconds.items()
    causes = [((cause,), count) for cause, count in metrics.callers_refused_total.items()]
    doc = "How long calls took, streams to their end."
    yield started
    yield handled
    yield _histogram("grpc_server_handling_seconds", doc, _METHOD, histograms)
    yield _counter("callers_refused_total", "Calls of callers not known or not allowed.", ("cause",), causes)


def _condition_families(seen: Observation) -> Iterator[Metric]:
    condition = seen.condition
    states = [((state.value,), float(state is condition.health)) for state in EngineHealth]
    yield _gauge("health", "1 for the state that the service is in.", ("state",), states)
    yield _gauge(
        "seconds_without_progress",
        "Since a step last ended, while there is work.",
        (),
        [((), condition.seconds_without_progress)],
    )
    refused = [((kind,), count) for kind, count in seen.metrics.files_refused_total.items()]
    doc = "Changed files with a fault: what was read before stays in force."
    yield _counter("files_refused_total", doc, ("file",), refused)
    if seen.certificate_ends is not None:
        ends = [((), seen.certificate_ends)]
        yield _gauge("certificate_expiry_timestamp_seconds", "When the server's certificate ends.", (), ends)
    lost = [((), seen.num_log_lines_lost)]
    yield _counter("log_lines_lost_total", "Lines of the log that could not be written.", (), lost)


def _engine_families(engine: ServedEngine) -> Iterator[Metric]:
    model, server = engine.model, engine.server
    cache = {
        "block_size": server.block_size,
        "num_gpu_blocks": server.num_blocks,
        "num_cpu_blocks": server.num_host_blocks,
        "block_bytes": server.block_bytes,
        "cache_dtype": server.kv_dtype,
        "enable_prefix_caching": server.config.get("cache.enable_prefix_caching", ""),
        "device": server.device,
    }
    what = {
        "model_name": model.name,
        "version": server.version,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "kernels": server.kernels,
    }
    for name, doc, labels in (
        ("cache_config_info", "The KV cache, as configured.", cache),
        ("server_info", "What runs here.", what),
    ):
        yield _gauge(name, doc, tuple(labels), [(tuple(map(str, labels.values())), 1.0)])
    limits = [((), float(server.max_num_seqs))]
    yield _gauge("max_num_seqs", "Sequences that may run at once.", (), limits)


def _policy_families(info: PoliciesInfo) -> Iterator[Metric]:
    """One policy an axis and what it cost since it was set: a change of policy begins at 0 anew."""
    labels = ("axis", "policy")
    keys = [(policy.axis, policy.name) for policy in info.axes]
    yield _gauge("policy_info", "The policies in force.", labels, [(key, 1.0) for key in keys])
    quarantined = [float(policy.is_quarantined) for policy in info.axes]
    doc = "1 where the default of the axis decides instead."
    yield _gauge("policy_quarantined", doc, labels, zip(keys, quarantined, strict=True))
    for name, doc, values in (
        ("policy_calls_total", "Calls since it was set.", [policy.num_calls for policy in info.axes]),
        ("policy_seconds_total", "What these took.", [policy.seconds for policy in info.axes]),
        ("policy_faults_total", "Its bad answers.", [policy.num_faults for policy in info.axes]),
    ):
        yield _counter(name, doc, labels, zip(keys, values, strict=True))


def _adapter_families(
    figures: AdapterFigures, names: Sequence[str], values: tuple[str, ...]
) -> Iterator[Metric]:
    for name, doc, value in (
        ("num_adapters", "LoRA adapters that requests may name.", figures.num_adapters),
        ("num_adapters_loaded", "Adapters in memory, each content once.", figures.num_loaded),
        ("adapter_bytes", "Of the adapters in memory.", figures.num_bytes),
        ("adapter_memory_bytes", "What these may take.", figures.memory_bytes),
    ):
        yield _gauge(name, doc, names, [(values, value)])
    for name, doc, value in (
        ("adapter_loads_total", "Times that a name was given an adapter.", figures.num_loads_total),
        ("adapter_unloads_total", "Adapters that lost their name.", figures.num_unloads_total),
        ("adapter_reads_total", "Adapters read from their folders.", figures.num_reads_total),
        ("adapter_evictions_total", "Adapters that made room for others.", figures.num_evictions_total),
    ):
        yield _counter(name, doc, names, [(values, value)])
    labels = (*names, "adapter")
    live = [((*values, name), float(count)) for name, count in figures.requests.items()]
    yield _gauge("num_adapter_requests", "Requests that live and have an adapter, by its name.", labels, live)
    had = [((*values, name), float(count)) for name, count in figures.requests_total.items()]
    yield _counter("adapter_requests_total", "Requests that had an adapter, by its name.", labels, had)


_Values = Iterable[tuple[tuple[str, ...], float]]


def _counter(name: str, doc: str, labels: Sequence[str], values: _Values) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}{name}".removesuffix("_total"), doc, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family


def _gauge(name: str, doc: str, labels: Sequence[str], values: _Values) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}{name}", doc, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family


def _histogram(
    name: str,
    doc: str,
    labels: Sequence[str],
    values: Iterable[tuple[Sequence[str], HistogramSnapshot]],
) -> Metric:
    family = HistogramMetricFamily(name, doc, labels=labels)
    for key, histogram in values:
        bounds = [*map(str, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, histogram.cumulative), strict=True))
        family.add_metric(key, buckets, histogram.sum)
    return family


_CODES = {
    "OK": "OK",
    "CANCELLED": "Canceled",
    "UNKNOWN": "Unknown",
    "INVALID_ARGUMENT": "InvalidArgument",
    "DEADLINE_EXCEEDED": "DeadlineExceeded",
    "NOT_FOUND": "NotFound",
    "ALREADY_EXISTS": "AlreadyExists",
    "PERMISSION_DENIED": "PermissionDenied",
    "RESOURCE_EXHAUSTED": "ResourceExhausted",
    "FAILED_PRECONDITION": "FailedPrecondition",
    "ABORTED": "Aborted",
    "OUT_OF_RANGE": "OutOfRange",
    "UNIMPLEMENTED": "Unimplemented",
    "INTERNAL": "Internal",
    "UNAVAILABLE": "Unavailable",
    "DATA_LOSS": "DataLoss",
    "UNAUTHENTICATED": "Unauthenticated",
}
"""As Go's gRPC spells codes, whose metrics the dashboards were made for."""
