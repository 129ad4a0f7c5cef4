"""What all replicas answered, as one answer."""

from __future__ import annotations

from pageturner.service.scale import merging
from pageturner.v1 import admin_pb2 as admin
from pageturner.v1 import generation_pb2 as generation

ABORTED, FINISHED, NOT_FOUND = (
    generation.ABORT_OUTCOME_ABORTED,
    generation.ABORT_OUTCOME_ALREADY_FINISHED,
    generation.ABORT_OUTCOME_NOT_FOUND,
)


def load_of(**fields: object) -> admin.GetLoadResponse:
    return admin.GetLoadResponse(load=admin.Load(**fields))  # type: ignore[arg-type] # as the fields are


def test_counts_are_added_shares_averaged_and_times_those_of_the_worst() -> None:
    busy = load_of(num_running=7, num_waiting=2, kv_cache_usage=0.75, queue_seconds=3.0, is_ready=True)
    idle = load_of(num_running=1, kv_cache_usage=0.25, queue_seconds=0.5, is_draining=True)
    found = merging.load([busy, idle]).load
    assert (found.num_running, found.num_waiting) == (8, 2)
    assert found.kv_cache_usage == 0.5
    assert found.queue_seconds == 3.0
    assert found.is_ready
    assert not found.is_draining, "one of them is not"


def test_no_replica_is_ready_for_the_reason_of_the_first() -> None:
    found = merging.load([load_of(not_ready_reason="starting"), load_of(not_ready_reason="full")]).load
    assert (found.is_ready, found.not_ready_reason) == (False, "starting")
    ready = load_of(is_ready=True)
    assert merging.load([load_of(not_ready_reason="starting"), ready]).load.not_ready_reason == ""
    nobody = merging.load([]).load
    assert (nobody.is_ready, nobody.is_draining, nobody.not_ready_reason) == (
        False,
        False,
        "no replica is there",
    )


def outcomes(*of_each: int) -> generation.AbortResponse:
    response = generation.AbortResponse()
    for outcome in of_each:
        response.results.add(outcome=outcome)
    return response


def test_of_each_request_the_replica_is_heard_that_knew_most() -> None:
    request = generation.AbortRequest(request_ids=["a", "b", "c"])
    answers = [outcomes(NOT_FOUND, NOT_FOUND, NOT_FOUND), outcomes(ABORTED, FINISHED, NOT_FOUND)]
    for order in (answers, answers[::-1]):
        found = merging.aborted(request, order)
        assert [(each.request_id, each.outcome) for each in found.results] == [
            ("a", ABORTED),
            ("b", FINISHED),
            ("c", NOT_FOUND),
        ]
    assert [each.outcome for each in merging.aborted(request, []).results] == [NOT_FOUND] * 3
