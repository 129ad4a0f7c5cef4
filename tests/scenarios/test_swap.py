"""Copies between device and host, and whatever ends while they are under way.

Each test says which guard it leans on: without that guard it fails.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from support.fake_model import FakeModel
from support.scenarios import Scenario, policies, scenario

from pageturner.policies.interfaces import Reclaim
from pageturner.policies.views import LoadView, Rates, VictimView
from pageturner.service.core.outputs import SampledSequence, SampledToken, SchedulerOutput, TokenEvent
from pageturner.service.core.request import RequestStatus


@dataclass(frozen=True)
class SwapWhateverTheRoom:
    """An answer that cannot be had where the host is full."""

    def choose(self, victim: VictimView, num_blocks_short: int, rates: Rates, load: LoadView) -> Reclaim:
        return Reclaim.SWAP


def swapping(
    *,
    depth: int = 1,
    num_host_blocks: int = 24,
    num_blocks: int = 10,
    block_size: int = 2,
    reclaim: SwapWhateverTheRoom | None = None,
) -> Scenario:
    """Six requests where three fit, every victim swapped. reclaim: instead of always-swap."""
    chosen = policies(reclaim="always-swap", admission="first-chunk")
    h = scenario(
        num_blocks, block_size, num_host_blocks=num_host_blocks, depth=depth, caching=False,
        chosen=replace(chosen, reclaim=reclaim or chosen.reclaim), options={"max_num_seqs": 8},
    )  # fmt: skip
    for seed in range(6):
        h.submit((seed % 3,) * 3, max_tokens=9, seed=seed)
    return h


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_host_blocks", [0, 1, 2, 3, 5, 24])
@pytest.mark.parametrize("asks", [True, False])
def test_vllm_787_546_requests_finish_with_full_swap_space(
    num_host_blocks: int, depth: int, asks: bool
) -> None:
    """Host blocks for none, a part of one, or one request: the rest is recomputed, whatever the policy asks.

    Leans on _how looking at the host's room before it takes a swap for an answer.
    """
    h = swapping(
        depth=depth, num_host_blocks=num_host_blocks, reclaim=None if asks else SwapWhateverTheRoom()
    )
    h.finish_all()
    stats = h.scheduler.stats()
    assert asks or num_host_blocks > 3 or stats.num_policy_faults_total > 0
    assert stats.num_swap_preemptions_total + stats.num_recompute_preemptions_total > 0
    assert num_host_blocks > 3 or stats.num_recompute_preemptions_total > 0
    assert num_host_blocks < 24 or stats.num_swap_preemptions_total > 0


def blocks_of(output: SchedulerOutput, kind: str) -> bool:
    return bool(getattr(output.block_copies, kind))


@pytest.mark.parametrize("kind", ["swap_outs", "swap_ins", "copies"])
@pytest.mark.parametrize("who", ["those copied", "all"])
def test_sglang_21652_vllm_46283_an_abort_during_a_copy(kind: str, who: str) -> None:
    """The request ends while its copy is in flight: its blocks come back when that is over, not before.

    Leans on releases being fenced by the last step that has to do with the request.
    """
    h = swapping() if kind != "copies" else scenario(24, 2, depth=1, caching=False)
    if kind == "copies":
        for seed in range(2):
            h.submit((seed, 1, 2), max_tokens=5, n=2, seed=seed)
    for _ in range(60):
        h.now += 1.0
        output = h.scheduler.schedule(h.now)
        if output:
            h.in_flight.append((output, h.model.run(output)))
        if blocks_of(output, kind):
            break
        while h.in_flight:
            h.update()
    assert blocks_of(output, kind), "nothing was copied"
    copies = getattr(output.block_copies, kind)
    device, host = h.scheduler.manager.device, h.scheduler.manager.host
    status = RequestStatus.SWAPPED if kind == "swap_outs" else RequestStatus.RUNNING
    affected = [r.request_id for r in h.watched.live_requests() if r.status is status]
    for request_id in affected if who == "those copied" else list(h.records):
        if not h.has_ended(request_id):
            h.abort(request_id)
    for copy in copies:
        source, destination = (
            (device, host)
            if kind == "swap_outs"
            else (host, device)
            if kind == "swap_ins"
            else (device, device)
        )
        assert not destination.is_available(copy.destination), "it would be overwritten while it is written"
        if kind != "swap_outs":
            assert not source.is_available(copy.source), "it would be overwritten while it is read"
    h.check()
    h.update()
    h.poison_free_blocks()
    h.run_to_end()
    h.check_finished()
    assert (device.num_pending, host.num_pending) == (0, 0)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_vllm_45704_47282_stores_read_after_and_loads_write_before_compute(
    depth: int, block_size: int
) -> None:
    """A victim's last token is still in flight when it is stored; a block stored is loaded into in the same
    step; tokens stay those of unlimited memory.

    Leans on the order of KvCache.apply, and on swap-outs alone being free to be reused in their step.
    """
    h = swapping(depth=depth, block_size=block_size, num_blocks=20 // block_size)
    num_fresh_stores = num_reused = 0
    previous: set[int] = set()
    while h.scheduler.has_work() or h.in_flight:
        output = h.step()
        copies = output.block_copies
        stored = {copy.source for copy in copies.swap_outs}
        num_fresh_stores += len(stored & previous)
        used = {block for part in output.scheduled for block in part.block_table}
        reused = stored & (used | {copy.destination for copy in copies.swap_ins})
        num_reused += len(reused)
        assert depth == 0 or not reused & previous, "the step in flight still writes to it"
        assert not {copy.destination for copy in copies.swap_outs} & {copy.source for copy in copies.swap_ins}
        previous = used
    h.finish_all()
    assert num_fresh_stores > 0
    assert num_reused > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_vllm_47282_a_load_into_blocks_that_a_store_of_the_same_step_leaves(depth: int) -> None:
    """The guarded request's growth swaps an urgent one out, which then takes the blocks of the least urgent.

    Leans on KvCache.apply storing before it loads.
    """
    h = scenario(
        8, 2, num_host_blocks=16, depth=depth, reclaim="always-swap", victim="last-arrived",
        admission="first-chunk", caching=False,
    )  # fmt: skip
    h.submit((0, 1, 2), max_tokens=10)
    h.submit((1,) * 5, max_tokens=8, priority=0)
    h.step()
    h.submit((2,) * 5, max_tokens=8, priority=1)
    num_reused = 0
    while h.scheduler.has_work() or h.in_flight:
        copies = h.step().block_copies
        stored = {copy.source for copy in copies.swap_outs}
        num_reused += len(stored & {copy.destination for copy in copies.swap_ins})
    h.finish_all()
    assert num_reused > 0


def test_vllm_46014_no_request_is_swapped_in_while_it_is_being_swapped_out() -> None:
    """What one step stores a later one loads, never the same, and only if that comes after it on the device.

    Leans on a yielding request not being scheduled in its own step, and on steps being carried out in order.
    """
    h = swapping(depth=1)
    stored_at: dict[int, int] = {}
    num_loaded = 0
    while h.scheduler.has_work() or h.in_flight:
        output = h.step()
        decision = h.decisions[-1]
        assert not set(decision.preempted) & (set(decision.started) | set(decision.scheduled))
        for copy in output.block_copies.swap_ins:
            num_loaded += 1
            assert stored_at[copy.source] < output.step_id
        stored_at |= {copy.destination: output.step_id for copy in output.block_copies.swap_outs}
    h.finish_all()
    assert num_loaded > 0


class ModelWithLogprobs(FakeModel):
    """Each token's log-probability tells the position that it was sampled for."""

    def run(self, output: SchedulerOutput) -> tuple[SampledSequence, ...]:
        position_of = {row.seq_id: part.end for part in output.scheduled for row in part.samples}
        return tuple(
            SampledSequence(
                result.seq_id,
                result.epoch,
                tuple(SampledToken(t.token_id, -float(position_of[result.seq_id])) for t in result.tokens),
            )
            for result in super().run(output)
        )


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("reclaim", ["always-recompute", "always-swap", "tail-first"])
@pytest.mark.parametrize("n", [1, 2])
def test_sglang_20724_no_accumulator_keeps_what_a_retraction_took(
    reclaim: str, depth: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, their logprobs and the history that penalties see, each position once and in order.

    Leans on results of an older epoch being dropped whole, and on tokens only ever being appended.
    """
    h = scenario(
        10, 2, num_host_blocks=24, depth=depth, reclaim=reclaim, admission="first-chunk", caching=False,
        options={"max_num_seqs": 8},
    )  # fmt: skip
    h.model = ModelWithLogprobs(10, 24, 2)
    positions: dict[tuple[str, int], list[float]] = {}
    take = h.take

    def collect(events: tuple[object, ...]) -> None:
        for event in events:
            if isinstance(event, TokenEvent):
                seen = positions.setdefault((event.request_id, event.index), [])
                seen.extend(-(token.logprob or 0.0) for token in event.tokens)
        take(events)  # type: ignore[arg-type]  # the very events it was given

    monkeypatch.setattr(h, "take", collect)
    for seed in range(5):
        h.submit((seed % 3,) * 3, max_tokens=7, n=n, seed=seed, penalty=1.0)
    while h.scheduler.has_work() or h.in_flight:
        output = h.step()
        for part in output.scheduled:
            for row in part.samples:
                assert len(row.prompt_token_ids) + len(row.output_token_ids) == part.end
    h.finish_all()
    assert h.num_preemptions > 0
    assert len(positions) == 5 * n
    for (request_id, _), seen in positions.items():
        start = len(h.records[request_id].new.prompt_token_ids)
        assert seen == list(range(start, start + 7))


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_prompt", [3, 4, 5, 6])
def test_sglang_9989_a_tail_is_counted_in_blocks(block_size: int, num_prompt: int) -> None:
    """Tails are cut at the border of a block and free as many blocks as were lacking, no fraction less.

    Leans on tail_cuts counting blocks, and on KV falling to the border below.
    """
    h = scenario(
        24 // block_size, block_size, reclaim="tail-first", admission="first-chunk", caching=False,
        options={"max_num_seqs": 8},
    )  # fmt: skip
    for seed in range(6):
        h.submit((seed % 3,) * num_prompt, max_tokens=9, seed=seed)
    num_tails = 0
    while h.scheduler.has_work():
        h.step()
        decision = h.decisions[-1]
        for request_id in decision.preempted:
            request = h.request(request_id)
            (sequence,) = request.sequences
            kept = h.scheduler.manager.num_blocks(sequence)
            num_tails += kept > 0
            assert sequence.num_kv_tokens <= kept * block_size
            assert sequence.num_kv_tokens % block_size == 0 or kept == 0
            assert kept < len(decision.held[request_id]), "a victim that gave nothing"
            assert request.num_preemptions_by_kind[Reclaim.SWAP] == 0
        if decision.only_decodes and not decision.started and not decision.num_pending:
            lacking = {r for r, count in decision.lacking.items() if count} - set(decision.preempted)
            assert lacking <= set(decision.scheduled), "too little was freed"
    h.finish_all()
    assert num_tails > 0 or block_size == 4
