"""The load of this moment, as balancers and operators read it."""

from __future__ import annotations

from pageturner.service.engine.api import EngineClient, EngineHealth
from pageturner.service.rpc import convert
from pageturner.v1 import admin_pb2 as pb


def load_of(engine: EngineClient) -> pb.Load:
    """The scheduler's figures, what came and went of late, and whether work is taken."""
    stats, condition, recent = engine.load(), engine.condition, engine.recent_load()
    load = convert.from_stats(stats)
    load.kv_cache_usage = stats.num_blocks_used / stats.num_blocks if stats.num_blocks else 0.0
    load.generation_tokens_per_second = recent.generation_tokens_per_second
    load.prompt_tokens_per_second = recent.prompt_tokens_per_second
    load.requests_per_second = recent.requests_per_second
    load.faults_per_second = recent.faults_per_second
    load.max_running_sequences = engine.server_info().max_num_seqs
    load.is_ready = condition.is_ready
    load.is_draining = condition.health is EngineHealth.DRAINING
    load.not_ready_reason = condition.reason
    load.seconds_without_progress = condition.seconds_without_progress
    load.num_live = condition.num_live
    adapters = engine.adapter_figures()
    load.num_adapters, load.num_adapters_loaded = adapters.num_adapters, adapters.num_loaded
    load.adapter_bytes, load.num_adapter_reads_total = adapters.num_bytes, adapters.num_reads_total
    return load
