"""Open Request Cost Aggregation: the load in the trailers of calls, for balancers in clients and proxies.

gRPC's own weighted_round_robin reads it, and Envoy. https://github.com/cncf/xds,
xds/data/orca/v3/orca_load_report.proto; the package that has its stubs brings those of all of Envoy's API.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    MessageOptions,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from pageturner.service.engine.api import EngineClient

TRAILER = "endpoint-load-metrics-bin"

OWN_TRAILER = "pageturner-load-bin"
"""The same for clients of ours: gRPC's take the other out of what they show, for their own balancers."""

REQUESTS_WAITING, REQUESTS_RUNNING = "num_requests_waiting", "num_requests_running"
QUEUED_TOKENS = "num_queued_prompt_tokens"
"""Names of metrics that balancers of ours read."""

_PACKAGE = "xds.data.orca.v3"
_SCALARS = {"application_utilization": 9, "rps_fractional": 6, "eps": 7}
_NAMED_METRICS = 8


def _message_class() -> type[Any]:
    """OrcaLoadReport, as far as it is filled in here. In a pool of its own, since a program may have loaded
    all of it under the same name."""
    optional, repeated = FieldDescriptorProto.LABEL_OPTIONAL, FieldDescriptorProto.LABEL_REPEATED
    double, string = FieldDescriptorProto.TYPE_DOUBLE, FieldDescriptorProto.TYPE_STRING
    entry = DescriptorProto(name="NamedMetricsEntry", options=MessageOptions(map_entry=True))
    entry.field.add(name="key", number=1, type=string, label=optional)
    entry.field.add(name="value", number=2, type=double, label=optional)
    report = DescriptorProto(name="OrcaLoadReport", nested_type=[entry])
    for name, number in _SCALARS.items():
        report.field.add(name=name, number=number, type=double, label=optional)
    report.field.add(
        name="named_metrics",
        number=_NAMED_METRICS,
        type=FieldDescriptorProto.TYPE_MESSAGE,
        label=repeated,
        type_name=f".{_PACKAGE}.OrcaLoadReport.NamedMetricsEntry",
    )
    pool = DescriptorPool()
    pool.Add(
        FileDescriptorProto(
            name="xds/data/orca/v3/orca_load_report.proto",
            package=_PACKAGE,
            syntax="proto3",
            message_type=[report],
        )
    )
    return GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.OrcaLoadReport"))


OrcaLoadReport = _message_class()


def load_report(engine: EngineClient) -> bytes:
    """The load of this moment, serialized.

    application_utilization: the larger share, of sequences or of KV blocks, that is taken; above 1 where
    requests wait.
    rps_fractional, eps: of the last seconds. named_metrics: under vLLM's names, and beside those the prompt
    tokens that wait and the estimated wait for a turn.
    """
    stats, recent, info = engine.load(), engine.recent_load(), engine.server_info()
    kv_usage = stats.num_blocks_used / stats.num_blocks if stats.num_blocks else 0.0
    wanted = stats.num_running_sequences + stats.num_waiting + stats.num_swapped
    report = OrcaLoadReport(
        application_utilization=max(wanted / info.max_num_seqs, kv_usage),
        rps_fractional=recent.requests_per_second,
        eps=recent.faults_per_second,
        named_metrics={
            "kv_cache_usage_perc": kv_usage,
            REQUESTS_WAITING: float(stats.num_waiting),
            REQUESTS_RUNNING: float(stats.num_running),
            QUEUED_TOKENS: float(stats.num_queued_prompt_tokens),
            "queue_seconds": stats.queue_seconds,
        },
    )
    serialized: bytes = report.SerializeToString()
    return serialized
