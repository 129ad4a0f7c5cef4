"""What servers say of themselves, and which policies they are to have, from messages and to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from google.protobuf.message import Message

from pageturner.policies.spec import PolicySpec
from pageturner.policies.views import Rates
from pageturner.service.client.messages import build, json_values
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.engine.api import (
    AdapterInfo,
    MeasuredProducts,
    ModelInfo,
    ProductsInfo,
    ServerInfo,
    SpeculationOptions,
)
from pageturner.service.engine.tenants import Cause, TenantReport, TenantsReport
from pageturner.service.identity import TenantLimits
from pageturner.service.policy_host.reports import Disagreement, PoliciesInfo, PolicyInfo, ShadowInfo
from pageturner.v1 import admin_pb2, model_pb2


def field_values(kind: type[Any], message: Message) -> dict[str, Any]:
    """The fields that a domain value and its message have under one name; one that does not compare is the
    server's own."""
    return {field.name: getattr(message, field.name) for field in fields(kind) if field.compare}


def from_model(model: model_pb2.Model) -> ModelInfo:
    lists = {"eos_token_ids": tuple(model.eos_token_ids), "adapters": tuple(model.adapters)}
    return ModelInfo(**field_values(ModelInfo, model) | lists)


def from_server_info(info: admin_pb2.GetServerInfoResponse) -> ServerInfo:
    values = field_values(ServerInfo, info) | {
        "rates": Rates(**field_values(Rates, info.rates)),
        "config": dict(info.config),
        "products": _products(info.products),
        "speculation": _speculation(info),
    }
    return ServerInfo(**values)


def _speculation(info: admin_pb2.GetServerInfoResponse) -> SpeculationOptions:
    if not info.HasField("speculation"):  # a server that knows of none
        return SpeculationOptions()
    values = field_values(SpeculationOptions, info.speculation)
    if not info.speculation.HasField("row_cost"):
        values["row_cost"] = None
    return SpeculationOptions(**values)


def _products(products: admin_pb2.Products) -> ProductsInfo:
    measured = tuple(
        MeasuredProducts(each.name, tuple(each.seconds), each.mean_kl if each.HasField("mean_kl") else None)
        for each in products.measured
    )
    return ProductsInfo(products.name, products.reason, measured, products.warning)


def to_choices(path: str, specs: Mapping[str, PolicySpec | None]) -> dict[str, admin_pb2.PolicyChoice]:
    """By axis; None becomes a choice of nothing. path: of the field, for errors.

    Raises TypeError for what is no PolicySpec, InvalidArgument for what the wire cannot carry.
    """
    return {axis: _to_choice(f"{path}[{axis}]", spec) for axis, spec in specs.items()}


def _to_choice(path: str, spec: PolicySpec | None) -> admin_pb2.PolicyChoice:
    if spec is None:
        return admin_pb2.PolicyChoice()
    if not isinstance(spec, PolicySpec):
        raise TypeError(f"{path} is of type {type(spec).__name__}, not a PolicySpec")
    options = json_values(f"{path}.options", spec.options)
    return build(admin_pb2.PolicyChoice, f"{path}.", name=spec.name, options=options)


def from_policies(
    response: admin_pb2.GetPoliciesResponse | admin_pb2.SetPoliciesResponse,
) -> PoliciesInfo:
    return PoliciesInfo(response.revision, tuple(map(from_policy, response.policies)))


def from_policy(policy: admin_pb2.Policy) -> PolicyInfo:
    return PolicyInfo(
        policy.axis,
        policy.name,
        _options(policy.options),
        tuple(policy.available),
        policy.quarantined,
        policy.faults,
        policy.last_fault,
        _shadow(policy.axis, policy.shadow) if policy.HasField("shadow") else None,
        policy.quarantine_reason,
        policy.calls,
        policy.seconds,
        policy.step_seconds,
        policy.asking_seconds,
    )


def _shadow(axis: str, shadow: admin_pb2.Shadow) -> ShadowInfo:
    return ShadowInfo(
        shadow.name,
        _options(shadow.options),
        shadow.compared,
        shadow.disagreements,
        tuple(Disagreement(axis, one.subject, one.obeyed, one.shadow) for one in shadow.samples),
        shadow.faults,
        shadow.last_fault,
        shadow.seconds,
        shadow.step_seconds,
        shadow.stopped,
    )


def _options(options: Mapping[str, str]) -> dict[str, object]:
    return {name: json.loads(value) for name, value in options.items()}


def from_tenants(response: admin_pb2.ListTenantsResponse) -> TenantsReport:
    tenants = tuple(map(_tenant, response.tenants))
    return TenantsReport(tenants, response.num_tenants, _refused(response.refused_total))


def _tenant(tenant: admin_pb2.Tenant) -> TenantReport:
    limits = tenant.limits
    given = {field.name: value for field, value in limits.ListFields()}
    return TenantReport(
        tenant.name,
        TenantLimits(**given),
        tenant.num_requests,
        tenant.num_waiting,
        tenant.num_queued_tokens,
        tenant.tokens_left if tenant.HasField("tokens_left") else None,
        _refused(tenant.refused_total),
    )


def _refused(counts: Mapping[str, int]) -> dict[Cause, int]:
    """Causes that a newer server has and this client does not know are left out."""
    return {Cause(name): count for name, count in counts.items() if name in _CAUSES}


_CAUSES = frozenset(cause.value for cause in Cause)


def from_adapter(adapter: admin_pb2.Adapter) -> AdapterInfo:
    return AdapterInfo(**field_values(AdapterInfo, adapter) | {"modules": tuple(adapter.modules)})


def from_stats(load: admin_pb2.Load) -> SchedulerStats:
    return SchedulerStats(**field_values(SchedulerStats, load))
