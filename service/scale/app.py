"""The application, as `serve run pageturner.service.scale.app:build` and Ray's YAML files name it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from pageturner.policies import registry
from pageturner.policies.errors import PolicyError
from pageturner.service.errors import ConfigError
from pageturner.service.scale.coordinator import Coordinator
from pageturner.service.scale.engine_replica import EngineReplica
from pageturner.service.scale.ingress import Ingress
from pageturner.service.scale.on_ray import (
    COORDINATOR,
    ENGINE,
    INGRESS,
    RayNeighbours,
    RayReplicas,
    engines,
    is_gone,
    own_replica_id,
)
from pageturner.service.scale.options import ScaleOptions, read_arguments

SERVICERS = ("pageturner.service.scale.at_proxy.add_services",)
"""What `grpc_options.grpc_servicer_functions` has to name."""

_QUIET = {"enable_access_log": False}
"""Of deployments that are asked by the application itself: a client's call is a line of the ingress."""

_WATCHED = {"health_check_period_s": 5.0, "health_check_timeout_s": 10.0}
"""Three checks in a row that are late end a process that hangs: within half a minute, and not in the two that
Ray takes by default."""

MANY = 1 << 16
"""Calls at once of one process: how many wait, and who is refused, is the engines' own to say."""


def build(arguments: Mapping[str, Any]) -> serve.Application:
    """The application of these arguments (`options.read_arguments`). Raises ConfigError."""
    settings = read_arguments(arguments)
    scale = settings.scale
    coordinator = serve.deployment(
        Coordinator,
        name=COORDINATOR,
        num_replicas=1,
        max_ongoing_requests=MANY,
        ray_actor_options={"num_cpus": 0},
        logging_config=_QUIET,
        **_WATCHED,
    ).bind(partial(_engines, scale.resume_seconds))
    engine = serve.deployment(
        EngineReplica,
        name=ENGINE,
        max_ongoing_requests=MANY,
        max_surge_percent=scale.surge_percent,
        ray_actor_options={"num_cpus": scale.num_cpus, "num_gpus": scale.num_gpus},
        graceful_shutdown_timeout_s=scale.drain_seconds,
        graceful_shutdown_wait_loop_s=0.2,
        logging_config=_QUIET,
        **_WATCHED,
        request_router_config=_routing(scale),
        **_replicas(scale),
    ).bind(settings, coordinator, own_replica_id, is_gone)
    return serve.deployment(
        Ingress,
        name=INGRESS,
        num_replicas=scale.num_ingresses,
        max_ongoing_requests=MANY,
        max_surge_percent=100,  # it takes no room, and calls are never without one
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=scale.drain_seconds,
        graceful_shutdown_wait_loop_s=0.2,
        **_WATCHED,
    ).bind(settings, RayNeighbours(scale.resume_seconds, scale.num_ingresses > 1), engine, coordinator)


def _engines(patience_seconds: float) -> RayReplicas:
    return RayReplicas(engines(), patience_seconds)


def _routing(scale: ScaleOptions) -> RequestRouterConfig:
    spec = scale.routing
    try:
        policy = registry.create("routing", spec.name, spec.options)
    except PolicyError as error:
        raise ConfigError("scale.routing", str(error)) from error
    return RequestRouterConfig(
        request_router_class="pageturner.service.scale.request_router.PolicyRouter",
        request_router_kwargs={"policy": spec.name, "options": registry.options_of(policy)},
        request_routing_stats_period_s=scale.report_seconds,
    )


def _replicas(scale: ScaleOptions) -> dict[str, Any]:
    if scale.is_fixed:
        return {"num_replicas": scale.min_replicas}
    policy = AutoscalingPolicy(
        policy_function="pageturner.service.scale.autoscaling.QueuedTokens",
        policy_kwargs={
            "target_queued_tokens": scale.target_queued_tokens,
            "target_busy": scale.target_busy,
        },
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=scale.min_replicas,
            max_replicas=scale.max_replicas,
            upscale_delay_s=scale.upscale_delay_seconds,
            downscale_delay_s=scale.downscale_delay_seconds,
            look_back_period_s=scale.metrics_seconds,
            metrics_interval_s=scale.metrics_seconds / 4,
            policy=policy,
        )
    }
