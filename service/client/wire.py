"""The client's values to protobuf and back."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from google.protobuf.message import Message

from pageturner.policies.spec import PolicySpec
from pageturner.policies.views import Rates
from pageturner.service.client.messages import build, check_number, json_values
from pageturner.service.client.structured import to_structured_output
from pageturner.service.client.values import (
    BeamSearchOptions,
    Choice,
    Completion,
    Options,
    RequestOptions,
    Sampling,
    ScoreOptions,
)
from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    FinishedEvent,
    FinishReason,
    RequestTimings,
    SampledToken,
    SchedulerStats,
    ScoredTokensEvent,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from pageturner.service.core.sampling_params import BeamSearch, EarlyStopping
from pageturner.service.engine.api import (
    AbortOutcome,
    AcceptedEvent,
    AdapterInfo,
    ContinuationScore,
    MeasuredProducts,
    ModelInfo,
    ProductsInfo,
    ScoreAnswer,
    ServerInfo,
    SpeculationOptions,
    StreamEvent,
)
from pageturner.service.engine.tenants import Cause, TenantReport, TenantsReport
from pageturner.service.errors import DeadlineExceeded, InvalidArgument
from pageturner.service.identity import TenantLimits
from pageturner.service.policy_host.reports import Disagreement, PoliciesInfo, PolicyInfo, ShadowInfo
from pageturner.v1 import admin_pb2, generation_pb2, model_pb2

# To the wire


_Request = TypeVar("_Request", generation_pb2.GenerateRequest, generation_pb2.GenerateStreamRequest)

LONGEST_TIMEOUT_SECONDS = 27_000 * 3600.0
"""Three years, the longest that gRPC sends. More is no limit at all, and overflows its clocks."""

_OPTIONS = frozenset(Options.__annotations__)
_SCORE_OPTIONS = frozenset(ScoreOptions.__annotations__)
_SAMPLING = frozenset(Sampling.__annotations__)


def to_request(
    kind: type[_Request], prompt: generation_pb2.Prompt, options: Options
) -> tuple[_Request, float | None]:
    """The request and its time limit; None for none. Options of None count as left out.

    Raises InvalidArgument with the path of an option that the wire cannot carry, TypeError for one that
    does not exist.
    """
    given, timeout_seconds = _given(options, _OPTIONS)
    sampling = {name: given.pop(name) for name in tuple(given) if name in _SAMPLING}
    if sampling.get("beam_search") is not None:
        sampling["beam_search"] = to_beam_search(sampling["beam_search"])
    if (form := sampling.get("structured_output")) is not None:
        sampling["structured_output"] = to_structured_output(form)
    message = build(generation_pb2.SamplingParams, "sampling.", **sampling)
    return build(kind, prompt=prompt, sampling=message, **given), timeout_seconds


def to_beam_search(search: BeamSearch | BeamSearchOptions) -> generation_pb2.BeamSearch:
    """Raises InvalidArgument for what the wire cannot carry, TypeError for a field that does not exist."""
    given: dict[str, Any] = asdict(search) if isinstance(search, BeamSearch) else dict(search)
    for name in given:
        if name not in _BEAM_SEARCH:
            raise TypeError(f"there is no option {name!r} of beam_search")
    if "early_stopping" in given:
        stopping = given["early_stopping"]
        try:
            given["early_stopping"] = _EARLY_STOPPING[EarlyStopping(stopping)]
        except ValueError as error:
            known = ", ".join(each.value for each in EarlyStopping)
            raise InvalidArgument(
                "sampling.beam_search.early_stopping", f"{stopping!r} is none of {known}"
            ) from error
    return build(generation_pb2.BeamSearch, "sampling.beam_search.", **given)


_BEAM_SEARCH = frozenset(BeamSearchOptions.__annotations__)
_EARLY_STOPPING = {
    EarlyStopping.HEURISTIC: generation_pb2.EARLY_STOPPING_HEURISTIC,
    EarlyStopping.FIRST: generation_pb2.EARLY_STOPPING_FIRST,
    EarlyStopping.NEVER: generation_pb2.EARLY_STOPPING_NEVER,
}


def to_score_request(
    prompt: generation_pb2.Prompt, continuations: Iterable[str | Iterable[int]], options: ScoreOptions
) -> tuple[generation_pb2.ScoreRequest, float | None]:
    """As `to_request`. Raises TypeError for continuations that are one text or no list."""
    given, timeout_seconds = _given(options, _SCORE_OPTIONS)
    if isinstance(continuations, str | bytes):
        raise TypeError("continuations is one text, not a list of texts or of lists of token ids")
    messages = []
    for index, continuation in enumerate(continuations):
        path = f"continuations[{index}]."
        if isinstance(continuation, str):
            messages.append(build(generation_pb2.Continuation, path, text=continuation))
        else:
            ids = build(generation_pb2.TokenIds, f"{path}token_ids.", ids=continuation)
            messages.append(generation_pb2.Continuation(token_ids=ids))
    request = build(generation_pb2.ScoreRequest, prompt=prompt, continuations=messages, **given)
    return request, timeout_seconds


def _given(options: RequestOptions, known: frozenset[str]) -> tuple[dict[str, Any], float | None]:
    """What was stated beside the time limit, and that limit. Raises TypeError for what does not exist."""
    given: dict[str, Any] = dict(options)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"there is no option {name!r}{hint}")
    given.pop("session", None)  # of the client's own
    return given, to_timeout(given.pop("timeout_seconds", None))


def to_timeout(seconds: float | None, name: str = "timeout_seconds") -> float | None:
    """As gRPC takes it: None for no limit.

    Raises InvalidArgument for NaN and for less than nothing, DeadlineExceeded for nothing: gRPC would let
    a quick enough answer through.
    """
    if seconds is None:
        return None
    number = check_number(seconds, name)
    if not number >= 0:  # also refuses NaN
        raise InvalidArgument(name, f"{number} s is not a time")
    if number == 0:
        raise DeadlineExceeded(f"{name} is 0: the time was over before anything was sent")
    return number if number <= LONGEST_TIMEOUT_SECONDS else None


# From the wire


_FINISH_REASONS = {
    generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    generation_pb2.FINISH_REASON_ABORTED: FinishReason.ABORTED,
}

ABORT_OUTCOMES = {
    generation_pb2.ABORT_OUTCOME_ABORTED: AbortOutcome.ABORTED,
    generation_pb2.ABORT_OUTCOME_ALREADY_FINISHED: AbortOutcome.ALREADY_FINISHED,
    generation_pb2.ABORT_OUTCOME_NOT_FOUND: AbortOutcome.NOT_FOUND,
}


def most_telling(outcomes: Iterable[Mapping[str, AbortOutcome]]) -> Mapping[str, AbortOutcome]:
    """What became of each request, by what several servers said: one that had it knows best."""
    found: dict[str, AbortOutcome] = {}
    for outcome_of in outcomes:
        for request_id, outcome in outcome_of.items():
            found[request_id] = min(found.get(request_id, outcome), outcome, key=_TELLING.index)
    return found


_TELLING = (AbortOutcome.ABORTED, AbortOutcome.ALREADY_FINISHED, AbortOutcome.NOT_FOUND)


def from_message(message: generation_pb2.GenerateStreamResponse) -> StreamEvent | None:
    """None for an event that a newer server knows and this client does not."""
    request_id = message.request_id
    match message.WhichOneof("event"):
        case "accepted":
            accepted = message.accepted
            return AcceptedEvent(
                request_id,
                accepted.seed,
                accepted.prompt_tokens,
                accepted.max_tokens,
                accepted.fingerprint,
                accepted.exact,
                accepted.rendered_prompt,
            )
        case "delta":
            delta = message.delta
            return TokenEvent(request_id, delta.index, from_tokens(delta), delta.text)
        case "prompt_logprobs":
            scored = message.prompt_logprobs
            return ScoredTokensEvent(request_id, None, scored.start, from_logprobs(scored.logprobs))
        case "choice_finished":
            choice = message.choice_finished
            return ChoiceFinishedEvent(
                request_id,
                choice.index,
                from_reason(choice),
                from_matched(choice),
                from_score(choice),
                from_sum(choice),
            )
        case "finished":
            finished = message.finished
            return FinishedEvent(
                request_id,
                from_usage(finished.usage),
                from_timings(finished.timings),
                policies=dict(finished.policies),
                policies_changed=finished.policies_changed,
            )
    return None


def from_response(response: generation_pb2.GenerateResponse) -> Completion:
    """The answer to Generate as a completion."""
    return Completion(
        response.request_id,
        response.seed,
        tuple(
            Choice(
                choice.index,
                choice.text,
                from_tokens(choice),
                from_reason(choice),
                from_matched(choice),
                from_score(choice),
                from_sum(choice),
            )
            for choice in response.choices
        ),
        from_usage(response.usage),
        from_timings(response.timings),
        dict(response.policies),
        response.policies_changed,
        from_logprobs(response.prompt_logprobs),
        response.rendered_prompt,
    )


def from_scores(response: generation_pb2.ScoreResponse) -> ScoreAnswer:
    """The answer to Score."""
    return ScoreAnswer(
        response.request_id,
        tuple(
            ContinuationScore(score.logprob, score.greedy, from_logprobs(score.tokens))
            for score in response.scores
        ),
        from_usage(response.usage),
        from_timings(response.timings),
    )


def from_tokens(message: generation_pb2.Delta | generation_pb2.Choice) -> tuple[SampledToken, ...]:
    if not message.logprobs:
        return tuple(map(SampledToken, message.token_ids))
    return from_logprobs(message.logprobs)


def from_logprobs(messages: Iterable[generation_pb2.TokenLogprobs]) -> tuple[SampledToken, ...]:
    return tuple(
        SampledToken(
            logprobs.chosen.token_id,
            logprobs.chosen.logprob,
            tuple(TokenLogprob(top.token_id, top.logprob) for top in logprobs.top),
        )
        for logprobs in messages
    )


def from_sum(message: generation_pb2.ChoiceFinished | generation_pb2.Choice) -> float | None:
    return message.cumulative_logprob if message.HasField("cumulative_logprob") else None


def from_reason(message: generation_pb2.ChoiceFinished | generation_pb2.Choice) -> FinishReason:
    return _FINISH_REASONS.get(message.finish_reason, FinishReason.UNSPECIFIED)


def from_matched(message: generation_pb2.ChoiceFinished | generation_pb2.Choice) -> str | int | None:
    match message.WhichOneof("matched"):
        case "stop_string":
            return message.stop_string
        case "stop_token_id":
            return message.stop_token_id
    return None


def from_score(message: generation_pb2.ChoiceFinished | generation_pb2.Choice) -> float | None:
    return message.score if message.HasField("score") else None


def from_usage(usage: generation_pb2.Usage) -> Usage:
    return Usage(
        usage.prompt_tokens,
        usage.cached_prompt_tokens,
        usage.output_tokens,
        usage.resumed_tokens,
        usage.drafted_tokens,
        usage.accepted_draft_tokens,
    )


def from_timings(timings: generation_pb2.Timings) -> RequestTimings:
    return RequestTimings(
        timings.queue_seconds,
        timings.prefill_seconds,
        timings.decode_seconds,
        timings.preemptions.swaps,
        timings.preemptions.recomputes,
        timings.preemptions.tail_reclaims,
    )


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
