"""What no policy can break, one scenario each, through the public scheduler."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from support.core_harness import CoreHarness

from pageturner.policies import registry
from pageturner.policies.interfaces import AXES, PolicySet, Reclaim
from pageturner.policies.views import LoadView, Rates, VictimView
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.outputs import SchedulerOutput
from pageturner.service.core.request import RequestStatus
from pageturner.service.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    InvalidArgument,
    NonFiniteLogits,
    QueueFull,
    StepFailed,
)

OPTIONS = SchedulerOptions(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, watermark=0.0)


@dataclass(frozen=True)
class SwapWhateverTheRoom:
    def choose(self, victim: VictimView, num_blocks_short: int, rates: Rates, load: LoadView) -> Reclaim:
        return Reclaim.SWAP


def policies(**chosen: str) -> PolicySet:
    return registry.create_set({axis: chosen.get(axis, registry.DEFAULTS[axis]) for axis in AXES})


def harness(num_blocks: int = 8, block_size: int = 4, **arguments: object) -> CoreHarness:
    chosen = {axis: str(arguments.pop(axis)) for axis in AXES if axis in arguments}
    options = replace(OPTIONS, **arguments.pop("options", {}))  # type: ignore[arg-type]  # keyword names of the options
    return CoreHarness(
        policies(**chosen),
        num_blocks=num_blocks,
        block_size=block_size,
        options=options,
        **arguments,  # type: ignore[arg-type]  # forwarded as they come
    )


def scheduled_ids(output: SchedulerOutput) -> list[str]:
    return [part.request_id for part in output.scheduled]


# --- refused at submit -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "n", "field"),
    [
        (0, 1, 1, "prompt"),
        (64, 1, 1, "prompt"),
        (33, 1, 1, "prompt"),
        (4, 61, 1, "max_tokens"),
        (4, 30, 1, "max_tokens"),
        (4, 14, 2, "max_tokens"),
        (4, 1, 5, "n"),
    ],
)
def test_what_can_never_be_served_is_refused_by_field(
    prompt_tokens: int, max_tokens: int, n: int, field: str
) -> None:
    """vllm#39734, #35541: retried for ever, with all behind it, where it is not refused."""
    h = harness()
    with pytest.raises(InvalidArgument) as refusal:
        h.submit((0,) * prompt_tokens, max_tokens=max_tokens, n=n)
    assert refusal.value.field == field
    assert h.scheduler.stats().num_waiting == 0


def test_the_largest_request_that_fits_is_served() -> None:
    h = harness()
    h.submit((0,) * 4, max_tokens=29)
    h.submit((1,) * 4, max_tokens=13, n=2)
    h.run_to_end()
    h.check_finished()
    assert all(record.end is not None and record.end.error is None for record in h.records.values())


def test_a_full_queue_refuses_at_once_and_keeps_nothing() -> None:
    h = harness(options={"max_waiting": 2, "max_queued_tokens": 10})
    h.submit((0,) * 4, max_tokens=1)
    with pytest.raises(QueueFull):
        h.submit((0,) * 8, max_tokens=1)
    h.submit((0,) * 4, max_tokens=1)
    with pytest.raises(QueueFull):
        h.submit((0,), max_tokens=1)
    assert h.scheduler.stats().num_waiting == 2
    assert len(h.text.live) == 2


def test_an_id_in_use_is_refused() -> None:
    h = harness()
    h.submit((0,), max_tokens=1)
    with pytest.raises(DuplicateRequest):
        h.scheduler.add_request(h.records["r0"].new)


# --- who yields -------------------------------------------------------------------------------


def test_an_urgent_request_claims_blocks_from_lower_priorities_only() -> None:
    h = harness(num_blocks=6, admission="first-chunk", reclaim="always-recompute")
    low = h.submit((0,) * 10, max_tokens=8)
    h.submit((2,) * 4, max_tokens=2)  # the guarded request after the first ends
    for _ in range(3):
        h.step()
    h.submit((1,) * 6, max_tokens=4, priority=1)
    equal = h.submit((2, 1, 2, 1, 2, 1), max_tokens=4, priority=0)
    h.run_to_end()
    h.check_finished()
    assert h.records[low].end is not None
    assert h.records[equal].end is not None


def test_an_urgent_request_claims_slots() -> None:
    h = harness(options={"max_num_seqs": 2})
    guarded = h.submit((0,) * 2, max_tokens=12)
    low = h.submit((1,) * 2, max_tokens=12)
    h.step()
    h.step()
    urgent = h.submit((2,) * 2, max_tokens=2, priority=5)
    output = h.step()
    assert urgent in scheduled_ids(output)
    assert guarded in scheduled_ids(output)
    assert low not in scheduled_ids(output)
    h.run_to_end()
    h.check_finished()


def test_the_victim_set_is_minimal() -> None:
    """sglang#12494: preempts more than needed."""
    h = harness(num_blocks=6, block_size=4, admission="first-chunk", reclaim="always-recompute")
    for letter in (0, 1, 2):
        h.submit((letter,) * 7, max_tokens=8, seed=letter)
    for _ in range(3):
        h.step()
    assert h.scheduler.stats().num_recompute_preemptions_total == 1
    assert len(h.scheduler.state.running) == 2
    h.run_to_end()
    h.check_finished()


def test_a_shared_block_frees_nothing_until_all_its_holders_yield() -> None:
    h = harness(num_blocks=7, block_size=2, admission="first-chunk", reclaim="always-recompute")
    prompt = (0, 1, 2, 0, 1, 2, 0, 1)
    first = h.submit(prompt, max_tokens=4)
    h.step()
    h.submit(prompt, max_tokens=4, seed=1)
    h.submit(prompt, max_tokens=4, seed=2)
    h.run_to_end()
    h.check_finished()
    assert h.scheduler.stats().num_prefix_hit_tokens_total >= 12
    assert h.records[first].end is not None


def test_a_paused_request_is_the_first_to_yield() -> None:
    h = harness(num_blocks=6, block_size=4, admission="first-chunk", victim="last-arrived")
    for letter in (0, 1, 2):
        h.submit((letter,) * 6, max_tokens=12, seed=letter)
    h.step()
    h.step()
    h.scheduler.pause_request("r1")
    while h.scheduler.state.running.get(1) is not None:
        output = h.step()
        assert "r1" not in scheduled_ids(output)
    assert h.scheduler.state.running.get(2) is not None, "the paused request yields before the last arrived"
    h.scheduler.resume_request("r1")
    h.run_to_end()
    h.check_finished()


def test_a_pause_holds_no_one_else_and_ends_by_resume() -> None:
    h = harness()
    paused = h.submit((0,) * 4, max_tokens=6)
    other = h.submit((1,) * 4, max_tokens=6)
    h.scheduler.pause_request(paused)
    h.run_to_end()
    assert h.records[other].end is not None
    assert h.records[paused].end is None
    assert not h.scheduler.has_work()
    h.scheduler.resume_request(paused)
    h.run_to_end()
    h.check_finished()


@pytest.mark.parametrize("reclaim", registry.names("reclaim"))
@pytest.mark.parametrize("depth", [0, 1])
def test_thrash_ends_under_every_reclaim_policy(reclaim: str, depth: int) -> None:
    """vllm#37307, TensorRT-LLM#16827: admitted on a first chunk, over-subscribed, yet every one ends."""
    h = harness(
        num_blocks=8, num_host_blocks=16, admission="first-chunk", reclaim=reclaim, depth=depth,
        options={"max_num_seqs": 8, "max_num_batched_tokens": 8},
    )  # fmt: skip
    for index in range(12):
        h.submit((index % 3,) * 7, max_tokens=18, seed=index)
    h.run_to_end(3000)
    h.check_finished()
    stats = h.scheduler.stats()
    assert (
        stats.num_swap_preemptions_total
        + stats.num_recompute_preemptions_total
        + (stats.num_tail_preemptions_total)
        > 0
    )


def test_a_swap_without_host_room_becomes_a_recompute_and_is_counted() -> None:
    """vllm#787, #546: full swap space kills or stalls the engine."""
    chosen = replace(policies(admission="first-chunk"), reclaim=SwapWhateverTheRoom())
    h = CoreHarness(chosen, num_blocks=8, block_size=4, num_host_blocks=1, options=OPTIONS)
    for index in range(4):
        h.submit((index % 3,) * 7, max_tokens=16, seed=index)
    h.run_to_end()
    h.check_finished()
    stats = h.scheduler.stats()
    assert stats.num_recompute_preemptions_total + stats.num_tail_preemptions_total > 0
    assert stats.num_policy_faults_total > 0


# --- order ------------------------------------------------------------------------------------


def test_a_head_that_does_not_fit_is_looked_past_but_not_for_ever() -> None:
    """vllm#57841 the scan stops; sglang#23152 skipping starves: bounded by-passing is neither."""
    h = harness(num_blocks=8, options={"max_bypasses": 3, "max_num_seqs": 3}, queue="fcfs")
    h.submit((0,) * 4, max_tokens=20)
    h.step()
    big = h.submit((1,) * 24, max_tokens=2)
    for index in range(12):
        h.submit((2,) * 2, max_tokens=1, seed=index)
    small_ended_before_big = 0
    while h.records[big].end is None:
        h.step()
        small_ended_before_big = sum(h.records[f"r{i}"].end is not None for i in range(2, 14))
    assert 1 <= h.scheduler.stats().num_bypasses_total <= 3
    assert small_ended_before_big <= 4
    h.run_to_end()
    h.check_finished()


def test_a_starving_request_becomes_the_guarded_request() -> None:
    """sglang#31954: an order that never favours a request does not hold it for ever."""
    h = harness(queue="shortest-job-first", options={"max_num_seqs": 1, "starvation_seconds": 6.0})
    long_one = h.submit((0,) * 12, max_tokens=8)
    for index in range(3):
        h.submit((1,), max_tokens=3, seed=index)
    while h.records[long_one].end is None:
        h.step()
        h.submit((2,), max_tokens=2, seed=h.num_steps)
        assert h.num_steps < 60, "the long request starves"
    h.run_to_end()
    h.check_finished()


def test_a_waiter_for_a_producer_shares_its_blocks_instead_of_computing_them() -> None:
    h = harness(num_blocks=16, options={"max_num_batched_tokens": 8})
    prompt = (0, 1, 2, 0) * 4
    h.submit(prompt, max_tokens=2)
    h.submit(prompt, max_tokens=2, seed=1)
    first = h.step()
    assert scheduled_ids(first) == ["r0"]
    h.run_to_end()
    h.check_finished()
    end = h.records["r1"].end
    assert end is not None
    assert end.usage.num_cached_prompt_tokens == 15


def test_other_tags_never_share_or_wait() -> None:
    h = harness(num_blocks=16)
    prompt = (0, 1, 2, 0) * 2
    h.submit(prompt, max_tokens=2)
    h.submit(prompt, max_tokens=2, salt="other")
    h.submit(prompt, max_tokens=2, bypass=True)
    h.step()
    assert len(h.scheduler.state.running) >= 2
    h.run_to_end()
    assert h.scheduler.stats().num_prefix_hit_tokens_total == 0
    h.check_finished()


def test_a_full_hit_computes_one_token_and_writes_nothing() -> None:
    h = harness(num_blocks=16)
    prompt = (0, 1, 2, 0) * 3
    h.submit(prompt, max_tokens=1)
    h.run_to_end()
    h.submit(prompt, max_tokens=1, seed=1)
    (part,) = h.step().scheduled
    assert (part.start, part.end, part.write_start) == (11, 12, 12)
    h.run_to_end()
    h.check_finished()


def test_three_turns_of_a_chat_hit_the_blocks_that_the_answers_generated() -> None:
    h = harness(num_blocks=32)
    history: tuple[int, ...] = (0, 1, 2, 0, 1)
    cached = []
    for turn in range(3):
        request_id = h.submit(history, max_tokens=8, seed=turn)
        h.run_to_end()
        record = h.records[request_id]
        assert record.end is not None
        cached.append(record.end.usage.num_cached_prompt_tokens)
        history += (*record.outputs[0], 2, 1, 0)
    # Turn 1 ends with KV of 5 + 7 tokens, 3 full blocks; turn 2 with 16 + 7, 5 blocks.
    assert cached == [0, 12, 20]
    h.check_finished()


# --- n > 1 ------------------------------------------------------------------------------------


def test_choices_share_the_prompt_and_copy_on_write() -> None:
    h = harness(num_blocks=16)
    h.submit((0, 1, 2, 0, 1, 2), max_tokens=6, n=3)
    h.step()
    manager = h.scheduler.manager
    tables = [manager.table(s) for s in h.scheduler.state.running[0].sequences]
    assert tables[0] == tables[1] == tables[2]
    h.step()
    assert h.scheduler.stats().num_copied_blocks_total == 2
    h.run_to_end()
    h.check_finished()
    outputs = h.records["r0"].outputs
    assert len({tuple(tokens) for tokens in outputs.values()}) == 3


def test_after_a_recompute_the_prompt_is_computed_once_for_all_choices() -> None:
    h = harness(num_blocks=16, enable_prefix_caching=False)
    request_id = h.submit((0, 1, 2, 0, 1, 2), max_tokens=6, n=3)
    h.submit((2,), max_tokens=6)
    h.step()
    h.step()
    h.fail()  # every member starts over, its tokens kept
    request = next(iter(h.scheduler.state.waiting))
    assert request.status is RequestStatus.WAITING
    assert not request.is_forked
    (part,) = (part for part in h.step().scheduled if part.request_id == request_id)
    assert (part.start, part.end, part.samples) == (0, 6, ())
    h.run_to_end()
    h.check_finished()
    assert h.records[request_id].end is not None


def test_aborting_a_request_aborts_all_its_choices() -> None:
    """vllm#14326: an abort with n > 1 leaks children."""
    h = harness(num_blocks=16)
    request_id = h.submit((0, 1, 2, 0, 1, 2), max_tokens=6, n=3)
    h.step()
    h.step()
    h.abort(request_id)
    h.check_finished()


# --- ends -------------------------------------------------------------------------------------


def test_late_results_for_an_aborted_request_are_no_error() -> None:
    """LMCache#4185, sglang#36475."""
    h = harness(depth=1)
    request_id = h.submit((0,) * 4, max_tokens=6)
    h.step()
    h.abort(request_id)
    h.abort(request_id)
    assert h.scheduler.manager.device.num_pending == 1
    h.update()
    h.check_finished()


def test_a_deadline_ends_a_request_wherever_it_stands() -> None:
    h = harness(options={"max_num_seqs": 1})
    running = h.submit((0,) * 4, max_tokens=12, deadline=4.0)
    waiting = h.submit((1,) * 4, max_tokens=12, deadline=3.0)
    h.run_to_end()
    h.check_finished()
    assert isinstance(h.error_of(running), DeadlineExceeded)
    assert isinstance(h.error_of(waiting), DeadlineExceeded)
    assert h.now <= 6.0


def test_non_finite_logits_end_one_request_and_clear_what_it_computed() -> None:
    h = harness(num_blocks=16)
    prompt = (0, 1, 2, 0) * 2
    bad = h.submit(prompt, max_tokens=4)
    good = h.submit((2,) * 4, max_tokens=4)
    h.model.poisoned_requests.add(bad)
    h.step()
    assert isinstance(h.error_of(bad), NonFiniteLogits)
    assert all(not h.scheduler.manager.device.is_cached(block) for block in (0, 1))
    assert set(h.step().block_copies.clears) == {0, 1}
    h.run_to_end()
    assert h.error_of(good) is None
    h.check_finished()


def test_of_a_failing_batch_only_the_request_to_blame_fails() -> None:
    """A step fails whenever request r2 is in it: halving finds it, the others end as if alone."""
    h = harness(num_blocks=24, options={"max_num_seqs": 8})
    for index in range(6):
        h.submit((index % 3,) * 4, max_tokens=4, seed=index)
    for _ in range(200):
        if not h.scheduler.has_work():
            break
        h.now += 1.0
        output = h.scheduler.schedule(h.now)
        sampled = h.model.run(output)
        if any(part.request_id == "r2" for part in output.scheduled):
            h.take(h.scheduler.fail_step(output, RuntimeError("poison"), h.now))
        else:
            h.take(h.scheduler.update(output, sampled, h.now))
        h.check()
        h.poison_free_blocks()
    h.check_finished()
    for index in range(6):
        error = h.error_of(f"r{index}")
        assert isinstance(error, StepFailed) if index == 2 else error is None


def test_a_failed_step_caches_nothing() -> None:
    """text-generation-inference#2489: blocks published, batch dropped, the next hit reads garbage."""
    h = harness(num_blocks=16)
    h.submit((0, 1, 2, 0) * 2, max_tokens=2)
    h.fail()
    assert h.scheduler.manager.device.num_evictable == 0
    h.run_to_end()
    h.check_finished()


def test_prefill_first_lets_decodes_wait_for_a_prompt() -> None:
    """A batch policy's split binds: decodes do not eat the share that was left to prefills."""
    outputs = {}
    for batch in ("decode-first", "prefill-first"):
        h = harness(num_blocks=32, batch=batch, options={"max_num_batched_tokens": 8})
        guarded, decoding = (h.submit((letter,) * 4, max_tokens=20) for letter in (0, 1))
        h.step()
        h.submit((2,) * 30, max_tokens=2)
        h.step()  # the long prompt starts
        outputs[batch] = scheduled_ids(h.step())
        assert guarded in outputs[batch]
        h.run_to_end()
        h.check_finished()
    assert decoding in outputs["decode-first"]
    assert decoding not in outputs["prefill-first"]


def test_a_request_that_can_no_longer_meet_its_deadline_is_shed_before_it_takes_a_block() -> None:
    """At one second a token, eight tokens cannot start later than eight seconds before the deadline."""
    rates = Rates(prefill_seconds_per_token=1.0, prefill_seconds_per_token_context=0.0)
    h = harness(rates=rates, options={"max_num_seqs": 1})
    h.submit((0,) * 4, max_tokens=20)
    h.step()
    late = h.submit((1,) * 8, max_tokens=2, deadline=h.now + 12.0)
    while h.records[late].end is None:
        h.step()
    assert isinstance(h.error_of(late), DeadlineExceeded)
    assert 4.0 <= h.now - h.records[late].new.arrival_time < 12.0
    h.run_to_end()
    h.check_finished()


def test_a_cached_prompt_may_start_later() -> None:
    rates = Rates(prefill_seconds_per_token=1.0, prefill_seconds_per_token_context=0.0)
    h = harness(num_blocks=16, rates=rates, options={"max_num_seqs": 1})
    h.submit((1,) * 8, max_tokens=1)
    h.run_to_end()
    h.submit((0,) * 4, max_tokens=8)
    h.step()
    in_time = h.submit((1,) * 8, max_tokens=1, deadline=h.now + 12.0)
    h.run_to_end()
    h.check_finished()
    assert h.error_of(in_time) is None


# --- the guarded request and priorities -------------------------------------------------------

URGENT = 100


@pytest.mark.fault("B")
@pytest.mark.parametrize(("n", "slots"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("queue", ["priority", "fcfs"])
def test_an_urgent_request_takes_slots_and_guarantee_from_a_less_urgent_one(
    n: int, slots: int, queue: str
) -> None:
    h = harness(queue=queue, num_blocks=16, options={"max_num_seqs": slots})
    low = h.submit((0,) * 4, max_tokens=12, n=n)
    h.step()
    h.step()
    urgent = h.submit((1,) * 4, max_tokens=4, n=n, priority=URGENT)
    assert urgent in scheduled_ids(h.step())
    assert h.scheduler.guarded_id == urgent
    while h.records[urgent].end is None:
        assert low not in scheduled_ids(h.step())
    h.run_to_end()
    h.check_finished()


@pytest.mark.fault("B")
@pytest.mark.parametrize("reclaim", ["always-recompute", "always-swap"])
def test_an_urgent_request_takes_blocks_from_the_guarded_one(reclaim: str) -> None:
    h = harness(num_blocks=6, queue="priority", reclaim=reclaim, num_host_blocks=8)
    low = h.submit((0,) * 12, max_tokens=12)
    for _ in range(6):
        h.step()
    assert h.scheduler.guarded_id == low
    urgent = h.submit((1,) * 12, max_tokens=8, priority=URGENT)
    h.step()
    assert urgent in scheduled_ids(h.step())
    h.run_to_end()
    h.check_finished()


@pytest.mark.fault("B")
def test_a_stream_of_urgent_requests_holds_a_waiting_one_up_until_the_starvation_bound() -> None:
    h = harness(queue="priority", options={"max_num_seqs": 1, "starvation_seconds": 10.0})
    low = h.submit((0,) * 4, max_tokens=8)
    h.step()
    while h.records[low].end is None:
        assert h.num_steps < 30, "the less urgent one starves"
        h.submit((1,) * 2, max_tokens=1, priority=URGENT)
        h.step()
    assert h.num_steps > 10


@pytest.mark.fault("B")
def test_a_guarded_request_yields_to_urgent_ones_no_more_often_than_max_preemptions() -> None:
    limits = {"max_num_seqs": 1, "max_preemptions": 3}
    h = harness(queue="priority", reclaim="always-recompute", options=limits)
    low = h.submit((0,) * 4, max_tokens=20)
    while h.records[low].end is None:
        assert h.num_steps < 60, "the less urgent one starves"
        if low in scheduled_ids(h.step()):
            h.submit((1,) * 2, max_tokens=1, priority=URGENT)
    assert h.scheduler.stats().num_recompute_preemptions_total == 3


@pytest.mark.fault("B")
def test_an_equally_urgent_request_leaves_the_guarantee_where_it_is() -> None:
    h = harness(queue="shortest-job-first", options={"max_num_seqs": 1})
    first = h.submit((0,) * 4, max_tokens=8, priority=5)
    h.step()
    h.submit((1,) * 2, max_tokens=1, priority=5)
    assert scheduled_ids(h.step()) == [first]
    assert h.scheduler.guarded_id == first


def test_a_guarded_request_of_one_token_a_choice_claims_slots_for_the_block_that_its_choices_share() -> None:
    h = harness(num_blocks=2, block_size=3, admission="first-chunk", options={"max_num_seqs": 3})
    first = h.submit((0,), max_tokens=3)
    running = h.submit((1,), max_tokens=3)
    h.step()
    waiting = h.submit((2,), max_tokens=1, n=3)
    h.abort(first)
    while h.records[running].end is None and h.records[waiting].end is None:
        h.scheduler.state.guarded = h.scheduler.state.requests[waiting]
        assert waiting in scheduled_ids(h.step())
    h.run_to_end()
    h.check_finished()
