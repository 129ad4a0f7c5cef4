"""What `explain` says of scripted scenes, word for word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from support.core_harness import CoreHarness
from support.flight import record_of, recorded

from pageturner.policies import registry
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.errors import InvalidArgument
from pageturner.service.flight.explain import AmbiguousRequest, NotInRecord, explain


def harness(names: Mapping[str, str], *, num_blocks: int, watermark: float = 0.0) -> CoreHarness:
    """Blocks of two tokens, eight tokens and three sequences a step, a recorder."""
    made = CoreHarness(
        registry.create_set(dict(names)),
        num_blocks=num_blocks,
        block_size=2,
        num_host_blocks=8,
        options=SchedulerOptions(
            max_model_len=40, max_num_seqs=3, max_num_batched_tokens=8, watermark=watermark
        ),
    )
    recorded(made)
    return made


def told(scene: CoreHarness, request_id: str) -> str:
    return "\n".join(str(line).strip() for line in explain(record_of(scene), request_id))


def test_a_request_served_alone_is_explained() -> None:
    scene = harness({}, num_blocks=8)
    name = scene.submit((0, 1, 2), max_tokens=2)
    scene.run_to_end()
    assert told(scene, name) == (
        "0.000 s  queued: 3 prompt tokens, at most 2 output tokens, tenant t0\n"
        "1.000 s  became the guarded request (head of the queue): no policy can hold it back\n"
        "1.000 s  admitted after 1.000 s in the queue, as the guarded request, whatever the policies say\n"
        "2.000 s  choice 0 ended: length\n"
        "2.000 s  finished: 2 output tokens, 1.000 s in the queue"
    )


def test_preempted_by_swap_overtaken_and_resumed() -> None:
    scene = harness(
        {"admission": "first-chunk", "reclaim": "always-swap", "victim": "least-computed"}, num_blocks=6
    )
    for first in range(3):
        scene.submit((first, 1, 2), max_tokens=6)
    scene.submit((0, 1, 1, 2), max_tokens=3)
    scene.run_to_end()
    assert told(scene, "r1") == (
        "0.000 s  queued: 3 prompt tokens, at most 6 output tokens, tenant t0\n"
        "1.000 s  admitted after 1.000 s in the queue, by admission policy first-chunk\n"
        "5.000 s  preempted by swap for r0, which lacked 1 block: victim policy least-computed ranked it "
        "1 of 1; reclaim policy always-swap chose how\n"
        "6.000 s  not admitted: it does not fit (needs 3 blocks, 2 available)\n"
        "6.000 s  overtaken by r2, which was admitted\n"
        "7.000 s  not admitted by admission policy first-chunk (needs 4 blocks, 3 available) (2 steps)\n"
        "9.000 s  not admitted: it does not fit (needs 3 blocks, 2 available)\n"
        "9.000 s  overtaken by r3, which was admitted\n"
        "11.000 s  became the guarded request (head of the queue): no policy can hold it back\n"
        "11.000 s  swapped in and resumed after 6.000 s in the queue, as the guarded request, whatever "
        "the policies say\n"
        "12.000 s  choice 0 ended: length\n"
        "12.000 s  finished: 6 output tokens, 7.000 s in the queue, preempted 1 time"
    )
    assert "5.000 s  r1 was preempted for it by swap" in told(scene, "r0")


def test_refused_by_the_admission_policy_for_a_while() -> None:
    scene = harness({"admission": "full-prompt"}, num_blocks=8, watermark=0.2)
    scene.submit((0, 1, 2, 0, 1, 2, 0, 1), max_tokens=3)
    late = scene.submit((1, 1, 2, 0, 1, 2), max_tokens=2)
    scene.run_to_end()
    assert told(scene, late) == (
        "0.000 s  queued: 6 prompt tokens, at most 2 output tokens, tenant t0\n"
        "1.000 s  stood behind in the order of queue policy fcfs; admissions stopped: the step's token "
        "budget was spent, as batch policy decode-first split it\n"
        "2.000 s  not admitted by admission policy full-prompt (needs 3 blocks, 3 available, watermark 2) "
        "(2 steps)\n"
        "4.000 s  became the guarded request (head of the queue): no policy can hold it back\n"
        "4.000 s  admitted after 4.000 s in the queue, as the guarded request, whatever the policies say\n"
        "5.000 s  choice 0 ended: length\n"
        "5.000 s  finished: 2 output tokens, 4.000 s in the queue"
    )


def test_waited_for_a_producer_of_its_prefix() -> None:
    scene = harness({}, num_blocks=16)
    scene.submit((0, 1, 2, 0), max_tokens=3)
    late = scene.submit((0, 1, 2, 0, 1), max_tokens=1)
    scene.run_to_end()
    assert told(scene, late) == (
        "0.000 s  queued: 5 prompt tokens, at most 1 output token, tenant t0\n"
        "1.000 s  waited for r0, which computes blocks of the same prefix\n"
        "2.000 s  admitted after 2.000 s in the queue, by admission policy full-prompt; 4 tokens of it were "
        "cached\n"
        "2.000 s  choice 0 ended: length\n"
        "2.000 s  finished: 1 output token, 2.000 s in the queue"
    )


def test_a_claim_of_a_higher_priority() -> None:
    scene = harness({"reclaim": "always-recompute"}, num_blocks=6)
    for _ in range(2):
        scene.submit((0, 1, 2, 1), max_tokens=5)
    scene.step()
    scene.step()
    urgent = scene.submit((2, 2, 2, 2, 1), max_tokens=1, priority=1)
    scene.run_to_end()
    assert told(scene, urgent) == (
        "0.000 s  queued: 5 prompt tokens, at most 1 output token, priority 1, tenant t1\n"
        "1.000 s  r1 was preempted for it by recompute\n"
        "1.000 s  admitted after 1.000 s in the queue, since others were preempted for it\n"
        "1.000 s  choice 0 ended: length\n"
        "1.000 s  finished: 1 output token, 1.000 s in the queue"
    )
    assert (
        "3.000 s  preempted by recompute for r2, which lacked 1 block: victim policy least-computed ranked "
        "it 1 of 1; reclaim policy always-recompute chose how\n"
    ) in told(scene, "r1")


def test_policies_swapped_while_it_lived_a_lagging_reader_and_an_abort() -> None:
    scene = harness({}, num_blocks=8)
    name = scene.submit((0, 1, 2), max_tokens=9)
    scene.step()
    scene.scheduler.pause_request(name)
    host = scene.scheduler.policy_host
    scene.scheduler.set_policies(
        replace(host.policies, victim=registry.create("victim", "last-arrived", {})), scene.now
    )
    scene.step()
    scene.scheduler.resume_request(name)
    scene.abort(name)
    assert told(scene, name) == (
        "0.000 s  queued: 3 prompt tokens, at most 9 output tokens, tenant t0\n"
        "1.000 s  became the guarded request (head of the queue): no policy can hold it back\n"
        "1.000 s  admitted after 1.000 s in the queue, as the guarded request, whatever the policies say\n"
        "1.000 s  its reader lags behind: paused\n"
        "1.000 s  victim policy least-computed was replaced by last-arrived\n"
        "2.000 s  its reader reads on: resumed\n"
        "2.000 s  ended by RequestAborted: 1 output token, 1.000 s in the queue"
    )


def test_a_request_refused_on_arrival_is_explained() -> None:
    scene = harness({}, num_blocks=2)
    with pytest.raises(InvalidArgument):
        scene.submit((0,) * 9, max_tokens=2)
    assert told(scene, "r0") == "0.000 s  refused on arrival (9 prompt tokens): InvalidArgument"


def test_a_request_that_is_not_in_the_record_is_refused_by_its_id() -> None:
    scene = harness({}, num_blocks=8)
    with pytest.raises(NotInRecord, match="no request 'unknown' in this record of 0 entries"):
        told(scene, "unknown")


def test_an_empty_id_is_that_of_no_request() -> None:
    scene = harness({}, num_blocks=16)
    scene.submit((0, 1, 2), max_tokens=2)
    scene.step()
    with pytest.raises(NotInRecord, match="no request ''"):
        told(scene, "")


def test_a_request_that_is_older_than_the_record() -> None:
    scene = harness({}, num_blocks=16)
    name = scene.submit((0, 1, 2), max_tokens=20)
    scene.step()
    recorder = recorded(scene, num_steps=2)
    for _ in range(8):
        scene.step()
    assert len(recorder) > len(record_of(scene).entries)
    assert told(scene, name).split("\n")[0].endswith("running when the record begins")


def test_a_tenants_request_is_found_by_the_id_that_its_client_knows() -> None:
    scene = harness({}, num_blocks=8)
    scene.submit((0, 1, 2), max_tokens=2, request_id="alice/mine")
    scene.submit((0, 1, 2), max_tokens=2, request_id="alice/both")
    scene.submit((0, 1, 2), max_tokens=2, request_id="bob/both")
    scene.run_to_end()
    assert told(scene, "mine") == told(scene, "alice/mine")
    assert "finished" in told(scene, "bob/both")
    with pytest.raises(AmbiguousRequest, match="of 2 tenants; name one of alice/both, bob/both"):
        told(scene, "both")
    with pytest.raises(NotInRecord):
        told(scene, "alice")
