"""One answer of the answers of all replicas."""

from __future__ import annotations

from collections.abc import Sequence

from pageturner.v1 import admin_pb2, generation_pb2

_MEANS = frozenset({"kv_cache_usage"})
_LARGEST = frozenset({"queue_seconds", "seconds_without_progress"})


def load(answers: Sequence[admin_pb2.GetLoadResponse]) -> admin_pb2.GetLoadResponse:
    """Counters and gauges added up; shares on average; times of those that have it worst. Ready if one is,
    draining if all are. The processes' own figures are left out: they are of several machines."""
    total = admin_pb2.Load()
    for field in admin_pb2.Load.DESCRIPTOR.fields:
        values = [getattr(answer.load, field.name) for answer in answers]
        if not values or field.is_repeated or field.type == field.TYPE_MESSAGE:
            continue
        if field.name == "is_ready":
            total.is_ready = any(values)
        elif field.name == "is_draining":
            total.is_draining = all(values)
        elif field.name == "not_ready_reason":
            total.not_ready_reason = "" if any(a.load.is_ready for a in answers) else values[0]
        elif field.name in _MEANS:
            setattr(total, field.name, sum(values) / len(values))
        elif field.name in _LARGEST:
            setattr(total, field.name, max(values))
        else:
            setattr(total, field.name, sum(values))
    if not answers:
        total.not_ready_reason = "no replica is there"
    return admin_pb2.GetLoadResponse(load=total)


_KNOWN_BEST = (
    generation_pb2.ABORT_OUTCOME_ABORTED,
    generation_pb2.ABORT_OUTCOME_ALREADY_FINISHED,
    generation_pb2.ABORT_OUTCOME_NOT_FOUND,
)


def aborted(
    request: generation_pb2.AbortRequest, answers: Sequence[generation_pb2.AbortResponse]
) -> generation_pb2.AbortResponse:
    """Of each id what the replica said that knew most of it."""
    response = generation_pb2.AbortResponse()
    for position, request_id in enumerate(request.request_ids):
        outcomes = {answer.results[position].outcome for answer in answers}
        outcome = next((each for each in _KNOWN_BEST if each in outcomes), _KNOWN_BEST[-1])
        response.results.add(request_id=request_id, outcome=outcome)
    return response
